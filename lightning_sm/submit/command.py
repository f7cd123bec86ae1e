"""The command line of ``lightning-sm submit``: a job file, options that win over it, and what to do with it."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser
from jsonargparse.typing import PositiveFloat

from lightning_sm.errors import SubmitError
from lightning_sm.submit.job_file import add_arguments, parse_job
from lightning_sm.submit.sdk.version import sdk_version

_LOG = logging.getLogger(__name__)

_MODES = ("dry_run", "local", "cloud")
_USAGE = "lightning-sm submit JOB.yaml (--dry-run | --local | --cloud) [--KEY=VALUE ...]"
_DESCRIPTION = """\
Submit a training job: from one YAML file to the SageMaker SDK, version 2 or 3, whichever is installed.
"lightning-sm submit job.yaml --dry-run" checks the job and shows the request; "--local" runs it in the SDK's local
mode; "--cloud" sends it. Every key of the file is an option, too, and wins over the file: --groups.trainer.count=4.
"""


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code.

    Args:
        argv: The arguments after ``submit``.

    Returns:
        0; 1 if the job failed in the cloud; in local mode the exit code of a host.

    Raises:
        SDKError: There is no SDK.
        SubmitError: The job cannot be submitted; nothing was sent.
    """
    parser = _parser()
    try:
        job, options = parse_job(parser, _with_job_option(argv))
    except ArgumentError as error:
        raise SubmitError(f"{error}\n{_USAGE}") from error
    stated = [f"--{mode.replace('_', '-')}" for mode in _MODES if options[mode]]
    if len(stated) != 1:
        raise SubmitError(f"Say what to do, with one of them: {' and '.join(stated) or 'nothing'} is stated.\n{_USAGE}")
    sdk_version()  # with the SDK, boto3 is there, too
    from lightning_sm.submit import submit  # noqa: PLC0415

    if options.dry_run:
        with contextlib.redirect_stdout(sys.stderr):  # where SDK v2 writes what it reads
            request = submit.dry_run(job)
        json.dump(request, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return 0
    if options.local:
        return submit.run_locally(job, timeout_s=options.timeout_s, keeps=options.keep)
    return _sent(submit.send(job, waits=options.wait))


def _sent(description: Mapping[str, Any]) -> int:
    status = description.get("TrainingJobStatus")
    if status in {None, "Completed"}:  # None: nobody waited
        return 0
    _LOG.error("lightning-sm: the job is %s: %s", status, description.get("FailureReason", "no reason given"))
    return 1


def _with_job_option(argv: Sequence[str]) -> list[str]:
    """Let the file be named without --job, wherever no option takes the word as its value."""
    words = list(argv)
    flags = {f"--{mode.replace('_', '-')}" for mode in _MODES} | {"--keep"}
    at = next((index for index, word in enumerate(words) if word not in flags), len(words))
    if at < len(words) and not words[at].startswith("-"):
        words.insert(at, "--job")
    return words


def _parser() -> ArgumentParser:
    parser = ArgumentParser(usage=_USAGE, description=_DESCRIPTION, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--dry-run", action="store_true", help="check the job and print the request; send nothing")
    parser.add_argument("--local", action="store_true", help="run it in the SDK's local mode, with Docker")
    parser.add_argument("--cloud", action="store_true", help="send it, and wait for its end")
    parser.add_argument("--wait", type=bool, default=True, help="with --cloud: false to return after submission")
    parser.add_argument("--timeout_s", type=PositiveFloat | None, help="with --local: end everything after that long")
    parser.add_argument("--keep", action="store_true", help="with --local: leave the containers for a closer look")
    add_arguments(parser)
    return parser
