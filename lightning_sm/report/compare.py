"""``lightning-sm compare``: how long two runs take for the same work, and what that costs. Pure arithmetic.

The work is a number of samples where both runs say how many a step has, else a number of steps. A run is what its
record says, or a file of figures that were measured elsewhere.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_sm._table import draw_table
from lightning_sm._text import count, duration, percent, step_time
from lightning_sm.errors import JobConfigError
from lightning_sm.job.yaml_file import read_mapping
from lightning_sm.record.prices import Prices, cost
from lightning_sm.report.figures import Figures

FIGURES_FORMAT = """\
name: two hosts        # for people
hosts:                 # how many of each instance type, or of each group that has a price
  ml.p3.2xlarge: 1
  ml.c5.9xlarge: 1
step_s: 0.1968         # seconds of a step of all trainers together, once the first steps are over
samples_per_step: 8192 # optional: of all trainers; needed where the two runs differ in it
steps: 4800            # optional: how many steps the run had
apart_s: 90            # optional: seconds that the job was up besides its steps (start-up, validation, checkpoints)
"""
_FIGURES = {"name", "hosts", "step_s", "samples_per_step", "steps", "apart_s"}
# Costs are shown for this many steps if the length of the training is unknown: one step costs a fraction of a cent.
_SHOWN_STEPS = 1000


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
        apart_s: Seconds that the job took besides its steps, if known.
        waiting: Share of the step in which training waited for data, if known.
    """

    name: str
    source: str
    hosts: tuple[tuple[str, str | None], ...]
    step_s: float
    samples_per_step: float | None = None
    steps: int | None = None
    apart_s: float | None = None
    waiting: float | None = None


@dataclass(frozen=True)
class Comparison:
    """Two runs that do the same work.

    Attributes:
        first: The run that the other is compared to.
        second: The other run.
        first_price: Price of an hour of all hosts of the first run; None if it is unknown.
        second_price: The same of the second.
        work: Steps of the second run for one of the first: 1, unless their steps have different numbers of samples.
    """

    first: ComparedRun
    second: ComparedRun
    first_price: float | None
    second_price: float | None
    work: float

    @property
    def speed_up(self) -> float:
        """How many times as fast as the first run the second does the same work."""
        return self.first.step_s / (self.second.step_s * self.work)

    @property
    def price_ratio(self) -> float | None:
        """Price of an hour of the second run, divided by that of the first; None if it is not known."""
        if self.first_price is None or self.second_price is None or not self.first_price:
            return None
        return self.second_price / self.first_price

    @property
    def cost_ratio(self) -> float | None:
        """Cost of the second run for the same work, divided by that of the first; None if it is not known."""
        return None if self.price_ratio is None else self.price_ratio / self.speed_up


def compare(first: ComparedRun, second: ComparedRun, prices: Prices) -> Comparison:
    """Compare two runs.

    Args:
        first: The run that the other is compared to.
        second: The other run.
        prices: Prices of the hosts; empty to compare times only.

    Raises:
        JobConfigError: There are prices, but not of all hosts.
    """
    work = 1.0
    if first.samples_per_step and second.samples_per_step:
        work = first.samples_per_step / second.samples_per_step
    return Comparison(first, second, _price(first, prices), _price(second, prices), work)


def of_run(run: Figures) -> ComparedRun:
    """Return the facts about a recorded run that a comparison needs.

    Raises:
        JobConfigError: It has no training steps.
    """
    if not run.slowest.n:
        raise JobConfigError(f"{run.run.source}: no training steps are recorded, so there is nothing to compare.")
    return ComparedRun(
        name=run.run.name,
        source=run.run.source,
        hosts=tuple((host.group, host.instance_type) for host in run.hosts),
        step_s=run.slowest.step_s,
        samples_per_step=run.samples_per_step,
        steps=run.num_steps,
        apart_s=run.apart_s,
        waiting=run.slowest.waiting,
    )


