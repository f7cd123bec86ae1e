"""The command line of ``lightning-sm doctor``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict

from lightning_sm._table import draw_table
from lightning_sm._text import count, plain
from lightning_sm.doctor import gpus, job, machine
from lightning_sm.doctor.context import Context, Result, Status

EXAMPLES = """\
examples:
  in a running container, or on a laptop:
    lightning-sm doctor
  in an image before a job is submitted:
    docker run IMAGE doctor
  in a script:
    lightning-sm doctor --json > doctor.json || echo "this host is not ready"

exit codes: 0 no problem, 1 at least one, 2 wrong arguments
"""

# In the order of the report.
CHECKS: tuple[Callable[[Context], Iterable[Result]], ...] = (
    job.facts,
    job.variables,
    job.other_hosts,
    gpus.gpus,
    gpus.fabric,
    machine.disk,
    machine.machine,
    machine.signals,
    machine.versions,
)
_WIDTHS = {"check": 16, "found": 54, "what to do": 40}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the doctor's options to its subcommand's parser."""
    parser.add_argument("--json", action="store_true", help="write JSON instead of a table")


def main(options: argparse.Namespace, env: Mapping[str, str] = os.environ) -> int:
    """Check this host, write the report to stdout and return the exit code."""
    context = Context.of(env)
    results = [result for check in CHECKS for result in check(context)]
    sys.stdout.write(json.dumps({"results": list(map(asdict, results))}, indent=2) if options.json else _table(results))
    sys.stdout.write("\n")
    return int(any(result.status is Status.PROBLEM for result in results))


def _table(results: list[Result]) -> str:
    rows = [[result.name, result.status.value, plain(result.found), result.advice] for result in results]
    numbers = [sum(result.status is status for result in results) for status in (Status.PROBLEM, Status.WARNING)]
    summary = f"{count(numbers[0], 'problem')}, {count(numbers[1], 'warning')}."
    return f"{draw_table(rows, ['check', 'status', 'found', 'what to do'], max_widths=_WIDTHS)}\n\n{summary}"
