"""``lightning-sm submit``, which submits or checks the job in a job file, or runs it locally."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_sm._arguments import CommandParser
from lightning_sm._log import command_logger
from lightning_sm._untested import SERVICE
from lightning_sm.cloud.installed import check_boto3
from lightning_sm.errors import SubmitError
from lightning_sm.submit.cost_limit import confirm_cost
from lightning_sm.submit.dataclass_fields import KeyPath, all_keys, is_section, shown_default
from lightning_sm.submit.job_file import Job, read_job
from lightning_sm.submit.overrides import parse_overrides

if TYPE_CHECKING:
    from lightning_sm.cloud.records import ReportWriter  # loads boto3

_LOG = command_logger(__name__)

_USAGE = "lightning-sm submit JOB.yaml [--dry-run | --local] [--KEY=VALUE ...]"
_DESCRIPTION = f"""\
Submit a training job described in a YAML file, with boto3: check it, show its maximum cost, ask for confirmation,
submit it, show its log until it ends, and write its report. With --dry-run, only check the job, and the account if
there are AWS credentials, and print the request. With --local, run the job in containers on this machine, with Docker.
Every key of the file is also an option that overrides the file, such as --groups.trainer.count=4.

{SERVICE}
"""
_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")
_KEYS = "keys of the job file, which are also options; NAME stands for any name"


def main(argv: Sequence[str], *, write_report: ReportWriter) -> int:
    """Run the command and return its exit code.

    Args:
        argv: The arguments after ``submit``.
        write_report: Writes the report of a job that has ended.

    Returns:
        0 for success; if the job failed, a host's exit code if known, else 1.

    Raises:
        AWSError: The region or credentials are missing.
        ContainerError: Docker is missing or does not have the image, or the image cannot be built or pushed.
        SDKError: boto3 is not installed.
        SubmitError: The job cannot be submitted, or AWS rejects a request or cannot be reached.
    """
    parser = CommandParser(
        prog="lightning-sm submit",
        usage=_USAGE,
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    own_options = _add_options(parser)
    if "-h" in argv or "--help" in argv:
        _add_keys(parser)
        parser.print_help()
        return 0
    try:
        overrides, words = parse_overrides(argv, Job, own_options)
    except SubmitError as error:
        parser.error(str(error))
    options = parser.parse_args(words)
    if options.file is None and not overrides:
        parser.error("no job file is given")
    if options.local and not options.wait:
        parser.error("argument --no-wait: not allowed with argument --local, which always waits for the job")
    job = read_job(options.file, overrides)
    check_boto3("lightning-sm submit")
    from lightning_sm.cloud.follow import exit_code, reason_of  # noqa: PLC0415
    from lightning_sm.submit import submit  # noqa: PLC0415

    if options.dry_run:
        submit.show_dry_run(job)
        return 0
    if options.local:
        return submit.run_locally(job)
    ask = None if options.yes else confirm_cost
    description = submit.send(job, wait=options.wait, shows_log=True, ask=ask)
    code = exit_code(description) if options.wait else 0
    if options.wait and job.tune is None:
        submit.write_report_here(job, description, write_report)
    if code:
        _LOG.error("the job did not complete: %s", reason_of(description) or "no reason given")
    return code


def add_arguments(parser: CommandParser) -> None:
    """Add the command's options, and an option for each key of a job file, for shell completion."""
    _add_options(parser)
    _add_keys(parser)


def _add_options(parser: CommandParser) -> list[str]:
    """Add the command's options, except those for keys, and return their names."""
    parser.add_argument("file", nargs="?", metavar="JOB.yaml", help="job file: YAML with the keys below")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--dry-run", action="store_true", help="check the job and print the request; send nothing")
    modes.add_argument("--local", action="store_true", help="run the job in containers on this machine")
    parser.add_argument("--no-wait", action="store_false", dest="wait", help="return right after submission")
    parser.add_argument("--yes", action="store_true", help="submit without asking, for use in scripts")
    return parser.option_names


def _add_keys(parser: CommandParser) -> None:
    """Add an option for each key, used only by the help text and shell completion."""
    keys = parser.add_argument_group(_KEYS)
    for path in all_keys(Job):
        keys.add_argument(f"--{'.'.join(path.parts)}", metavar="VALUE", help=_help(path))


def _help(path: KeyPath) -> str:
    field = path.field
    meaning = _LINK.sub(r"\1", field.about.meaning).replace("`", "").rstrip(".")
    if field.is_required:
        meaning += " (required)"
    elif field.default not in (None, [], {}) and not is_section(type(field.default)):
        meaning += f" (default: {shown_default(field.default)})"
    return meaning.replace("%", "%%")