def read_figures(file: Path) -> ComparedRun:
    """Read the figures of a run that was measured elsewhere.

    Args:
        file: A YAML or JSON file like ``FIGURES_FORMAT``.

    Raises:
        JobConfigError: The file cannot be read, or a value is missing or wrong.
    """
    fields = read_mapping(file, "file of figures", FIGURES_FORMAT)
    unknown = sorted(map(str, set(fields) - _FIGURES))
    if unknown:
        raise JobConfigError(f"{file}: unknown key {unknown[0]}. A file of figures looks like this:\n{FIGURES_FORMAT}")
    hosts = fields.get("hosts")
    if not isinstance(hosts, dict) or not hosts:
        raise JobConfigError(f"{file}: hosts is {hosts!r}; expected the number of hosts of each instance type.")
    counts = {str(name): _number(file, f"hosts.{name}", number, whole=True) for name, number in hosts.items()}
    optional = {
        name: _number(file, name, fields[name], whole=name == "steps")
        for name in ("samples_per_step", "steps", "apart_s")
        if fields.get(name) is not None
    }
    steps = optional.pop("steps", None)
    return ComparedRun(
        name=str(fields.get("name", file.stem)),
        source=str(file),
        hosts=tuple((name, name) for name, number in counts.items() for _ in range(int(number))),
        step_s=_number(file, "step_s", fields.get("step_s")),
        steps=None if steps is None else int(steps),
        **optional,
    )


def as_text(comparison: Comparison, prices: Prices, steps: int | None = None) -> str:
    """Return the comparison for people: a sentence, a table, and what the figures are.

    Args:
        comparison: The two runs.
        prices: The prices that were used.
        steps: How many steps the training has, of the first run; default: as many as that run had.
    """
    steps = steps or comparison.first.steps
    rows = list(_rows(comparison, prices, steps))
    table = draw_table(rows, ["", "A", "B", "B compared to A"])
    return "\n\n".join([sentence(comparison, prices), table, "\n".join(_notes(comparison, prices))])


def as_json(comparison: Comparison, prices: Prices, steps: int | None = None) -> dict[str, Any]:
    """Return the comparison for programs; see ``as_text`` for the arguments."""
    steps = steps or comparison.first.steps
    return {
        "a": _run_json(comparison.first, comparison.first_price, steps),
        "b": _run_json(comparison.second, comparison.second_price, steps and _steps_of_second(comparison, steps)),
        "speed_up": comparison.speed_up,
        "price_ratio": comparison.price_ratio,
        "cost_ratio": comparison.cost_ratio,
        "currency": prices.currency,
    }


def sentence(comparison: Comparison, prices: Prices) -> str:
    """Return the result in a sentence or two."""
    faster = comparison.speed_up
    verb, words = _verb_and_speed(faster)
    speed = f"B {verb} {words} as A"
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


def _rows(comparison: Comparison, prices: Prices, steps: int | None) -> Any:
    a, b = comparison.first, comparison.second
    yield "run", a.name, b.name, ""
    yield "hosts", _hosts(a), _hosts(b), ""
    if a.waiting is not None or b.waiting is not None:
        yield "waiting for data", *(_optional(run.waiting, percent) for run in (a, b)), ""
    yield "time of a step", step_time(a.step_s), step_time(b.step_s), _speed(a.step_s / b.step_s)
    if a.samples_per_step and b.samples_per_step:
        rates = [run.samples_per_step / run.step_s for run in (a, b) if run.samples_per_step]
        yield "samples per second", *(f"{rate:,.4g}" for rate in rates), _speed(comparison.speed_up)
    if comparison.first_price is not None and comparison.second_price is not None:
        both = (comparison.first_price, comparison.second_price)
        ratio = comparison.price_ratio
        yield "price of an hour", *map(prices.amount, both), "" if ratio is None else _change(ratio)
        work = (a.step_s * _SHOWN_STEPS, b.step_s * _SHOWN_STEPS * comparison.work)
        amounts = [prices.amount(cost(*pair)) for pair in zip(both, work, strict=True)]
        ratio = comparison.cost_ratio
        label = f"cost of {count(_SHOWN_STEPS, 'step')}" + ("" if comparison.work == 1 else " of A")
        yield label, *amounts, "" if ratio is None else _change(ratio)
    if steps is not None:
        yield from _whole_job(comparison, prices, steps)


