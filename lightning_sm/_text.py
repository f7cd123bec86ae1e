"""Numbers, times and names as people read them: one form for each, in logs, pages and errors."""

from __future__ import annotations

from collections.abc import Sequence

_MINUTE_S = 60
_HOUR_S = 3600
# Below this, a duration is given in seconds with three significant digits; from here on, in minutes or hours.
_LONG_S = 120.0


def duration(seconds: float) -> str:
    """Return a length of time: ``18.4 ms``, ``96 s``, ``12 min 5 s``, ``18 min``, ``3 h 20 min``."""
    if seconds < _LONG_S:
        return step_time(seconds)
    whole, units = round(seconds), ("min", "s")
    if whole >= _HOUR_S:
        whole, units = round(seconds / _MINUTE_S), ("h", "min")
    large, small = divmod(whole, _MINUTE_S)
    return f"{large} {units[0]} {small} {units[1]}" if small else f"{large} {units[0]}"


def step_time(seconds: float) -> str:
    """Return a short time in milliseconds, a longer one in seconds, with three significant digits."""
    return f"{1e3 * seconds:.3g} ms" if 0 < seconds < 1 else f"{seconds:.3g} s"


def clock_time(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds, which sorts and parses: ``26:03:09``."""
    hours, rest = divmod(round(seconds), _HOUR_S)
    return f"{hours}:{rest // _MINUTE_S:02d}:{rest % _MINUTE_S:02d}"


def size(num_bytes: float) -> str:
    """Return bytes in the largest decimal unit of which there is at least one."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def percent(share: float) -> str:
    """Return a share as a whole percentage; ``<1%`` for a share that would round to 0%."""
    rounded = f"{100 * share:.0f}%"
    return "<1%" if share > 0 and rounded == "0%" else rounded


def count(number: float, singular: str, plural: str = "") -> str:
    """Return a number with its noun: ``1 host``, ``4,800 steps``."""
    return f"{number:,} {singular if number == 1 else plural or f'{singular}s'}"


def times(number: int) -> str:
    """Return how often something happened: ``once``, ``3 times``."""
    return "once" if number == 1 else f"{number} times"


def listed(names: Sequence[str], most: int = 8) -> str:
    """Join names with commas; of more than ``most``, only the first."""
    rest = f", ... ({len(names)} in all)" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def shortened(text: str, most: int) -> str:
    """Cut a text that has more characters than ``most``, and mark the cut with ``...``."""
    return text if len(text) <= most else text[: most - 3] + "..."
