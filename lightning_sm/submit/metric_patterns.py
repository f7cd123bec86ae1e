"""Metric definitions: from names to the regular expressions with which the service reads the log."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

# What "%.6g" prints (LineProgress), as one group. CloudWatch takes neither NaN nor infinity: no match, no data point.
_NUMBER = r"(-?[0-9.]+(?:e[-+][0-9]+)?)"


def metric_definitions(names: Sequence[str], patterns: Mapping[str, str]) -> list[dict[str, str]]:
    """Make the definitions that CreateTrainingJob takes.

    A name finds ``name=number`` in the lines of ``LineProgress``, where every metric follows a space: ``acc`` does not
    match within ``val_acc``, nor within ``val/acc``.

    Args:
        names: Metrics as LineProgress prints them.
        patterns: Other metrics: name to regular expression.

    Returns:
        ``{"Name": ..., "Regex": ...}`` for each.
    """
    regexes = {name: f" {re.escape(name)}={_NUMBER}" for name in names} | dict(patterns)
    return [{"Name": name, "Regex": regex} for name, regex in regexes.items()]


def pattern_problem(pattern: str) -> str | None:
    """Say what is wrong with a regular expression, or None.

    Args:
        pattern: As the user wrote it. Python's syntax and the service's agree in all that logs need.
    """
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        return f"it is no regular expression ({error})"
    return None if groups else "it has no group (...) around the number"
