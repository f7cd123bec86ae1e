"""``lightning-sm compare``: how long two runs take for the same work, and what that costs. Pure arithmetic.

The work is a whole training of so many samples where both runs say how many a step has, else of so many steps, without
interruptions. What a run takes outside its steps is part of it: once, or in proportion to the steps.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_sm._table import draw_table
from lightning_sm._text import count, duration, percent, rate, step_time, times
from lightning_sm.errors import JobConfigError
from lightning_sm.record.events import SUCCEEDED
from lightning_sm.record.limits import MIN_STEPS
from lightning_sm.record.prices import Prices, cost
from lightning_sm.report.figures import RESTARTS, Figures


@dataclass(frozen=True)
class Comparison:
    """Two runs that do the same work.

    Attributes:
        first: The run that the other is compared to.
        second: The other run.
        per_hour: Price of an hour of all hosts of each run; None if no prices are given.
        work: Steps of the second run for one of the first: 1, unless their steps have different numbers of samples.
        steps: Steps of the whole training, of the first run.
    """

    first: Figures
    second: Figures
    per_hour: tuple[float, float] | None
    work: float
    steps: int

    @property
    def numbers(self) -> tuple[int, int]:
        """Steps of the whole training of each run."""
        return self.steps, math.ceil(self.steps * self.work)

    @property
    def apart_s(self) -> tuple[float, float]:
        """Seconds of each run outside the steps of the whole training."""
        first, second = self.first, self.second
        return (
            first.fixed_s + first.growing_step_s * self.numbers[0],
            second.fixed_s + second.growing_step_s * self.numbers[1],
        )

    @property
    def seconds(self) -> tuple[float, float]:
        """Seconds that each run takes for the whole training."""
        first, second = self.apart_s
        return (
            first + self.first.pace.step_s * self.steps,
            second + self.second.pace.step_s * self.steps * self.work,
        )

    @property
    def speed_up(self) -> float:
        """How many times as fast as the first run the second does the same work."""
        return self.seconds[0] / self.seconds[1]

    @property
    def price_ratio(self) -> float | None:
        """Price of an hour of the second run, divided by that of the first; None if it is not known."""
        return None if self.per_hour is None or not self.per_hour[0] else self.per_hour[1] / self.per_hour[0]

    @property
    def cost_ratio(self) -> float | None:
        """Cost of the second run for the same work, divided by that of the first; None if it is not known."""
        return None if self.price_ratio is None else self.price_ratio / self.speed_up


def compare(first: Figures, second: Figures, prices: Prices, steps: int | None = None) -> Comparison:
    """Compare two runs.

    Args:
        first: The run that the other is compared to.
        second: The other run.
        prices: Prices of the hosts; empty to compare times only.
        steps: How many steps the training has, of the first run; default: as many as that run had.

    Raises:
        JobConfigError: A run has no training steps, or there are prices, but not of all hosts.
    """
    for run in (first, second):
        if not run.pace.num_steps:
            raise JobConfigError(f"{run.run.source}: no training steps are recorded, so there is nothing to compare.")
    work = 1.0
    if first.samples_per_step and second.samples_per_step:
        work = first.samples_per_step / second.samples_per_step
    per_hour = (_price(first, prices), _price(second, prices)) if prices else None
    return Comparison(first, second, per_hour, work, steps or first.num_steps)


def as_text(comparison: Comparison, prices: Prices) -> str:
    """Return the comparison for people: a sentence, a table, and what the figures are.

    Args:
        comparison: The two runs.
        prices: The prices that were used.
    """
    table = draw_table(_rows(comparison, prices), ["", "A", "B", "B compared to A"])
    return "\n\n".join([sentence(comparison, prices), table, "\n".join(_notes(comparison, prices))])


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return the times and costs of both runs for programs."""
    runs = {}
    for index, (name, run) in enumerate((("a", comparison.first), ("b", comparison.second))):
        seconds, per_hour = comparison.seconds[index], comparison.per_hour
        runs[name] = {
            "step_s": run.pace.step_s,
            "waiting": run.pace.waiting,
            "time_to_train_s": seconds,
            "cost_to_train": None if per_hour is None else cost(per_hour[index], seconds),
        }
    return runs


def sentence(comparison: Comparison, prices: Prices) -> str:
    """Return the result in a sentence or two, after what makes it doubtful."""
    doubts = [*_doubts("A", comparison.first), *_doubts("B", comparison.second)]
    return " ".join([*doubts, _result(comparison, prices)])


