"""The progress lines in a job's log, and the regular expressions that CloudWatch uses to read metrics from them.

A line looks like ``epoch=3/10 step=45 validation=3 val_acc=0.9333 steps_per_s=12.5 eta=0:10:23 data_wait=1.2%``. A
space precedes every name except the first, so a search for ``acc`` matches neither ``val_acc`` nor ``val/acc``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# Only the first line after each validation has this name, followed by the number of validations so far.
_VALIDATION = "validation"
# A number in the format of ``progress_line``, as one group. CloudWatch rejects NaN and infinity, so they do not match.
_NUMBER = r"(-?[0-9.]+(?:e[-+][0-9]+)?)"


def progress_line(
    position: str, metrics: Mapping[str, float], rates: Mapping[str, str], num_validations: int | None = None
) -> str:
    """Return a progress line.

    Args:
        position: The current epoch and step, such as ``epoch=3/10 step=45``.
        metrics: The model's metrics by name.
        rates: Rates and times of the run, as text by name.
        num_validations: The number of validations so far; None except in the first line after a validation.
    """
    words = [position]
    if num_validations is not None:
        words.append(f"{_VALIDATION}={num_validations}")
    words += [f"{name}={value:.6g}" for name, value in metrics.items()]
    words += [f"{name}={text}" for name, text in rates.items()]
    return " ".join(words)


def metric_pattern(name: str) -> str:
    """Return a regular expression that matches a metric in every line that contains it."""
    return f" {re.escape(name)}={_NUMBER}"


def objective_pattern(name: str) -> str:
    """Return a regular expression that matches a metric only in the first line after each validation.

    A tuning job uses the last match, and Hyperband uses every match. The other lines must not match, because they
    repeat the value of an earlier validation.
    """
    return f" {_VALIDATION}=[0-9]+ (?:.* )?{re.escape(name)}={_NUMBER}"