def _whole_job(comparison: Comparison, prices: Prices, steps: int) -> Any:
    """Yield rows about the training as a whole, of ``steps`` steps of the first run."""
    runs = (comparison.first, comparison.second)
    numbers = (steps, _steps_of_second(comparison, steps))
    seconds = [(run.apart_s or 0.0) + run.step_s * number for run, number in zip(runs, numbers, strict=True)]
    yield "steps", f"{numbers[0]:,}", f"{numbers[1]:,}", ""
    if any(run.apart_s for run in runs):
        yield "outside the steps", *(_optional(run.apart_s, duration) for run in runs), ""
    yield "time to train", *map(duration, seconds), _speed(seconds[0] / seconds[1])
    if comparison.first_price is not None and comparison.second_price is not None:
        first, second = cost(comparison.first_price, seconds[0]), cost(comparison.second_price, seconds[1])
        yield (
            "cost to train",
            prices.amount(first),
            prices.amount(second),
            _change(second / first) if first else "",
        )


def _notes(comparison: Comparison, prices: Prices) -> Any:
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
    elif not (a.samples_per_step and b.samples_per_step):
        yield "The comparison is by step: that is the same work only if a step of A and one of B have as many samples."


def _run_json(run: ComparedRun, price: float | None, steps: int | None) -> dict[str, Any]:
    seconds = None if steps is None else (run.apart_s or 0.0) + run.step_s * steps
    return {
        "name": run.name,
        "source": run.source,
        "hosts": dict(Counter(instance_type or group for group, instance_type in run.hosts)),
        "step_s": run.step_s,
        "samples_per_step": run.samples_per_step,
        "steps": steps,
        "apart_s": run.apart_s,
        "waiting": run.waiting,
        "price_per_hour": price,
        "cost_per_step": None if price is None else cost(price, run.step_s),
        "time_to_train_s": seconds,
        "cost_to_train": None if price is None or seconds is None else cost(price, seconds),
    }


def _steps_of_second(comparison: Comparison, steps: int) -> int:
    return math.ceil(steps * comparison.work)


def _price(run: ComparedRun, prices: Prices) -> float | None:
    if not prices:
        return None
    missing = sorted({kind or group for group, kind in run.hosts if prices.of(group, kind) is None})
    if missing:
        raise JobConfigError(
            f"{run.name} ({run.source}) has hosts without a price: {', '.join(missing)}. "
            f"Prices known: {', '.join(sorted(prices.per_hour))} ({prices.source})."
        )
    return prices.total(run.hosts)


def _hosts(run: ComparedRun) -> str:
    kinds = Counter(instance_type or group for group, instance_type in run.hosts)
    return ", ".join(f"{number} x {kind}" for kind, number in kinds.items())


def _speed(ratio: float) -> str:
    return _verb_and_speed(ratio)[1]


def _verb_and_speed(ratio: float) -> tuple[str, str]:
    if f"{ratio:.2f}" == "1.00":
        return "is", "as fast"
    return ("is", f"{ratio:.3g} times as fast") if ratio >= 1 else ("takes", f"{1 / ratio:.3g} times as long")


def _change(ratio: float) -> str:
    """Return a change such as ``46.5% less``, for the second value divided by the first."""
    change = round(100 * (ratio - 1), 1)
    if change == 0:
        return "the same"
    return f"{abs(change):.1f}% {'more' if change > 0 else 'less'}"


def _optional(value: float | None, text: Any) -> str:
    return "not known" if value is None else str(text(value))


def _number(file: Path, name: str, value: Any, *, whole: bool = False) -> float:
    is_number = type(value) in ({int} if whole else {int, float})
    if not is_number or not math.isfinite(value) or value < 0 or (value == 0 and name != "apart_s"):
        kind = "a positive whole number" if whole else "a positive number"
        raise JobConfigError(f"{file}: {name} is {value!r}; expected {kind}.")
    return float(value)