def _doubts(name: str, run: Figures) -> Iterator[str]:
    if run.num_steps < MIN_STEPS:
        yield f"{name} has only {count(run.num_steps, 'step')}, whose times say little."
    if run.outcome != SUCCEEDED:
        yield f"{name} has not succeeded ({run.outcome})."
    if run.restarts:
        cost_s = duration(run.shares[RESTARTS] + run.repeated_s)
        yield f"{name} was restarted {times(len(run.restarts))}: what that cost ({cost_s}) is left out."


def _result(comparison: Comparison, prices: Prices) -> str:
    faster = comparison.speed_up
    speed = f"B {'is' if round(faster, 2) >= 1 else 'takes'} {_speed(faster)} as A"
    ratio, price_ratio = comparison.cost_ratio, comparison.price_ratio
    if ratio is None or price_ratio is None:
        return f"{speed}. To compare costs, give the prices of all hosts: --prices FILE or --price TYPE=PER_HOUR."
    joint = "and" if (faster >= 1) == (ratio <= 1) else "but"
    text = f"{speed}, {joint} costs {_change(ratio)} for the same work"
    text += f" ({1 / ratio:.3g} times cheaper)." if 0 < ratio < 0.5 else "."  # noqa: PLR2004 - where "times" reads better
    if price_ratio > 1:
        text += (
            f" An hour of B costs {price_ratio:.3g} times as much as one of A: B is cheaper if it is at least "
            f"{price_ratio:.3g} times as fast."
        )
    return text


def _rows(comparison: Comparison, prices: Prices) -> Iterator[Sequence[str]]:
    a, b = comparison.first, comparison.second
    yield "run", a.run.name, b.run.name, ""
    yield "hosts", _hosts(a), _hosts(b), ""
    yield "waiting for data", percent(a.pace.waiting), percent(b.pace.waiting), ""
    yield "time of a step", step_time(a.pace.step_s), step_time(b.pace.step_s), _speed(a.pace.step_s / b.pace.step_s)
    if a.samples_per_s and b.samples_per_s:
        yield (
            "samples per second",
            rate(a.samples_per_s),
            rate(b.samples_per_s),
            _speed(b.samples_per_s / a.samples_per_s),
        )
    if comparison.per_hour is not None:
        yield "price of an hour", *map(prices.amount, comparison.per_hour), _change(comparison.price_ratio)
    yield "steps", *(f"{number:,}" for number in comparison.numbers), ""
    yield "outside the steps", *map(duration, comparison.apart_s), ""
    yield "time to train", *map(duration, comparison.seconds), _speed(comparison.speed_up)
    if comparison.per_hour is not None:
        costs = map(cost, comparison.per_hour, comparison.seconds)
        yield "cost to train", *map(prices.amount, costs), _change(comparison.cost_ratio)


def _notes(comparison: Comparison, prices: Prices) -> Iterator[str]:
    a, b = comparison.first, comparison.second
    yield f"A: {a.run.source}"
    yield f"B: {b.run.source}"
    if prices:
        yield f"Prices: {prices.source} (as given; storage, transfer and logs cost extra)."
    if comparison.work != 1:
        yield (
            f"A step of A has {a.samples_per_step:,.0f} samples, one of B {b.samples_per_step:,.0f}: times are for "
            "the same number of samples. Whether both train the model equally well is another question."
        )
    if not (a.samples_per_step and b.samples_per_step):
        yield "The comparison is by step: that is the same work only if a step of A and one of B have as many samples."


def _price(run: Figures, prices: Prices) -> float:
    hosts = [(host.group, host.instance_type) for host in run.hosts]
    per_hour = prices.total(hosts)
    if per_hour is None:
        missing = sorted({kind or group for group, kind in hosts if prices.of(group, kind) is None})
        raise JobConfigError(
            f"{run.run.name} ({run.run.source}) has hosts without a price: {', '.join(missing)}. "
            f"Prices known: {', '.join(sorted(prices.per_hour))} ({prices.source})."
        )
    return per_hour


def _hosts(run: Figures) -> str:
    kinds = Counter(host.instance_type or host.group for host in run.hosts)
    return ", ".join(f"{number} x {kind}" for kind, number in kinds.items())


def _speed(ratio: float) -> str:
    if round(ratio, 2) == 1:
        return "as fast"
    return f"{ratio:.3g} times as fast" if ratio >= 1 else f"{1 / ratio:.3g} times as long"


def _change(ratio: float | None) -> str:
    """Return a change such as ``46.5% less``, for the second value divided by the first; empty if that is unknown."""
    if ratio is None:
        return ""
    change = round(100 * (ratio - 1), 1)
    if change == 0:
        return "the same"
    return f"{abs(change):.1f}% {'more' if change > 0 else 'less'}"
