"""``lightning-sm compare``: how long two runs take for the same work, and what that costs. Pure arithmetic.

The work is a whole training of so many samples where both runs say how many a step has, else of so many steps, without
interruptions. What a run takes outside its steps is part of it where both say it: once, or in proportion to the steps.
A run is what its record says, or a file of figures that were
measured elsewhere.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from lightning_sm._table import draw_table
from lightning_sm._text import count, duration, percent, rate, step_time, times
from lightning_sm.errors import JobConfigError
from lightning_sm.job.yaml_file import read_mapping
from lightning_sm.record.events import SUCCEEDED
from lightning_sm.record.limits import MIN_STEPS
from lightning_sm.record.prices import Prices, cost
from lightning_sm.report.figures import RESTARTS, Figures

FIGURES_FORMAT = """\
name: two hosts        # for people
hosts:                 # how many of each instance type, or of each group that has a price
  ml.p3.2xlarge: 1
  ml.c5.9xlarge: 1
step_s: 0.1968         # seconds of a step of all trainers together, once the first steps are over
samples_per_step: 8192 # optional: of all trainers; needed where the two runs differ in it
steps: 4800            # optional: how many steps the run had
apart_s: 90            # optional: seconds that the job was up besides its steps, however many these are (start-up, end)
"""
_Whole = Annotated[int, msgspec.Meta(gt=0)]
_Positive = Annotated[float, msgspec.Meta(gt=0, lt=1e12)]  # nor infinity, which YAML has
# The length of a training whose length is unknown: one step costs a fraction of a cent.
_ASSUMED_STEPS = 1000


class _FiguresFile(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of ``FIGURES_FORMAT``."""

    hosts: Annotated[dict[str, _Whole], msgspec.Meta(min_length=1)]
    step_s: _Positive
    name: str = ""
    samples_per_step: _Positive | None = None
    steps: _Whole | None = None
    apart_s: Annotated[float, msgspec.Meta(ge=0)] | None = None


@dataclass(frozen=True)
class ComparedRun:
    """The facts about a run that a comparison needs.

    Attributes:
        name: Name of the run.
        source: The folder or file that it comes from.
        hosts: Group and instance type of each host.
        step_s: Mean seconds of a step.
        samples_per_step: Samples of a step of all trainers together, if known.
        steps: Number of steps, if known.
        apart_s: Seconds that the job took besides its steps, however many these are, if known: start-up and end.
        apart_step_s: Seconds besides the steps that grow with them, for each one: validations, checkpoints, ends of
            epochs.
        waiting: Share of the step in which training waited for data, if known.
        num_restarts: How often its training began again.
        restarts_s: What that cost, with the steps that were trained again, in seconds; in no other time here.
        outcome: How it ended.
    """

    name: str
    source: str
    hosts: tuple[tuple[str, str | None], ...]
    step_s: float
    samples_per_step: float | None = None
    steps: int | None = None
    apart_s: float | None = None
    apart_step_s: float = 0.0
    waiting: float | None = None
    num_restarts: int = 0
    restarts_s: float = 0.0
    outcome: str = SUCCEEDED


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

    first: ComparedRun
    second: ComparedRun
    per_hour: tuple[float, float] | None
    work: float
    steps: int

    @property
    def numbers(self) -> tuple[int, int]:
        """Steps of the whole training of each run."""
        return self.steps, math.ceil(self.steps * self.work)

    @property
    def apart_s(self) -> tuple[float, float]:
        """Seconds of each run outside the steps of the whole training; 0 unless both are known."""
        first, second = self.first.apart_s, self.second.apart_s
        if first is None or second is None:
            return 0.0, 0.0
        growing = (self.first.apart_step_s * self.numbers[0], self.second.apart_step_s * self.numbers[1])
        return first + growing[0], second + growing[1]

    @property
    def seconds(self) -> tuple[float, float]:
        """Seconds that each run takes for the whole training."""
        first, second = self.apart_s
        return first + self.first.step_s * self.steps, second + self.second.step_s * self.steps * self.work

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


def compare(first: ComparedRun, second: ComparedRun, prices: Prices, steps: int | None = None) -> Comparison:
    """Compare two runs.

    Args:
        first: The run that the other is compared to.
        second: The other run.
        prices: Prices of the hosts; empty to compare times only.
        steps: How many steps the training has, of the first run; default: as many as that run had, if it says so.

    Raises:
        JobConfigError: There are prices, but not of all hosts.
    """
    work = 1.0
    if first.samples_per_step and second.samples_per_step:
        work = first.samples_per_step / second.samples_per_step
    per_hour = (_price(first, prices), _price(second, prices)) if prices else None
    return Comparison(first, second, per_hour, work, steps or first.steps or _ASSUMED_STEPS)


def of_run(run: Figures) -> ComparedRun:
    """Return the facts about a recorded run that a comparison needs.

    Raises:
        JobConfigError: It has no training steps.
    """
    if not run.pace.num_steps:
        raise JobConfigError(f"{run.run.source}: no training steps are recorded, so there is nothing to compare.")
    return ComparedRun(
        name=run.run.name,
        source=run.run.source,
        hosts=tuple((host.group, host.instance_type) for host in run.hosts),
        step_s=run.pace.step_s,
        samples_per_step=run.samples_per_step,
        steps=run.num_steps,
        apart_s=run.fixed_s,
        apart_step_s=run.growing_step_s,
        waiting=run.pace.waiting,
        num_restarts=len(run.restarts),
        restarts_s=run.shares[RESTARTS] + run.repeated_s,
        outcome=run.outcome,
    )


