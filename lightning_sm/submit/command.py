"""``lightning-sm submit``: a job file, options that override it, and what to do with the job."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from jsonargparse import ArgumentError, ArgumentParser
from jsonargparse.typing import PositiveFloat

from lightning_sm._log import command_logger
from lightning_sm._untested import SERVICE
from lightning_sm.errors import SubmitError
from lightning_sm.submit.job_file import add_arguments, parse_job
from lightning_sm.submit.sdk.version import sdk_version

_LOG = command_logger(__name__)

_FLAGS = {"--dry-run", "--local", "--cloud", "--keep", "--follow"}
_USAGE = "lightning-sm submit JOB.yaml (--dry-run | --local | --cloud) [--KEY=VALUE ...]"
_DESCRIPTION = """\
Submit a training job that is described in a YAML file, with version 2 or 3 of the SageMaker SDK, whichever is
installed. "lightning-sm submit job.yaml --dry-run" checks the job and prints the request; "--local" runs it in the
SDK's local mode; "--cloud" submits it, and with "--follow" shows its log until it ends. Every key of the file is also
an option and overrides the file, for example --groups.trainer.count=4.
"""


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code.

    Args:
        argv: The arguments after ``submit``.

    Returns:
        0; if the job failed, the exit code of a host where it is known, else 1.

    Raises:
        AWSError: Region or credentials are missing.
        SDKError: The SDK is not installed.
        SubmitError: The job cannot be submitted; nothing was sent.
    """
    try:
        job, options = parse_job(_parser(), _with_job_option(argv))
    except ArgumentError as error:
        raise SubmitError(f"{error}\nusage: {_USAGE}") from error
    if not options.wait and options.follow:
        raise SubmitError("--wait=false and --follow contradict each other: leave one out.")
    sdk_version()  # before the next import, which needs boto3: it comes with the SDK
    from lightning_sm.cloud.follow import exit_code, reason_of  # noqa: PLC0415
    from lightning_sm.submit import submit  # noqa: PLC0415

    if options.dry_run:
        json.dump(submit.dry_run(job), sys.stdout, indent=2)
        sys.stdout.write("\n")
        sys.stdout.flush()
        _LOG.info("0 problems; nothing was sent")
        return 0
    if options.local:
        return submit.run_locally(job, timeout_s=options.timeout_s, keep=options.keep)
    description = submit.send(job, wait=options.wait, shows_log=options.follow)
    code = exit_code(description) if options.wait else 0
    if code:
        _LOG.error("the job did not complete: %s", reason_of(description) or "no reason given")
    return code


def _with_job_option(argv: Sequence[str]) -> list[str]:
    """Insert --job before a file that is named without it, unless the word may be the value of an option."""
    words = list(argv)
    at = next((index for index, word in enumerate(words) if word not in _FLAGS), len(words))
    if at < len(words) and not words[at].startswith("-"):
        words.insert(at, "--job")
    return words


def _parser() -> ArgumentParser:
    parser = ArgumentParser(usage=_USAGE, description=_DESCRIPTION, allow_abbrev=False, exit_on_error=False)
    modes = parser.add_mutually_exclusive_group(required=True)
    modes.add_argument("--dry-run", action="store_true", help="check the job and print the request; send nothing")
    modes.add_argument("--local", action="store_true", help="run the job in the SDK's local mode, with Docker")
    modes.add_argument("--cloud", action="store_true", help=f"submit the job and wait until it ends. {SERVICE}")
    parser.add_argument("--wait", type=bool, default=True, help="with --cloud: false returns right after submission")
    parser.add_argument("--follow", action="store_true", help="with --cloud: show the job's log until it ends")
    parser.add_argument("--timeout_s", type=PositiveFloat | None, help="with --local: time limit of the job in seconds")
    parser.add_argument("--keep", action="store_true", help="with --local: keep the containers")
    add_arguments(parser)
    return parser
