"""``lightning-sm jobs``, which shows jobs on the service, their logs, costs and files, and stops them."""

from __future__ import annotations

import argparse
import difflib
import itertools
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from lightning_sm._arguments import positive_whole_number
from lightning_sm._log import command_logger
from lightning_sm._untested import SERVICE
from lightning_sm.cloud import cost, files, listing
from lightning_sm.cloud.aws import Clients, check_credentials, new_session, one_line_errors
from lightning_sm.cloud.find import Found, find, training_jobs
from lightning_sm.cloud.follow import exit_code, follow, reason_of, tuning_progress
from lightning_sm.cloud.logs import Log, LogLine, failure_first
from lightning_sm.cloud.stop import stop
from lightning_sm.errors import AWSError
from lightning_sm.record.prices import read_prices

_LOG = command_logger(__name__)

_COMMANDS = ("list", "logs", "stop", "cost", "files")
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

NAME is the name of a training job or of a tuning job.

exit codes: 0 done; logs: that of the job if it has ended (1 if none is known); 2 AWS rejects the request, cannot be
reached or knows no such job, or wrong arguments
"""


def main(argv: Sequence[str], clients: Clients | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        argv: The arguments after ``jobs``.
        clients: Clients of the AWS APIs. Default: those of the user's credentials and region.

    Raises:
        AWSError: AWS rejects a request, cannot be reached, or knows no such job.
        JobConfigError: Prices are missing or wrong.
    """
    if argv and not argv[0].startswith("-") and argv[0] not in _COMMANDS:
        raise AWSError(_unknown_command(argv[0]))
    options = _parser().parse_args(argv)
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
    if found.kind == "tuning":
        best = found.description.get("BestTrainingJob", {}).get("TrainingJobName", "one of its training jobs")
        raise AWSError(f"{found.name} is a tuning job; pass the name of a training job: {best}.")
    target = Path(options.to or Path(options.file).name)
    source = files.fetch(clients.s3, jobs[-1], options.file, target)
    _write([f"{source} -> {target}"])
    return 0


def _parser() -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--region", help="region of the jobs (default: AWS_DEFAULT_REGION, or the profile's)")
    parser = argparse.ArgumentParser(
        prog="lightning-sm jobs",
        description=f"Look after jobs on SageMaker, with boto3 and your AWS credentials. {SERVICE}",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="{" + ",".join(_COMMANDS) + "}")
    add_parser = partial(commands.add_parser, parents=[shared], allow_abbrev=False)

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
    price.add_argument(
        "--price",
        action="append",
        default=[],
        metavar="NAME=PRICE",
        help="hourly price of one host, by instance type or instance group: ml.g5.xlarge=1.41",
    )
    price.add_argument("--prices", type=Path, metavar="FILE", help="YAML file with prices: {per_hour: {NAME: PRICE}}")
    price.set_defaults(run=_cost)

    left = add_parser("files", help="where model, output and checkpoints are; or a copy of one output file")
    left.add_argument("name")
    left.add_argument("file", nargs="?", help="end of the path of one file, such as report.html")
    left.add_argument("--to", metavar="PATH", help="where to copy it (default: its name in this folder)")
    left.set_defaults(run=_files)
    return parser


def _unknown_command(word: str) -> str:
    close = [_ELSEWHERE[word]] if word in _ELSEWHERE else difflib.get_close_matches(word, _COMMANDS, n=1)
    hint = f"Did you mean 'lightning-sm jobs {close[0]}'?" if close else f"There are {', '.join(_COMMANDS)}."
    return f"lightning-sm jobs has no command {word!r}. {hint}"


def _write(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stdout.write(f"{line}\n")


def _now() -> datetime:
    return datetime.now(timezone.utc)
