"""Numbers for people: with as many digits as mean something, and always with a unit."""

from __future__ import annotations

_MINUTE_S = 60
_HOUR_S = 3600
# Below this, seconds have three digits that count; from there on, minutes or hours.
_LONG_S = 120.0


def duration(seconds: float) -> str:
    """Return a length of time: ``18.4 ms``, ``96 s``, ``12 min 5 s``, ``3 h 20 min``."""
    if seconds < _LONG_S:
        return step_time(seconds)
    whole = round(seconds)
    if whole < _HOUR_S:
        return f"{whole // _MINUTE_S} min {whole % _MINUTE_S} s"
    minutes = round(seconds / _MINUTE_S)
    return f"{minutes // _MINUTE_S} h {minutes % _MINUTE_S} min"


def step_time(seconds: float) -> str:
    """Return a short time in milliseconds, a longer one in seconds, with three digits."""
    return f"{1e3 * seconds:.3g} ms" if 0 < seconds < 1 else f"{seconds:.3g} s"


def size(num_bytes: float) -> str:
    """Return bytes in the largest decimal unit of which there is at least one."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def percent(share: float) -> str:
    """Return a share as a whole percentage; a trace of something is not nothing."""
    rounded = f"{100 * share:.0f}%"
    return "<1%" if share > 0 and rounded == "0%" else rounded


def count(number: float, singular: str, plural: str = "") -> str:
    """Return a number with its noun: ``1 host``, ``4,800 steps``."""
    return f"{number:,} {singular if number == 1 else plural or f'{singular}s'}"
