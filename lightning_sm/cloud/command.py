"""``lightning-sm jobs``, which shows jobs on the service, their logs, costs and files, stops and debugs them."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from lightning_sm._arguments import CommandParser, positive_whole_number
from lightning_sm._log import command_logger
from lightning_sm._text import closest, for_terminal
from lightning_sm._untested import SERVICE
from lightning_sm.cloud import cost, files, listing
from lightning_sm.cloud.aws import Clients, check_credentials, new_session, one_line_errors
from lightning_sm.cloud.debug import set_remote_debug
from lightning_sm.cloud.find import Found, find, training_jobs
from lightning_sm.cloud.follow import exit_code, follow, reason_of, tuning_progress
from lightning_sm.cloud.logs import Log, LogLine, failure_first
from lightning_sm.cloud.records import ReportWriter, write_report_of
from lightning_sm.cloud.shell import shell_command
from lightning_sm.cloud.stop import stop
from lightning_sm.errors import AWSError
from lightning_sm.record.prices import read_prices

_LOG = command_logger(__name__)

_COMMANDS = ("list", "logs", "stop", "cost", "files", "report", "again", "debug", "shell")
# The names that other tools give to these commands.
_ELSEWHERE = {
    "log": "logs",
    "tail": "logs",
    "cancel": "stop",
    "kill": "stop",
    "down": "stop",
    "delete": "stop",
    "ls": "list",
    "status": "list",
    "ps": "list",
    "queue": "list",
    "price": "cost",
    "cost-report": "cost",
    "file": "files",
    "download": "files",
    "get": "files",
    "rerun": "again",
    "restart": "again",
    "resubmit": "again",
    "clone": "again",
    "ssh": "shell",
    "exec": "shell",
    "attach": "shell",
}
_STATUSES = ("InProgress", "Completed", "Failed", "Stopping", "Stopped")
_EXAMPLES = """\
examples:
  lightning-sm jobs list                              the newest training jobs of the account in this region
  lightning-sm jobs logs NAME                         the log, merged over its hosts; failures first
  lightning-sm jobs logs -f NAME                      follow the log until the job ends
  lightning-sm jobs stop NAME
  lightning-sm jobs cost NAME --price ml.g5.xlarge=1.41
  lightning-sm jobs files NAME                        where model, output, checkpoints and TensorBoard files are
  lightning-sm jobs files NAME report.html            copy one file of the output to this folder
  lightning-sm jobs report NAME                       write the report here, from the records of all hosts
  lightning-sm jobs again NAME --set max_run_s=7200   submit the job again, with changes, under a new name
  lightning-sm jobs debug NAME                        allow a shell on the hosts of a running job (--off: forbid it)
  lightning-sm jobs shell NAME algo-2                 open a shell on a host, once that is allowed

NAME is the name of a training job or of a tuning job.

exit codes: 0 done; logs: that of the job if it has ended (1 if none is known); 2 AWS rejects the request, cannot be
reached or knows no such job, or wrong arguments
"""


class _Again(Protocol):
    """Submits the request of a training job again."""

    def __call__(
        self, clients: Clients, description: Mapping[str, Any], settings: Sequence[str], *, dry_run: bool, yes: bool
    ) -> str | None:
        """Return the new job's name; None if nothing was sent."""


def main(
    argv: Sequence[str],
    clients: Clients | None = None,
    *,
    new_report_writer: Callable[[], ReportWriter],
    again: _Again,
) -> int:
    """Run the command and return its exit code.

    Args:
        argv: The arguments after ``jobs``.
        clients: Clients of the AWS APIs. Default: those of the user's credentials and region.
        new_report_writer: Returns what writes a report, or says what is missing for that.
        again: Submits a job again.

    Raises:
        AWSError: AWS rejects a request, cannot be reached, or knows no such job.
        JobConfigError: Prices are missing or wrong, a job has no record, or a library is missing for its report.
        OutputDirectoryError: A report cannot be written.
        SubmitError: A job cannot be submitted again.
    """
    if argv and not argv[0].startswith("-") and argv[0] not in _COMMANDS:
        raise AWSError(_unknown_command(argv[0]))
    options = _parser().parse_args(argv, argparse.Namespace(new_report_writer=new_report_writer, again=again))
    with one_line_errors():
        if clients is None:
            session = new_session(region_name=options.region)
            check_credentials(session)
            clients = Clients(session)
        code: int = options.run(clients, options)
    return code


def _list(clients: Clients, options: argparse.Namespace) -> int:
    _write([listing.training_jobs_table(clients, options.text, options.status, options.limit, _now())])
    return 0


