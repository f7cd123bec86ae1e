"""Metric definitions: the regular expressions with which CloudWatch extracts metrics from the log."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from lightning_sm.record.progress import metric_pattern, objective_pattern


def metric_definitions(
    names: Sequence[str], patterns: Mapping[str, str], objective: str | None = None
) -> list[dict[str, str]]:
    """Build the metric definitions of CreateTrainingJob.

    Args:
        names: Metrics as LineProgress prints them (``record/progress.py``).
        patterns: Regular expressions of other metrics by name.
        objective: The metric that a tuning job optimizes: one of ``names``, which is then read once per validation;
            or of ``patterns``, which stays as it is.

    Returns:
        ``{"Name": ..., "Regex": ...}`` for each.
    """
    regexes = {name: objective_pattern(name) if name == objective else metric_pattern(name) for name in names}
    return [{"Name": name, "Regex": regex} for name, regex in (regexes | dict(patterns)).items()]


def pattern_problem(pattern: str) -> str | None:
    """Explain what is wrong with a regular expression, or return None.

    Python's syntax and the service's agree in everything that log lines need.
    """
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        return f"not a valid regular expression ({error})"
    return None if groups else "no group (...) around the number"
