"""The run report, which the main host's launcher creates when the job ends, successfully or not.

A separate process writes it: Matplotlib takes memory and several seconds, and its errors or hangs must not change
the job's outcome.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

from lightning_sm._log import command_logger
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.record.events import record_folder

_LOG = command_logger(__name__)

NAME = "report.html"


def write_report(job: SageMakerJob, prices: Mapping[str, float], limit_s: float) -> None:
    """Write the report to the folder for output data, if training processes wrote a record; never raise.

    Args:
        job: The job.
        prices: Hourly prices, by instance type or group.
        limit_s: Time limit in seconds.
    """
    folder = record_folder(job)
    if limit_s <= 0 or not any(folder.glob(f"*/{job.current_host}-rank-*.jsonl")):
        return
    file = job.output_dir / "data" / NAME
    command = [sys.executable, "-m", "lightning_sm", "report", str(folder), "-o", str(file)]
    command += [] if job.name is None else ["--job", job.name]
    command += [f"--price={name}={price}" for name, price in prices.items()]
    try:
        # Do not run in the folder of the user's code: its modules could shadow the report's imports.
        done = subprocess.run(
            command,
            cwd=job.output_dir,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        _say(late.stdout)
        _LOG.warning("the report of the run was not written within %.0f s. Write it with lightning-sm report.", limit_s)
    except OSError as error:
        _LOG.warning("the report of the run cannot be written: %s.", error.strerror)
    else:
        _say(done.stdout)
        if done.returncode == 0:
            _LOG.info("report of the run: %s", file)
        else:
            why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            _LOG.warning("the report of the run was not written (%s)", why)


def _say(output: str | bytes | None) -> None:
    """Log the output of the command, which is the verdict in the report."""
    text = output.decode(errors="replace") if isinstance(output, bytes) else output or ""
    for line in text.splitlines():
        _LOG.info("%s", line)
