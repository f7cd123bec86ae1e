"""The report page: a self-contained HTML file that opens offline and contains no scripts."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_sm._text import duration, percent, rate, size, step_time
from lightning_sm._version import __version__
from lightning_sm.errors import JobConfigError
from lightning_sm.record.events import PARTS
from lightning_sm.record.prices import Prices
from lightning_sm.record.thresholds import MIN_STEPS, NOT_INPUT_BOUND
from lightning_sm.report import verdict
from lightning_sm.report.figures import Figures

# Collapse tables with more rows than this.
_OPEN_ROWS = 12
_TEMPLATE = Path(__file__).with_name("page.html")
_NEEDED = ("matplotlib", "jinja2")
_LOWER_IS_BETTER = re.compile(r"(?i)loss|err|perplexity|(?<![a-z])(r?msl?e|s?ma[ps]?e|nll|ppl|wer|cer|fid)(?![a-z])")
_FILTERS: dict[str, Callable[[Any], str]] = {
    "duration": duration,
    "percent": percent,
    "rate": rate,
    "step_time": step_time,
    "memory": lambda used_of: f"{size(used_of[0])} of {size(used_of[1])}",
    "number": "{:.6g}".format,
    "whole": "{:,}".format,
    "utc": lambda t: time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(t)),
}


def render(runs: Sequence[Figures], prices: Prices) -> str:
    """Return the page about one run, or about several runs side by side.

    Args:
        runs: One or more runs.
        prices: Prices of hosts; empty if the user gave none.

    Raises:
        JobConfigError: A library is not installed. The message says what to install.
    """
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise JobConfigError(f"A report needs {' and '.join(missing)}: pip install {' '.join(missing)}.")
    from jinja2 import Environment, StrictUndefined  # noqa: PLC0415 - may be missing

    from lightning_sm.report import charts  # noqa: PLC0415 - Matplotlib may be missing, and takes a second to import

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters |= {name: partial(_known, text) for name, text in _FILTERS.items()}
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        runs=runs,
        charts=charts,
        verdict=verdict,
        numbers=_numbers,
        metric_names=_metric_names,
        parts=PARTS,
        prices=prices,
        open_rows=_OPEN_ROWS,
        finite=finite,
        min_steps=MIN_STEPS,
        version=__version__,
        written=max(run.attempts[-1].end for run in runs),
    )


def _known(text: Callable[[Any], str], value: Any) -> str:
    """Format a value; return an empty string if it is unknown."""
    return "" if value is None else text(value)


def _numbers(run: Figures, prices: Prices) -> Iterator[tuple[str, str]]:
    """Yield the name and value of each figure in the boxes below the verdict, most informative first."""
    yield "duration", duration(run.seconds)
    amount = verdict.price(run, prices)
    if amount is not None:
        yield "cost", prices.amount(amount)
    if run.pace.waiting >= NOT_INPUT_BOUND:
        yield "steps wait for data", percent(run.pace.waiting)
    # Prefer validation metrics to training metrics, and other metrics to losses.
    for name in sorted(_metric_names(run), key=lambda name: (not name.startswith("val"), "loss" in name))[:1]:
        values = finite(run.metrics[name])
        best = f"{(min if _LOWER_IS_BETTER.search(name) else max)(values, default=math.nan):.4g}"
        last = f"{run.metrics[name][-1][1]:.4g}"
        yield f"best {name}", best if best == last else f"{best} (last {last})"
    if run.samples_per_s is not None:
        yield "samples per second", rate(run.samples_per_s)
    if run.pace.num_steps:
        yield "time of a step", step_time(run.pace.step_s)


def finite(points: Sequence[tuple[int, float]]) -> list[float]:
    """Return the finite values of a metric, without NaN or infinity."""
    return [value for _, value in points if math.isfinite(value)]


def _metric_names(run: Figures) -> list[str]:
    """Return the names of the metrics, with losses first and the data service's metrics last."""
    return sorted(run.metrics, key=lambda name: (name.startswith("data/"), "loss" not in name, name))