def read_figures(file: Path) -> ComparedRun:
    """Read the figures of a run that was measured elsewhere.

    Args:
        file: A YAML or JSON file like ``FIGURES_FORMAT``.

    Raises:
        JobConfigError: The file cannot be read, or a value is missing or wrong.
    """
    fields = read_mapping(file, "file of figures", FIGURES_FORMAT)
    try:
        found = msgspec.convert(fields, _FiguresFile)
    except msgspec.ValidationError as error:
        raise JobConfigError(f"{file}: {error}. A file of figures:\n{FIGURES_FORMAT}") from error
    return ComparedRun(
        found.name or file.stem,
        str(file),
        tuple((kind, kind) for kind, number in found.hosts.items() for _ in range(number)),
        found.step_s,
        samples_per_step=found.samples_per_step,
        steps=found.steps,
        apart_s=found.apart_s,
    )


def as_text(comparison: Comparison, prices: Prices) -> str:
    """Return the comparison for people: a sentence, a table, and what the figures are.

    Args:
        comparison: The two runs.
        prices: The prices that were used.
    """
    table = draw_table(_rows(comparison, prices), ["", "A", "B", "B compared to A"])
    return "\n\n".join([sentence(comparison, prices), table, "\n".join(_notes(comparison, prices))])


def sentence(comparison: Comparison, prices: Prices) -> str:
    """Return the result in a sentence or two, after what makes it doubtful."""
    doubts = [*_doubts("A", comparison.first), *_doubts("B", comparison.second)]
    return " ".join([*doubts, _result(comparison, prices)])


def _doubts(name: str, run: ComparedRun) -> Iterator[str]:
    if run.steps is not None and run.steps < MIN_STEPS:
        yield f"{name} has only {count(run.steps, 'step')}, whose times say little."
    if run.outcome != SUCCEEDED:
        yield f"{name} has not succeeded ({run.outcome})."
    if run.num_restarts:
        cost_s = duration(run.restarts_s)
        yield f"{name} was restarted {times(run.num_restarts)}: what that cost ({cost_s}) is left out."


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
    yield "run", a.name, b.name, ""
    yield "hosts", _hosts(a), _hosts(b), ""
    if a.waiting is not None or b.waiting is not None:
        yield "waiting for data", *("not known" if one.waiting is None else percent(one.waiting) for one in (a, b)), ""
    yield "time of a step", step_time(a.step_s), step_time(b.step_s), _speed(a.step_s / b.step_s)
    if a.samples_per_step and b.samples_per_step:
        rates = (a.samples_per_step / a.step_s, b.samples_per_step / b.step_s)
        yield "samples per second", *map(rate, rates), _speed(rates[1] / rates[0])
    if comparison.per_hour is not None:
        yield "price of an hour", *map(prices.amount, comparison.per_hour), _change(comparison.price_ratio)
    yield "steps", *(f"{number:,}" for number in comparison.numbers), ""
    if any(comparison.apart_s):
        yield "outside the steps", *map(duration, comparison.apart_s), ""
    yield "time to train", *map(duration, comparison.seconds), _speed(comparison.speed_up)
    if comparison.per_hour is not None:
        costs = map(cost, comparison.per_hour, comparison.seconds)
        yield "cost to train", *map(prices.amount, costs), _change(comparison.cost_ratio)


def _notes(comparison: Comparison, prices: Prices) -> Iterator[str]:
    a, b = comparison.first, comparison.second
    yield f"A: {a.source}"
    yield f"B: {b.source}"
    if prices:
        yield f"Prices: {prices.source} (as given; storage, transfer and logs cost extra)."
    if comparison.work != 1:
        yield (
            f"A step of A has {a.samples_per_step:,.0f} samples, one of B {b.samples_per_step:,.0f}: times are for "
            "the same number of samples. Whether both train the model equally well is another question."
        )
    if (a.apart_s is None) != (b.apart_s is None):
        known = "A" if b.apart_s is None else "B"
        yield f"Only {known} says what it took outside the steps (start-up, validation, checkpoints): that is left out."
    if not (a.samples_per_step and b.samples_per_step):
        yield "The comparison is by step: that is the same work only if a step of A and one of B have as many samples."


def _price(run: ComparedRun, prices: Prices) -> float:
    per_hour = prices.total(run.hosts)
    if per_hour is None:
        missing = sorted({kind or group for group, kind in run.hosts if prices.of(group, kind) is None})
        raise JobConfigError(
            f"{run.name} ({run.source}) has hosts without a price: {', '.join(missing)}. "
            f"Prices known: {', '.join(sorted(prices.per_hour))} ({prices.source})."
        )
    return per_hour


def _hosts(run: ComparedRun) -> str:
    kinds = Counter(instance_type or group for group, instance_type in run.hosts)
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
