"""The command lines of ``lightning-sm report``, ``compare`` and ``plan``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from lightning_sm._arguments import positive_whole_number
from lightning_sm._log import command_logger
from lightning_sm._text import count, duration, for_terminal, times
from lightning_sm.errors import JobConfigError
from lightning_sm.job.new_file import write_new, write_whole
from lightning_sm.record.prices import Prices, add_price_options, read_prices
from lightning_sm.record.runs import read_run, read_runs
from lightning_sm.report import compare, sizing, verdict
from lightning_sm.report.figures import Figures
from lightning_sm.report.job_of_plan import job_of_plan
from lightning_sm.report.live import SILENCE_S, SILENT_EXIT_CODE, watch
from lightning_sm.report.page import render
from lightning_sm.report.trace import trace

_LOG = command_logger(__name__)

_PRICES = """
Give prices by instance type or group name, in a YAML file (--prices) with "per_hour: {ml.g5.xlarge: 1.41}", or as
--price ml.g5.xlarge=1.41.
"""
REPORT_EXAMPLES = f"""\
examples:
  lightning-sm report output.tar.gz -o report.html --price ml.g5.xlarge=1.41
  lightning-sm report run-1/ run-2/ --name before --name after -o both.html
  lightning-sm report --live outputs/local-20260102-030405-abcd
{_PRICES}
exit codes: 0 success; 2 the report cannot be written, or the job cannot be shown; {SILENT_EXIT_CODE} with --live, a job
whose record has no end has written no line for {duration(SILENCE_S)}"""
COMPARE_EXAMPLES = f"""\
example:
  lightning-sm compare before/ after/ --prices prices.yaml
{_PRICES}
exit codes: 0 success, 2 the runs cannot be compared"""
PLAN_EXAMPLES = f"""\
examples:
  lightning-sm plan outputs/local-20260102-030405-abcd
  lightning-sm plan run/ --kind ml.c5.4xlarge --steps 20000 --prices prices.yaml --save planned.yaml
{_PRICES}
exit codes: 0 success, 2 no plan can be made"""


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``report`` to the parser of its subcommand."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="DIR", help="folder or output.tar.gz of a run")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("report.html"), metavar="FILE", help="default: report.html"
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="also write a timeline for ui.perfetto.dev")
    parser.add_argument(
        "--name", action="append", default=[], help="name of the run in a DIR; repeat in the order of the DIRs"
    )
    live = parser.add_argument_group("a running job")
    live.add_argument("--live", action="store_true", help="show the job in this terminal; write no page")
    live.add_argument("--once", action="store_true", help="show the job once, then exit; implies --live")
    live.add_argument("--json", action="store_true", help="write lines of JSON instead of a table; implies --live")
    _add_job(parser)
    add_price_options(parser)


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``compare`` to the parser of its subcommand."""
    for name in ("a", "b"):
        parser.add_argument(name, type=Path, metavar=name.upper(), help="folder or output.tar.gz of a run")
    parser.add_argument(
        "--steps", type=positive_whole_number, help="number of steps of the whole run (default: as many as A had)"
    )
    parser.add_argument("--json", action="store_true", help="write times and costs as JSON instead of a table")
    parser.add_argument(
        "--job", nargs=2, metavar=("A", "B"), help="the jobs to read, if a folder has records of several"
    )
    add_price_options(parser)


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``plan`` to the parser of its subcommand."""
    parser.add_argument("run", type=Path, metavar="DIR", help="folder or output.tar.gz of a run of a minute or more")
    parser.add_argument("--kind", metavar="TYPE", help="instance type of the data hosts (default: the measured one)")
    parser.add_argument(
        "--steps", type=positive_whole_number, help="number of steps of the whole job (default: as many as the run had)"
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="write a job file with the best line; must not exist")
    _add_job(parser)
    add_price_options(parser)


def report(options: argparse.Namespace) -> int:
    """Write a report, or show a running job, and return the exit code.

    Raises:
        JobConfigError: There is no record, a price is invalid, or a library is missing.
        OutputDirectoryError: The report cannot be written.
    """
    if options.live or options.once or options.json:
        with suppress(KeyboardInterrupt):  # the way to end the view
            return watch(options.runs, options.job, is_once=options.once, is_json=options.json)
        return 0
    prices = read_prices(options.prices, options.price)
    write_report(options.runs, options.job, options.output, prices, trace_file=options.trace, names=options.name)
    return 0


def write_report(
    sources: Sequence[Path],
    job: str | None,
    page: Path,
    prices: Prices,
    *,
    trace_file: Path | None = None,
    names: Sequence[str] = (),
) -> None:
    """Write the verdict on runs to stdout, and a page about them to a file.

    Args:
        sources: Folders or archives with the records.
        job: Name of the only job to read. If None, read all jobs.
        page: The file for the page.
        prices: Prices of hosts.
        trace_file: The file for a timeline. If None, no timeline is written.
        names: Names of the runs, in the order of ``sources``.

    Raises:
        JobConfigError: There is no record, or a library is missing.
        OutputDirectoryError: The page cannot be written.
    """
    named = {str(source): name for source, name in zip(sources, names, strict=False) if name}
    if page == trace_file:
        raise JobConfigError(f"--output and --trace are the same file: {page}.")
    if len(names) > len(sources):
        raise JobConfigError(f"--name is given {times(len(names))}, for only {count(len(sources), 'folder')}.")
    runs = [Figures(replace(run, name=named.get(run.source, run.name))) for run in read_runs(sources, job)]
    for run in runs:  # first, in case the page takes too long
        _print(f"{run.run.name}: {verdict.ending(run)} {verdict.headline(run)}")
        for change in verdict.changes(run, prices):
            _print(f"- {change}")
        if gap := prices.gap(run.kinds):
            _LOG.warning("%s: %s", run.run.name, gap)
    sys.stdout.flush()
    if trace_file is not None:
        write_whole(trace_file, trace(runs))
        _LOG.info("timeline: %s", trace_file)
    write_whole(page, render(runs, prices))
    _LOG.info("report: %s", page)


def compare_runs(options: argparse.Namespace) -> int:
    """Write a comparison to stdout and return the exit code.

    Raises:
        JobConfigError: A run cannot be read, or a price is missing or invalid.
    """
    prices = read_prices(options.prices, options.price)
    first, second = map(Figures, map(read_run, (options.a, options.b), options.job or (None, None)))
    both = compare.compare(first, second, prices, options.steps)
    _print(json.dumps(compare.as_json(*both)) if options.json else compare.as_text(*both, prices))
    return 0


def plan_run(options: argparse.Namespace) -> int:
    """Write a plan to stdout and return the exit code.

    Raises:
        JobConfigError: The run cannot be read or lacks data for a plan, or a price is invalid.
        OutputDirectoryError: The new job file exists or cannot be written.
    """
    prices = read_prices(options.prices, options.price)
    planned = sizing.plan(Figures(read_run(options.run, options.job)), prices, options.kind, options.steps)
    if options.save is not None:
        write_new(options.save, job_of_plan(planned, prices))
        _LOG.info("job file: %s", options.save)
    _print(sizing.as_text(planned, prices))
    return 0


def _add_job(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--job", metavar="NAME", help="read only this job, if a folder has records of several")


def _print(text: str) -> None:
    sys.stdout.write(for_terminal(f"{text}\n", sys.stdout))
