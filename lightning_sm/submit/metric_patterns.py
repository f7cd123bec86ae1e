"""Metric definitions: the regular expressions with which CloudWatch extracts metrics from the log."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

# A number that LineProgress prints with "%.6g", as one group. CloudWatch accepts neither NaN nor infinity, so they
# do not match.
_NUMBER = r"(-?[0-9.]+(?:e[-+][0-9]+)?)"


def metric_definitions(names: Sequence[str], patterns: Mapping[str, str]) -> list[dict[str, str]]:
    """Build the metric definitions of CreateTrainingJob.

    A name matches ``name=number`` in the lines of ``LineProgress``, where a space precedes every metric: ``acc``
    matches neither in ``val_acc`` nor in ``val/acc``.

    Args:
        names: Metrics as LineProgress prints them.
        patterns: Regular expressions of other metrics by name.

    Returns:
        ``{"Name": ..., "Regex": ...}`` for each.
    """
    regexes = {name: f" {re.escape(name)}={_NUMBER}" for name in names} | dict(patterns)
    return [{"Name": name, "Regex": regex} for name, regex in regexes.items()]


def pattern_problem(pattern: str) -> str | None:
    """Explain what is wrong with a regular expression, or return None.

    Python's syntax and the service's agree in everything that log lines need.
    """
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        return f"not a valid regular expression ({error})"
    return None if groups else "no group (...) around the number"
