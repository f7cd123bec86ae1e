"""``lightning-sm jobs``, which lists, stops and resubmits jobs on the service, and shows their logs and reports."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from lightning_sm._arguments import CommandParser, did_you_mean, positive_whole_number
from lightning_sm._log import command_logger
from lightning_sm._table import draw_table
from lightning_sm._text import for_terminal
from lightning_sm._untested import SERVICE
from lightning_sm.cloud.aws import Clients, check_credentials, new_session, one_line_errors
from lightning_sm.cloud.find import Found, find, find_training_job, training_job_names
from lightning_sm.cloud.follow import exit_code, follow, reason_of, tuning_progress
from lightning_sm.cloud.logs import Log, failure_first
from lightning_sm.cloud.records import ReportWriter, write_report_of
from lightning_sm.errors import AWSError
from lightning_sm.record.prices import add_price_options, read_prices

_LOG = command_logger(__name__)

_COMMANDS = ("list", "logs", "stop", "report", "again")
_EXAMPLES = """\
examples:
  lightning-sm jobs list                              the account's newest training jobs in this region
  lightning-sm jobs logs NAME                         the log, merged from all hosts; failures first
  lightning-sm jobs logs -f NAME                      follow the log until the job ends
  lightning-sm jobs stop NAME
  lightning-sm jobs report NAME                       write the report here, from the records of all hosts
  lightning-sm jobs again NAME --set max_run_s=7200   submit the job again, with changes, under a new name

NAME is the name of a training job or of a tuning job.

