"""The lines of progress in a job's log, and the regular expressions by which CloudWatch reads metrics from them.

A line looks like ``epoch=3/10 step=45 validation=3 val_acc=0.9333 steps_per_s=12.5 eta=0:10:23 data_wait=1.2%``. A
space precedes every name but the first, so that ``acc`` is found neither in ``val_acc`` nor in ``val/acc``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# The number of validations so far, in the one line that follows each validation.
_VALIDATION = "validation"
# A number as ``progress_line`` prints it, as one group. CloudWatch accepts neither NaN nor infinity, so they do not
# match.
_NUMBER = r"(-?[0-9.]+(?:e[-+][0-9]+)?)"


def progress_line(
    position: str, metrics: Mapping[str, float], rates: Mapping[str, str], num_validations: int | None = None
) -> str:
    """Return a line of progress.

    Args:
        position: Where the run stands, such as ``epoch=3/10 step=45``.
        metrics: The model's metrics by name.
        rates: How fast the run is, as text by name.
        num_validations: The number of validations so far, in the first line after one.
    """
    words = [position]
    if num_validations is not None:
        words.append(f"{_VALIDATION}={num_validations}")
    words += [f"{name}={value:.6g}" for name, value in metrics.items()]
    words += [f"{name}={text}" for name, text in rates.items()]
    return " ".join(words)


def metric_pattern(name: str) -> str:
    """Return the regular expression that finds a metric in all lines that have it."""
    return f" {re.escape(name)}={_NUMBER}"


def objective_pattern(name: str) -> str:
    """Return the regular expression that finds a metric only in the one line that follows each validation.

    A tuning job takes the last value that it finds, and Hyperband takes each of them, but the lines between two
    validations would repeat an old value.
    """
    return f" {_VALIDATION}=[0-9]+ (?:.* )?{re.escape(name)}={_NUMBER}"
