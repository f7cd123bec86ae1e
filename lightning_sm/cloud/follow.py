"""Waiting for a job to end, while showing its state and, on request, its log."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from lightning_sm._log import command_logger
from lightning_sm._text import for_terminal, plain
from lightning_sm.cloud.aws import Clients, error_code
from lightning_sm.cloud.find import Found, Kind, describe
from lightning_sm.cloud.logs import Log

_LOG = command_logger(__name__)

_EVERY_S = 5.0
# How many times to read the log after the job has ended, because its last lines arrive late.
_LAST_LOOKS = 2
# The service has no field for the exit code, but appends it to the reason, as in "AlgorithmError: <failure file>, exit
# code: 137".
_EXIT_CODE = re.compile(r"exit code:? (\d+)\s*\.?\s*$")

Sleep = Callable[[float], object]


def follow(clients: Clients, kind: Kind, name: str, *, shows_log: bool, sleep: Sleep = time.sleep) -> Mapping[str, Any]:
    """Wait until a job ends; log each change of its state and, on request, write the job's log to stdout.

    Ctrl-C or an error ends the wait, but not the job. A warning then tells the user how to stop the job.

    Args:
        clients: Clients for the AWS APIs.
        kind: The kind of job.
        name: Name of the job.
        shows_log: Whether to write the log, if permissions allow it. A tuning job has no log; the counts of its
            training jobs are shown instead.
        sleep: Sleeps for the given number of seconds.

    Returns:
        The last description of the job.

    Raises:
        ClientError: AWS rejects a request, for example after the credentials have expired.
        BotoCoreError: AWS cannot be reached.
    """
    state = ""
    log = Log(clients.logs, name) if shows_log and kind == "training" else None
    try:
        while True:
            found = describe(clients, kind, name)
            before, state = state, _state(found)
            if state != before:
                _LOG.info("%s", state)
            log = log and _write_new(log)
            if found.has_ended:
                break
            sleep(_EVERY_S)
        for _ in range(_LAST_LOOKS if log else 0):
            sleep(_EVERY_S)
            log = log and _write_new(log)
    except (KeyboardInterrupt, ClientError, BotoCoreError):
        _LOG.warning(
            "Stopped waiting. The job may still be running and billed.\n"
            "  Follow it: lightning-sm jobs logs -f %s\n"
            "  Stop it:   lightning-sm jobs stop %s",
            name,
            name,
        )
        raise
    return found.description


def exit_code(description: Mapping[str, Any]) -> int:
    """Return the exit code of a job that has ended: 0 for success, else the hosts' exit code if known, else 1.

    Args:
        description: The description of a training job or a tuning job.
    """
    status = description.get("TrainingJobStatus") or description.get("HyperParameterTuningJobStatus")
    if status == "Completed":
        return 0
    match = _EXIT_CODE.search(reason_of(description))
    return int(match[1]) or 1 if match else 1


def reason_of(description: Mapping[str, Any]) -> str:
    """Return why a job failed, in the service's words; empty if it gives no reason."""
    return plain(str(description.get("FailureReason", "")))  # without escape sequences, as it is logged


def _state(found: Found) -> str:
    """Return the state of a job in one line."""
    if found.kind == "tuning":
        return f"Tuning job {found.name} is {found.status}: {tuning_progress(found.description)}"
    transitions = found.description.get("SecondaryStatusTransitions") or [{}]
    message = transitions[-1].get("StatusMessage", "")
    return f"Job {found.name} is {found.status}: {found.description.get('SecondaryStatus', '')} {message}".rstrip()


def tuning_progress(description: Mapping[str, Any]) -> str:
    """Return the number of a tuning job's training jobs in each state, and the best training job.

    Args:
        description: A response from DescribeHyperParameterTuningJob.
    """
    counters = description["TrainingJobStatusCounters"]
    failed = counters.get("RetryableError", 0) + counters.get("NonRetryableError", 0)
    counts = {
        "completed": counters.get("Completed", 0),
        "running": counters.get("InProgress", 0),
        "stopped early": counters.get("Stopped", 0),
        "failed": failed,
    }
    words = ", ".join(f"{count} {word}" for word, count in counts.items() if count) or "no training job yet"
    best = description.get("BestTrainingJob")
    metric = (best or {}).get("FinalHyperParameterTuningJobObjectiveMetric")
    if best is None or metric is None:
        return words
    values = " ".join(f"{key}={value}" for key, value in sorted(best["TunedHyperParameters"].items()))
    return f"{words}; best {metric['MetricName']}={metric['Value']:.6g} by {best['TrainingJobName']} with {values}"


def _write_new(log: Log) -> Log | None:
    """Write a log's new lines; return the log, or None if access to it is denied, so that the wait can continue."""
    try:
        for line in log.new_lines():
            sys.stdout.write(for_terminal(f"{line}\n", sys.stdout))
    except ClientError as error:
        if error_code(error) != "AccessDeniedException":
            raise
        _LOG.warning("Waiting without the job's log, which cannot be read: %s", error)
        return None
    sys.stdout.flush()
    return log
