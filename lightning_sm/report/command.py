"""The command lines of ``lightning-sm report``, ``compare`` and ``plan``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_sm._arguments import positive_number, positive_whole_number
from lightning_sm._log import command_logger
from lightning_sm._text import for_terminal
from lightning_sm.errors import JobConfigError
from lightning_sm.job.new_file import write_new, write_whole
from lightning_sm.job.yaml_file import read_mapping
from lightning_sm.record.prices import Prices, read_prices
from lightning_sm.record.runs import read_run, read_runs
from lightning_sm.report import compare, sizing, verdict
from lightning_sm.report.figures import Figures
from lightning_sm.report.job_of_plan import job_of_plan
from lightning_sm.report.page import check_libraries, render
from lightning_sm.report.trace import trace

_LOG = command_logger(__name__)

_PRICES = """
You give the prices: a YAML file (--prices) with "per_hour: {ml.g5.xlarge: 1.41}", or --price ml.g5.xlarge=1.41, by
instance type or by the name of a group.
"""
REPORT_EXAMPLES = f"""\
examples:
  the run of an emulated job, or of a downloaded one:
    lightning-sm report outputs/local-20260102-030405-abcd
    lightning-sm report output.tar.gz -o report.html --price ml.g5.xlarge=1.41
  two runs side by side, by names of your own:
    lightning-sm report run-1/ run-2/ --name before --name after -o both.html
  a timeline of all ranks and hosts for ui.perfetto.dev:
    lightning-sm report run/ --trace run.json
{_PRICES}
exit codes: 0 the report is written, 2 it cannot be"""
COMPARE_EXAMPLES = f"""\
examples:
  two recorded runs:
    lightning-sm compare before/ after/ --prices prices.yaml
  figures that were measured elsewhere:
    lightning-sm compare one-host.yaml two-hosts.yaml --price ml.p3.2xlarge=3.825 --price ml.c5.9xlarge=1.836

