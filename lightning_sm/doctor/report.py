"""The results of the checks: a table for people, JSON and an exit code for scripts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum

from lightning_sm._table import draw_table
from lightning_sm._text import count

# Narrower tables break every path; wider ones are hard to read.
_LEAST_WIDTH = 80
_MOST_WIDTH = 200
_NAME_WIDTH = 16
_STATUS_WIDTH = 7
_GAPS = 6
# The share of the room for findings, which are longer than advice: that is often empty.
_FOUND_SHARE = 0.58


class Status(str, Enum):
    """The severity of a result."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Result:
    """One row of the report.

    Attributes:
        name: What was checked.
        status: The severity.
        found: What was found.
        advice: What to do; empty if nothing has to be done.
    """

    name: str
    status: Status
    found: str
    advice: str = ""


def ok(name: str, found: str) -> Result:
    """Make a result that needs no action."""
    return Result(name, Status.OK, found)


def warning(name: str, found: str, advice: str) -> Result:
    """Make a result that some jobs would fail on, or that slows jobs down."""
    return Result(name, Status.WARNING, found, advice)


def problem(name: str, found: str, advice: str) -> Result:
    """Make a result that a training job would fail on."""
    return Result(name, Status.PROBLEM, found, advice)


def exit_code(results: Sequence[Result], *, strict: bool = False) -> int:
    """Return 1 if a training job would fail here, else 0; if strict, 1 for warnings, too."""
    statuses = {result.status for result in results}
    return int(Status.PROBLEM in statuses or (strict and Status.WARNING in statuses))


def table(results: Sequence[Result], width: int) -> str:
    """Draw the results, one row each, for a terminal of ``width`` characters."""
    room = min(max(width, _LEAST_WIDTH), _MOST_WIDTH) - _NAME_WIDTH - _STATUS_WIDTH - _GAPS
    found_width = int(room * _FOUND_SHARE)
    rows = [
        [_printable(result.name), result.status.value, _printable(result.found), _printable(result.advice)]
        for result in results
    ]
    widths = {"check": _NAME_WIDTH, "found": found_width, "what to do": room - found_width}
    return draw_table(rows, ["check", "status", "found", "what to do"], max_widths=widths)


def summary(results: Sequence[Result], seconds: float) -> str:
    """Count the results in one line, and name problems and warnings."""
    parts = [
        _counted(results, Status.PROBLEM, "problem"),
        _counted(results, Status.WARNING, "warning"),
        f"{sum(result.status is Status.OK for result in results)} ok",
    ]
    return f"{', '.join(parts)}; {seconds:.1f} s."


def as_json(results: Sequence[Result], seconds: float, code: int) -> str:
    """Write everything as one JSON object."""
    counts = {status.value: sum(result.status is status for result in results) for status in Status}
    facts = {
        "exit_code": code,
        "seconds": round(seconds, 3),
        "counts": counts,
        "results": [asdict(result) for result in results],
    }
    return json.dumps(facts, indent=2)


def _counted(results: Sequence[Result], status: Status, noun: str) -> str:
    names = [_printable(result.name) for result in results if result.status is status]
    which = f" ({', '.join(dict.fromkeys(names))})" if names else ""
    return f"{count(len(names), noun)}{which}"


def _printable(text: str) -> str:
    """Escape characters that a terminal cannot show, because files and variables may contain anything."""
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode("ascii") for char in text
    )