exit codes: 0 done; with logs, the exit code of a training job that has ended (1 if it failed and its code is unknown);
2 AWS rejects the request or cannot be reached, there is no such job, or the arguments are wrong
"""


def main(
    argv: Sequence[str], clients: Clients | None = None, *, write_report: ReportWriter, again: Callable[..., None]
) -> int:
    """Run the command and return its exit code.

    Args:
        argv: The arguments after ``jobs``.
        clients: Clients for the AWS APIs. Defaults to clients with the user's credentials and region.
        write_report: Writes a report.
        again: Resubmits the request of a training job (``submit.again.again``).

    Raises:
        AWSError: AWS rejects a request or cannot be reached, or there is no such job.
        JobConfigError: Prices are invalid, a job has no record, or the report needs a missing library.
        OutputDirectoryError: A report cannot be written.
        SubmitError: A job cannot be submitted again.
    """
    if argv and not argv[0].startswith("-") and argv[0] not in _COMMANDS:
        hint = did_you_mean(argv[0], _COMMANDS) or f" The commands are {', '.join(_COMMANDS)}."
        raise AWSError(f"lightning-sm jobs has no command {argv[0]!r}.{hint}")
    options = _parser().parse_args(argv, argparse.Namespace(write_report=write_report, again=again))
    with one_line_errors():
        if clients is None:
            session = new_session(region_name=options.region)
            check_credentials(session)
            clients = Clients(session)
        code: int = options.run(clients, options)
    return code


def _list(clients: Clients, options: argparse.Namespace) -> int:
    pages = clients.sagemaker.get_paginator("list_training_jobs").paginate(
        SortBy="CreationTime",
        SortOrder="Descending",
        PaginationConfig={"MaxItems": options.limit},
        **({} if options.text is None else {"NameContains": options.text}),
    )
    rows = [
        (job["TrainingJobName"], job["TrainingJobStatus"], f"{job['CreationTime']:%Y-%m-%d %H:%M %Z}")
        for page in pages
        for job in page["TrainingJobSummaries"]
    ]
    empty = f"There are no training jobs in {clients.sagemaker.meta.region_name}."
    _write([draw_table(rows, ["job", "status", "created"]) if rows else empty])
    return 0


def _logs(clients: Clients, options: argparse.Namespace) -> int:
    found = find(clients, options.name)
    if options.follow and not found.has_ended:
        description = follow(clients, found.kind, found.name, shows_log=True)
        code = exit_code(description)
        if code:
            _LOG.error("the job failed: %s", reason_of(description) or "no reason given")
        return code
    if found.kind == "tuning":
        _write([f"{found.name} is {found.status}: {tuning_progress(found.description)}"])
        _write(f"lightning-sm jobs logs {name}" for name in training_job_names(clients, found))
        return 0
    _write(_log_of(clients, found, options))
    return exit_code(found.description) if found.has_ended else 0


def _log_of(clients: Clients, found: Found, options: argparse.Namespace) -> Iterator[str]:
    log = Log(clients.logs, found.name)
    if found.status == "Failed" and not options.all:
        yield from failure_first(log, reason_of(found.description))
        yield "(--all shows everything in chronological order)"
        return
    lines = log.new_lines()
    yield next(lines, f"{found.name} is {found.description.get('SecondaryStatus', found.status)} and has no log yet.")
    yield from lines


def _stop(clients: Clients, options: argparse.Namespace) -> int:
    found = find(clients, options.name)
    if found.has_ended:
        _write([f"{found.name} has ended: {found.status}."])
    elif found.kind == "tuning":
        clients.sagemaker.stop_hyper_parameter_tuning_job(HyperParameterTuningJobName=found.name)
        _write([f"Stopping {found.name} and all its training jobs."])
    else:
        clients.sagemaker.stop_training_job(TrainingJobName=found.name)
        _write([f"Stopping {found.name}: its hosts have 120 s to save a checkpoint; output and checkpoints are kept."])
    return 0


def _report(clients: Clients, options: argparse.Namespace) -> int:
    prices = read_prices(options.prices, options.price)
    found = find_training_job(clients, options.name)
    page = options.output or Path(f"{found.name}.html")
    if options.records is not None and options.records.exists() and any(options.records.iterdir()):
        raise AWSError(f"{options.records} is not empty. Name another folder with --records.")
    write_report_of(clients.s3, found.description, options.write_report, page, prices, folder=options.records)
    return 0


def _again(clients: Clients, options: argparse.Namespace) -> int:
    found = find_training_job(clients, options.name)
    options.again(clients, found.description, options.settings, is_dry_run=options.dry_run, yes=options.yes)
    return 0


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
    """Add the subcommands of ``jobs``, with their options."""
    shared = CommandParser(add_help=False)
    shared.add_argument("--region", help="region of the jobs (default: AWS_DEFAULT_REGION, or the profile's)")
    commands = parser.add_subparsers(required=True, metavar="{" + ",".join(_COMMANDS) + "}")
    add_parser = partial(commands.add_parser, parents=[shared])

    show = add_parser("list", help="list the newest training jobs")
    show.add_argument("text", nargs="?", help="only jobs whose name contains this")
    show.add_argument("--limit", type=positive_whole_number, default=20, help="maximum number of jobs (default: 20)")
    show.set_defaults(run=_list)

    logs = add_parser("logs", help="show the log of a job, merged from all hosts; failures first")
    logs.add_argument("name")
    logs.add_argument("-f", "--follow", action="store_true", help="follow the log until the job ends")
    logs.add_argument("--all", action="store_true", help="everything in chronological order, even for a failed job")
    logs.set_defaults(run=_logs)

    end = add_parser("stop", help="stop a job; its hosts have 120 s to save a checkpoint")
    end.add_argument("name")
    end.set_defaults(run=_stop)

    page = add_parser("report", help="fetch the records of all hosts, and write the job's report here")
    page.add_argument("name")
    page.add_argument("-o", "--output", type=Path, metavar="FILE", help="the report page (default: NAME.html)")
    page.add_argument("--records", type=Path, metavar="DIR", help="keep the records there, for compare and plan")
    add_price_options(page)
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
    more.add_argument("--yes", action="store_true", help="submit without asking, for use in scripts")
    more.set_defaults(run=_again)


def _write(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stdout.write(for_terminal(f"{line}\n", sys.stdout))
