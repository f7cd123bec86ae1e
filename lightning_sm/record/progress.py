"""The lines of progress in a job's log, and the regular expressions by which CloudWatch reads metrics from them.

A line looks like ``epoch=3/10 step=45 validation=3 val_acc=0.9333 steps_per_s=12.5 eta=0:10:23 data_wait=1.2%``. A
space precedes every name but the first, so that ``acc`` is found neither in ``val_acc`` nor in ``val/acc``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from lightning_sm._text import clock_time

# The number of validations so far, in the one line that follows each validation.
_VALIDATION = "validation"
# A number as ``progress_line`` prints it, as one group. CloudWatch accepts neither NaN nor infinity, so they do not
# match.
_NUMBER = r"(-?[0-9.]+(?:e[-+][0-9]+)?)"


def progress_line(
    position: str,
    metrics: Mapping[str, float],
    *,
    num_validations: int | None = None,
    steps_per_s: float | None = None,
    samples_per_s: float | None = None,
    eta_s: float | None = None,
    memory_bytes: int | None = None,
    data_wait: float | None = None,
) -> str:
    """Return a line of progress, without what is None.

    Args:
        position: Where the run stands, such as ``epoch=3/10 step=45``.
        metrics: The model's metrics by name.
        num_validations: The number of validations so far, in the first line after one.
        steps_per_s: Training batches of this rank per second.
        samples_per_s: Samples of all ranks per second.
        eta_s: Seconds until the training ends.
        memory_bytes: Memory in use, of the GPU if there is one.
        data_wait: The share of the time that training waits for batches, 0 to 1.
    """
    words = [position]
    if num_validations is not None:
        words.append(f"{_VALIDATION}={num_validations}")
    words += [f"{name}={value:.6g}" for name, value in metrics.items()]
    if steps_per_s is not None:
        words.append(f"steps_per_s={steps_per_s:.3g}")
    if samples_per_s is not None:
        words.append(f"samples_per_s={samples_per_s:.4g}")
    if eta_s is not None:
        words.append(f"eta={clock_time(eta_s)}")
    if memory_bytes is not None:
        words.append(f"memory_gb={memory_bytes / 1e9:.3g}")
    if data_wait is not None:
        words.append(f"data_wait={100 * data_wait:.1f}%")
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