def _logs(clients: Clients, options: argparse.Namespace) -> int:
    found = find(clients, options.name)
    if options.follow and not found.has_ended:
        return _ending(follow(clients, found, shows_log=True))
    if found.kind == "tuning":
        names = [str(job["TrainingJobName"]) for job in training_jobs(clients, found)]
        _write([f"{found.name} is {found.status}: {tuning_progress(found.description)}"])
        _write([f"lightning-sm jobs logs {name}" for name in names])
        return 0
    _write(_log_of(clients, found.description, options))
    return exit_code(found.description) if found.has_ended else 0


def _log_of(clients: Clients, job: Mapping[str, Any], options: argparse.Namespace) -> Iterator[str]:
    log = Log(clients.logs, job)
    if job["TrainingJobStatus"] == "Failed" and options.host is None and not options.all:
        yield from failure_first(log, reason_of(job), options.tail)
        yield "(--all shows everything in chronological order)"
        return
    log.learn_groups()
    lines: Iterable[LogLine] = log.new_lines()
    if options.host is not None:
        streams = log.streams_by_host()
        if options.host not in streams:
            hosts = ", ".join(streams) or "none yet"
            raise AWSError(
                f"{job['TrainingJobName']} has no log of the host {options.host}; hosts with a log: {hosts}."
            )
        if options.tail is not None:
            lines = log.last_lines(streams[options.host], options.tail)
        else:
            lines = log.all_lines(streams[options.host])
    elif options.tail is not None:
        lines = deque(lines, maxlen=options.tail)
    empty = True
    for line in lines:
        empty = False
        yield log.shown(line)
    if empty:
        state = job.get("SecondaryStatus", job["TrainingJobStatus"])
        yield f"{job['TrainingJobName']} is {state} and has no log yet."


def _ending(description: Mapping[str, Any]) -> int:
    code = exit_code(description)
    if code:
        _LOG.error("the job failed: %s", reason_of(description) or "no reason given")
    return code


def _stop(clients: Clients, options: argparse.Namespace) -> int:
    _write([stop(clients, find(clients, options.name))])
    return 0


def _cost(clients: Clients, options: argparse.Namespace) -> int:
    prices = read_prices(options.prices, options.price)
    jobs = training_jobs(clients, find(clients, options.name))
    _write([cost.shown_bills([cost.bill(job, _now()) for job in jobs], prices)])
    return 0


def _files(clients: Clients, options: argparse.Namespace) -> int:
    found: Found = find(clients, options.name)
    jobs = training_jobs(clients, found)
    if not jobs:
        _write([f"{found.name} is {found.status}: no training job has started."])
        return 0
    if options.file is None:
        several = len(jobs) > 1
        titles = [[f"{job['TrainingJobName']}:"] if several else [] for job in jobs]
        _write(itertools.chain(*([*title, files.shown_places(job)] for title, job in zip(titles, jobs, strict=True))))
        return 0
    _check_training_job(found)
    target = Path(options.to or Path(options.file).name)
    source = files.fetch(clients.s3, jobs[-1], options.file, target)
    _write([f"{source} -> {target}"])
    return 0


def _report(clients: Clients, options: argparse.Namespace) -> int:
    write = options.new_report_writer()
    prices = read_prices(options.prices, options.price)
    found = find(clients, options.name)
    _check_training_job(found)
    page = options.output or Path(f"{found.name}.html")
    if options.records is not None and options.records.exists() and any(options.records.iterdir()):
        raise AWSError(f"{options.records} is not empty. Name another folder with --records.")
    write_report_of(clients.s3, found.description, write, page, prices, folder=options.records)
    return 0


def _again(clients: Clients, options: argparse.Namespace) -> int:
    found = find(clients, options.name)
    _check_training_job(found)
    name = options.again(clients, found.description, options.settings, dry_run=options.dry_run, yes=options.yes)
    if name is not None:
        _write([f"Submitted {name}. To follow it: lightning-sm jobs logs -f {name}"])
    return 0


def _check_training_job(found: Found) -> None:
    if found.kind == "tuning":
        best = found.description.get("BestTrainingJob", {}).get("TrainingJobName", "one of its training jobs")
        raise AWSError(f"{found.name} is a tuning job; pass the name of a training job: {best}.")


def _debug(clients: Clients, options: argparse.Namespace) -> int:
    _write([set_remote_debug(clients, find(clients, options.name), enable=not options.off)])
    return 0