A file of figures:
{compare.FIGURES_FORMAT}
{_PRICES}
exit codes: 0 the comparison is written, 2 it cannot be"""
PLAN_EXAMPLES = f"""\
examples:
  how many workers, or data hosts like the measured ones, remove the wait:
    lightning-sm plan outputs/local-20260102-030405-abcd
  data hosts with 16 vCPUs, for a job of 20,000 steps:
    lightning-sm plan run/ --vcpus 16 --kind ml.c5.4xlarge --steps 20000 --prices prices.yaml
  the cheapest hosts and workers as a job file:
    lightning-sm plan run/ --prices prices.yaml --base job.yaml --save planned.yaml
{_PRICES}
exit codes: 0 the plan is written, 2 it cannot be"""


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``report`` to the parser of its subcommand."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="DIR", help="folder or output.tar.gz of a run")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("report.html"), metavar="FILE", help="default: report.html"
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a timeline for ui.perfetto.dev, too")
    parser.add_argument(
        "--name", action="append", default=[], help="name of the run in a DIR, in the order of these; repeatable"
    )
    _add_job(parser)
    _add_prices(parser)


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``compare`` to the parser of its subcommand."""
    for name in ("a", "b"):
        parser.add_argument(
            name, type=Path, metavar=name.upper(), help="folder or output.tar.gz of a run, or a file of figures"
        )
    parser.add_argument(
        "--jobs", nargs=2, metavar="NAME", default=(None, None), help="the jobs A and B, where a folder has several"
    )
    parser.add_argument(
        "--steps", type=positive_whole_number, help="number of steps of the whole run (default: as many as A had)"
    )
    parser.add_argument("--json", action="store_true", help="write JSON instead of a table")
    _add_prices(parser)


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``plan`` to the parser of its subcommand."""
    parser.add_argument("run", type=Path, metavar="DIR", help="folder or output.tar.gz of a run of a minute or more")
    parser.add_argument("--vcpus", type=positive_whole_number, metavar="N", help="plan with data hosts of N vCPUs each")
    parser.add_argument("--kind", metavar="NAME", help="instance type or group of these hosts, for prices")
    parser.add_argument(
        "--speed",
        type=positive_number,
        metavar="FACTOR",
        help="how fast one of their vCPUs is, compared to a measured one",
    )
    parser.add_argument(
        "--network", type=positive_number, metavar="GBIT", help="network bandwidth of a host, in Gbit/s"
    )
    parser.add_argument(
        "--steps", type=positive_whole_number, help="steps of the whole job (default: as many as the run had)"
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="write a job file with the best line; must not exist")
    parser.add_argument("--base", type=Path, metavar="FILE", help="job file of the run, from which the new one starts")
    parser.add_argument("--json", action="store_true", help="write JSON instead of a table")
    _add_job(parser)
    _add_prices(parser)


def report(options: argparse.Namespace) -> int:
    """Write a report and return the exit code.

    Raises:
        JobConfigError: There is no record, a price is wrong, or a library is missing.
        OutputDirectoryError: The report cannot be written.
    """
    prices = read_prices(options.prices, options.price)
    _write_report(options.runs, options.job, options.output, prices, trace_file=options.trace, names=options.name)
    return 0


def report_writer() -> Callable[[Sequence[Path], str | None, Path, Prices], None]:
    """Return a function that writes a report, from where the records are, the only job to read, the page, and prices.

    It raises a ``JobConfigError`` where there is no record, and an ``OutputDirectoryError`` where the report cannot be
    written.

    Raises:
        JobConfigError: A library is missing.
    """
    check_libraries()
    return _write_report


def _write_report(
    sources: Sequence[Path],
    job: str | None,
    page: Path,
    prices: Prices,
    *,
    trace_file: Path | None = None,
    names: Sequence[str] = (),
) -> None:
    named = dict(zip(map(str, sources), names, strict=False))
    if len(names) > len(sources):
        raise JobConfigError(f"--name is given {len(names)} times, for {len(sources)} folders of runs.")
    runs = [Figures(replace(run, name=named.get(run.source, run.name))) for run in read_runs(sources, job)]
    for run in runs:  # first, so that a page that takes too long costs no verdict
        sentences = (verdict.ending(run), verdict.headline(run), verdict.scope(run))
        _print(f"{run.run.name}: {' '.join(filter(None, sentences))}")
        for change in verdict.changes(run, prices):
            _print(f"- {change}")
    sys.stdout.flush()
    if trace_file is not None:
        write_whole(trace_file, trace(runs))
        _LOG.info("timeline: %s", trace_file)
    write_whole(page, render(runs, prices))
    _LOG.info("report: %s", page)


def compare_runs(options: argparse.Namespace) -> int:
    """Write a comparison to stdout and return the exit code.

    Raises:
        JobConfigError: A run or a file cannot be read, or a price is missing or wrong.
    """
    prices = read_prices(options.prices, options.price)
    job_a, job_b = options.jobs
    runs = _measured(options.a, job_a), _measured(options.b, job_b)
    comparison = compare.compare(*runs, prices, options.steps)
    if options.json:
        _print(json.dumps(compare.as_json(comparison, prices), indent=2))
    else:
        _print(compare.as_text(comparison, prices))
    return 0


def plan_run(options: argparse.Namespace) -> int:
    """Write a plan to stdout and return the exit code.

    Raises:
        JobConfigError: The run or the job file cannot be read or does not say enough, or a price is wrong.
        OutputDirectoryError: The new job file exists or cannot be written.
    """
    prices = read_prices(options.prices, options.price)
    wanted = sizing.Hosts(options.vcpus, options.kind, options.speed, options.network)
    base = None if options.base is None else _base_job(options.base, options.save)
    run = Figures(read_run(options.run, options.job))
    planned = sizing.plan(run, prices, wanted, options.steps)
    if options.save is not None:
        write_new(options.save, job_of_plan(run, planned, prices, base))
        _LOG.info("job file: %s", options.save)
    _print(json.dumps(sizing.as_json(planned), indent=2) if options.json else sizing.as_text(planned, prices))
    return 0


def _measured(source: Path, job: str | None) -> compare.ComparedRun:
    if source.suffix in (".yaml", ".yml", ".json"):
        return compare.read_figures(source)
    return compare.of_run(Figures(read_run(source, job)))


def _add_job(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--job", metavar="NAME", help="the only job to read, where a folder has the records of several")


def _add_prices(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prices", type=Path, metavar="FILE", help="YAML file with prices of an hour")
    parser.add_argument(
        "--price",
        action="append",
        default=[],
        metavar="NAME=PRICE",
        help="hourly price of an instance type or group; repeatable",
    )


def _base_job(file: Path, new: Path | None) -> dict[str, Any]:
    """Read the job file that a new one starts from."""
    if new is None:
        raise JobConfigError("--base is the job file that --save starts from. Name the new file: --save FILE.")
    if new.absolute().parent != file.absolute().parent:
        raise JobConfigError(
            f"{new} is to be in another folder than {file}, whose paths start from its folder. "
            "Save it beside that file."
        )
    return read_mapping(file, "job file")


def _print(text: str) -> None:
    sys.stdout.write(for_terminal(f"{text}\n", sys.stdout))
