"""Human-readable formats for numbers, times and names, the same in logs, pages and errors."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import TextIO

_MINUTE_S = 60
_HOUR_S = 3600
# Shorter durations are written in seconds with three significant digits, longer ones in minutes or hours.
_LONG_S = 120.0
# Minimum of difflib's ratio: long words may differ in two letters, short words in one letter or in the order of two.
_SIMILAR = 0.66
# Escape sequences of ECMA-48, with 7-bit and 8-bit introducers: control sequences, command strings (titles, clipboard),
# and the rest.
_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]*[0-~]"
)
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def duration(seconds: float) -> str:
    """Format a duration: ``18.4 ms``, ``96 s``, ``12 min 5 s``, ``18 min``, ``3 h 20 min``."""
    if seconds < _LONG_S:
        return step_time(seconds)
    whole, units = round(seconds), ("min", "s")
    if whole >= _HOUR_S:
        whole, units = round(seconds / _MINUTE_S), ("h", "min")
    large, small = divmod(whole, _MINUTE_S)
    return f"{large} {units[0]} {small} {units[1]}" if small else f"{large} {units[0]}"


def step_time(seconds: float) -> str:
    """Format a duration with three significant digits, in milliseconds below 1 s, otherwise in seconds."""
    return f"{1e3 * seconds:.3g} ms" if 0 < seconds < 1 else f"{seconds:.3g} s"


def clock_time(seconds: float) -> str:
    """Format a duration as hours, minutes and seconds, for sorting and parsing: ``26:03:09``."""
    hours, rest = divmod(round(seconds), _HOUR_S)
    return f"{hours}:{rest // _MINUTE_S:02d}:{rest % _MINUTE_S:02d}"


def size(num_bytes: float) -> str:
    """Format a number of bytes in the largest decimal unit that does not exceed it."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def percent(share: float) -> str:
    """Format a share as a whole percentage, or ``<1%`` if it would round to 0%."""
    rounded = f"{100 * share:.0f}%"
    return "<1%" if share > 0 and rounded == "0%" else rounded


def rate(per_second: float) -> str:
    """Format a rate with three significant digits, or as an integer if it is at least 100: ``0.25``, ``12,345``."""
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"  # noqa: PLR2004 - three digits


def count(number: float, singular: str, plural: str = "") -> str:
    """Format a number with its noun: ``1 host``, ``4,800 steps``."""
    return f"{number:,} {singular if number == 1 else plural or f'{singular}s'}"


def times(number: int) -> str:
    """Format a number of occurrences: ``once``, ``3 times``."""
    return "once" if number == 1 else f"{number} times"


def listed(names: Sequence[str], most: int = 8) -> str:
    """Join names with commas; if there are more than ``most``, leave out the rest and state the total number."""
    rest = f", ... ({len(names)} in all)" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def shortened(text: str, most: int) -> str:
    """Cut a text to at most ``most`` characters, ending in ``...`` if it was longer."""
    return text if len(text) <= most else text[: most - 3] + "..."


def closest(word: str, names: Iterable[str]) -> str | None:
    """Return the name most similar to a misspelled word, ignoring case, dashes and underscores, or None."""
    spelled = {re.sub(r"[-_ ]", "", name.lower()): name for name in names}
    close = difflib.get_close_matches(re.sub(r"[-_ ]", "", word.lower()), spelled, n=1, cutoff=_SIMILAR)
    return spelled[close[0]] if close else None


def plain(text: str) -> str:
    """Remove what a terminal would act on: escape sequences, and control characters except tab and line feed."""
    return _CONTROLS.sub("", _ESCAPES.sub("", text))


def for_terminal(text: str, stream: TextIO) -> str:
    """Make another program's output ``plain`` if it goes to a terminal; otherwise, return it unchanged."""
    return plain(text) if stream.isatty() else text
