"""The arithmetic of ``lightning-sm compare``, which extrapolates two runs to equal work and compares them.

Equal work is a whole, uninterrupted training with the same number of samples if both runs record the samples per step,
else with the same number of steps. Time outside the steps counts in proportion to the steps if it recurs, else once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_sm._table import draw_table
from lightning_sm._text import count, duration, percent, rate, step_time, times
from lightning_sm.errors import JobConfigError
from lightning_sm.record.events import SUCCEEDED
from lightning_sm.record.prices import Prices, cost
from lightning_sm.record.thresholds import MIN_STEPS
from lightning_sm.report.figures import RESTARTS, Figures


@dataclass(frozen=True)
class Training:
    """A whole training run, extrapolated from a recorded one.

    Attributes:
        run: The recorded run.
        steps: Number of steps of the whole training.
        per_hour: Hourly price of all hosts; None without prices.
    """

    run: Figures
    steps: int
    per_hour: float | None

    @property
    def apart_s(self) -> float:
        """Seconds outside the steps."""
        return self.run.fixed_s + self.run.growing_step_s * self.steps

    @property
    def seconds(self) -> float:
        """Seconds of the whole training."""
        return self.apart_s + self.run.pace.step_s * self.steps

    @property
    def cost(self) -> float | None:
        """Cost of the whole training."""
        return None if self.per_hour is None else cost(self.per_hour, self.seconds)


def compare(first: Figures, second: Figures, prices: Prices, steps: int | None = None) -> tuple[Training, Training]:
    """Extrapolate two runs to the same amount of work.

    Args:
        first: The baseline.
        second: The run to compare to it.
        prices: Prices of the hosts; empty to compare times only.
        steps: Number of steps of the first training. Defaults to that of the first run.

    Raises:
        JobConfigError: A run has no training steps, or only some hosts have prices.
    """
    for run in (first, second):
        if not run.pace.num_steps:
            raise JobConfigError(f"{run.run.source}: no training steps are recorded, so there is nothing to compare.")
        if gap := prices.gap(run.kinds):
            raise JobConfigError(f"{run.run.source}: {gap}")
    steps = steps or first.num_steps
    work = 1.0
    if first.samples_per_step and second.samples_per_step:
        work = first.samples_per_step / second.samples_per_step
    of_second = math.ceil(steps * work)
    return Training(first, steps, prices.total(first.kinds)), Training(second, of_second, prices.total(second.kinds))


def as_text(first: Training, second: Training, prices: Prices) -> str:
    """Return the comparison as a sentence, a table, and notes.

    Args:
        first: The baseline.
        second: The training to compare to it.
        prices: Prices of the hosts.
    """
    table = draw_table(_rows(first, second, prices), ["", "A", "B", "B compared to A"])
    return "\n\n".join([sentence(first, second, prices), table, "\n".join(_notes(first.run, second.run, prices))])


def as_json(first: Training, second: Training) -> dict[str, Any]:
    """Return the times and costs of both trainings as JSON values."""
    return {
        name: {
            "step_s": training.run.pace.step_s,
            "waiting": training.run.pace.waiting,
            "time_to_train_s": training.seconds,
            "cost_to_train": training.cost,
            "warnings": list(_doubts(name.upper(), training.run)),
        }
        for name, training in (("a", first), ("b", second))
    }


def sentence(first: Training, second: Training, prices: Prices) -> str:
    """Return the result in a sentence, preceded by caveats."""
    result = (
        f"B takes {duration(second.seconds)} instead of {duration(first.seconds)} for the same work "
        f"({_speed(first.seconds / second.seconds)})"
    )
    if first.cost is None or second.cost is None:
        result += ". To compare costs, give the prices of all hosts: --prices FILE or --price TYPE=PER_HOUR."
    else:
        change = _change(first.cost, second.cost)
        result += f", and costs {prices.amount(second.cost)} instead of {prices.amount(first.cost)} ({change})."
    return " ".join([*_doubts("A", first.run), *_doubts("B", second.run), result])


def _doubts(name: str, run: Figures) -> Iterator[str]:
    if run.run.flaws:
        yield f"{name}: {run.run.flaws}"
    if run.num_steps < MIN_STEPS:
        yield f"{name} has only {count(run.num_steps, 'step')}: too few for reliable times."
    if run.outcome != SUCCEEDED:
        yield f"{name} has not succeeded ({run.outcome})."
    if run.restarts:
        cost_s = duration(run.shares[RESTARTS] + run.repeated_s)
        yield f"{name} was restarted {times(len(run.restarts))}: the time lost ({cost_s}) is left out."


def _rows(first: Training, second: Training, prices: Prices) -> Iterator[Sequence[str]]:
    a, b = first.run, second.run
    yield "run", a.run.name, b.run.name, ""
    yield "hosts", _hosts(a), _hosts(b), ""
    yield "waiting for data", percent(a.pace.waiting), percent(b.pace.waiting), ""
    yield "time of a step", step_time(a.pace.step_s), step_time(b.pace.step_s), _speed(a.pace.step_s / b.pace.step_s)
    yield from _if_known("samples per second", a.samples_per_s, b.samples_per_s, rate)
    yield "steps", f"{first.steps:,}", f"{second.steps:,}", ""
    yield "outside the steps", duration(first.apart_s), duration(second.apart_s), ""
    yield "time to train", duration(first.seconds), duration(second.seconds), _speed(first.seconds / second.seconds)
    yield from _if_known("hourly price", first.per_hour, second.per_hour, prices.amount)
    yield from _if_known("cost to train", first.cost, second.cost, prices.amount)


def _if_known(name: str, a: float | None, b: float | None, text: Callable[[float], str]) -> Iterator[Sequence[str]]:
    if a is not None and b is not None:
        yield name, text(a), text(b), _change(a, b)


def _notes(a: Figures, b: Figures, prices: Prices) -> Iterator[str]:
    yield f"A: {a.run.source}"
    yield f"B: {b.run.source}"
    if prices:
        yield f"Prices: {prices.source} (as given; storage, transfer and logs cost extra)."
    if not (a.samples_per_step and b.samples_per_step):
        yield "This compares equal numbers of steps, which is equal work only if steps have the same number of samples."
    elif a.samples_per_step != b.samples_per_step:
        yield (
            f"Samples per step: {a.samples_per_step:,.0f} in A, {b.samples_per_step:,.0f} in B. All times are for "
            "the same number of samples. They do not show whether both train the model equally well."
        )


def _hosts(run: Figures) -> str:
    kinds = Counter(kind or group for group, kind in run.kinds)
    return ", ".join(f"{number} x {kind}" for kind, number in kinds.items())


def _speed(ratio: float) -> str:
    if round(ratio, 2) == 1:
        return "as fast"
    return f"{ratio:.3g} times as fast" if ratio >= 1 else f"{1 / ratio:.3g} times as long"


def _change(before: float, after: float) -> str:
    """Return a change such as ``46.5% less``."""
    if before == 0:
        return "more" if after else "the same"
    change = round(100 * (after / before - 1), 1)
    if change == 0:
        return "the same"
    return f"{abs(change):.1f}% {'more' if change > 0 else 'less'}"
