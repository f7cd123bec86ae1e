"""The command lines of ``lightning-sm report``, ``compare`` and ``plan``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from lightning_sm._arguments import positive_number, positive_whole_number
from lightning_sm._log import command_logger
from lightning_sm.errors import OutputDirectoryError
from lightning_sm.record.prices import read_prices
from lightning_sm.record.runs import read_run, read_runs
from lightning_sm.report import compare, findings, sizing
from lightning_sm.report.figures import Figures
from lightning_sm.report.page import check_libraries, render

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
  two runs side by side:
    lightning-sm report before/ after/ -o both.html
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
{_PRICES}
exit codes: 0 the plan is written, 2 it cannot be"""


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``report`` to the parser of its subcommand."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="DIR", help="folder or output.tar.gz of a run")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("report.html"), metavar="FILE", help="default: report.html"
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
    parser.add_argument("--json", action="store_true", help="write JSON instead of a table")
    _add_job(parser)
    _add_prices(parser)


def report(options: argparse.Namespace) -> int:
    """Write a report and return the exit code.

    Raises:
        JobConfigError: There is no record, a price is wrong, or a library is missing.
        OutputDirectoryError: The report cannot be written.
    """
    check_libraries()
    prices = read_prices(options.prices, options.price)
    runs = [Figures(run) for run in read_runs(options.runs, options.job)]
    _write(options.output, render(runs, prices))
    for run in runs:
        _LOG.info("%s: %s %s", run.run.name, findings.ending(run), findings.bottleneck(run))
    _LOG.info("report: %s", options.output)
    return 0


def compare_runs(options: argparse.Namespace) -> int:
    """Write a comparison to stdout and return the exit code.

    Raises:
        JobConfigError: A run or a file cannot be read, or a price is missing or wrong.
    """
    prices = read_prices(options.prices, options.price)
    job_a, job_b = options.jobs
    comparison = compare.compare(_measured(options.a, job_a), _measured(options.b, job_b), prices)
    if options.json:
        _print(json.dumps(compare.as_json(comparison, prices, options.steps), indent=2))
    else:
        _print(compare.as_text(comparison, prices, options.steps))
    return 0


def plan_run(options: argparse.Namespace) -> int:
    """Write a plan to stdout and return the exit code.

    Raises:
        JobConfigError: The run cannot be read, does not say enough, or a price is wrong.
    """
    prices = read_prices(options.prices, options.price)
    wanted = sizing.Hosts(options.vcpus, options.kind, options.speed, options.network)
    planned = sizing.plan(Figures(read_run(options.run, options.job)), prices, wanted, options.steps)
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


def _write(file: Path, text: str) -> None:
    """Replace a file atomically: a reader sees either the old report or the new one."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=file.parent, prefix=f".{file.name}-", delete=False
        ) as new:
            new.write(text)
        try:
            umask = os.umask(0)
            os.umask(umask)
            Path(new.name).chmod(0o666 & ~umask)
            Path(new.name).replace(file)
        except OSError:
            Path(new.name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise OutputDirectoryError(f"The report {file} cannot be written: {error.strerror}.") from error


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