def _shell(clients: Clients, options: argparse.Namespace) -> int:
    found = find(clients, options.name)
    _check_training_job(found)
    command = shell_command(found, options.host, clients.sagemaker.meta.region_name)
    sys.stdout.flush()
    os.execv(command[0], command)  # noqa: S606 - the session is then between AWS's program and the terminal


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="lightning-sm jobs",
        description=f"Look after jobs on SageMaker, with boto3 and your AWS credentials. {SERVICE}",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    return parser


def add_arguments(parser: CommandParser) -> None:
    """Add the commands within ``jobs``, with their options."""
    shared = CommandParser(add_help=False)
    shared.add_argument("--region", help="region of the jobs (default: AWS_DEFAULT_REGION, or the profile's)")
    commands = parser.add_subparsers(required=True, metavar="{" + ",".join(_COMMANDS) + "}")
    add_parser = partial(commands.add_parser, parents=[shared])

    show = add_parser("list", help="the newest training jobs")
    show.add_argument("text", nargs="?", help="only jobs whose name contains this")
    show.add_argument("--status", choices=_STATUSES, help="only jobs with this status")
    show.add_argument("--limit", type=positive_whole_number, default=20, help="maximum number of jobs (default: 20)")
    show.set_defaults(run=_list)

    logs = add_parser("logs", help="the log of a job, merged over its hosts; failures first")
    logs.add_argument("name")
    logs.add_argument("-f", "--follow", action="store_true", help="follow the log until the job ends")
    logs.add_argument("--host", help="only this host's log, such as algo-2")
    logs.add_argument(
        "--tail", type=positive_whole_number, metavar="N", help="only the last N lines (for a failed job: of each host)"
    )
    logs.add_argument("--all", action="store_true", help="everything in chronological order, even for a failed job")
    logs.set_defaults(run=_logs)

    end = add_parser("stop", help="stop a job; its hosts have 120 s to save a checkpoint")
    end.add_argument("name")
    end.set_defaults(run=_stop)

    price = add_parser("cost", help="the cost of a job, from its billable seconds and your prices")
    price.add_argument("name")
    _add_prices(price)
    price.set_defaults(run=_cost)

    left = add_parser("files", help="where model, output and checkpoints are; or a copy of one output file")
    left.add_argument("name")
    left.add_argument("file", nargs="?", help="end of the path of one file, such as report.html")
    left.add_argument("--to", metavar="PATH", help="where to copy it (default: its name in this folder)")
    left.set_defaults(run=_files)

    page = add_parser("report", help="fetch the records of all hosts, and write the report of the job here")
    page.add_argument("name")
    page.add_argument("-o", "--output", type=Path, metavar="FILE", help="the page (default: NAME.html)")
    page.add_argument("--records", type=Path, metavar="DIR", help="keep the records there, for compare and plan")
    _add_prices(page)
    page.set_defaults(run=_report)

    more = add_parser("again", help="submit a job again, with changes, under a new name")
    more.add_argument("name")
    more.add_argument(
        "--set",
        action="append",
        default=[],
        dest="settings",
        metavar="KEY=VALUE",
        help="change a key of the job file, such as hyperparameters.lr=0.1 or groups.trainer.count=4; repeatable",
    )
    more.add_argument("--dry-run", action="store_true", help="print the request; send nothing")
    more.add_argument("--yes", action="store_true", help="submit without asking, as scripts must")
    more.set_defaults(run=_again)

    debug = add_parser("debug", help="allow a shell on the hosts of a running job, through AWS Systems Manager")
    debug.add_argument("name")
    debug.add_argument("--off", action="store_true", help="forbid it again")
    debug.set_defaults(run=_debug)

    inside = add_parser("shell", help="open a shell on a host of a running job, with AWS's command line")
    inside.add_argument("name")
    inside.add_argument("host", nargs="?", default="algo-1", help="name of the host (default: algo-1)")
    inside.set_defaults(run=_shell)


def _add_prices(parser: CommandParser) -> None:
    parser.add_argument(
        "--price",
        action="append",
        default=[],
        metavar="NAME=PRICE",
        help="hourly price of one host, by instance type or instance group: ml.g5.xlarge=1.41",
    )
    parser.add_argument("--prices", type=Path, metavar="FILE", help="YAML file with prices: {per_hour: {NAME: PRICE}}")


def _unknown_command(word: str) -> str:
    close = _ELSEWHERE.get(word) or closest(word, _COMMANDS)
    hint = f"There are {', '.join(_COMMANDS)}." if close is None else f"Did you mean 'lightning-sm jobs {close}'?"
    return f"lightning-sm jobs has no command {word!r}. {hint}"


def _write(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stdout.write(for_terminal(f"{line}\n", sys.stdout))


def _now() -> datetime:
    return datetime.now(timezone.utc)
