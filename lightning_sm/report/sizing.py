"""``lightning-sm plan``: what another number of workers would change, from a short run. Pure arithmetic.

The model of a step is ``StepModel`` (record/bottleneck.py), which takes two measured numbers: the work that one step
needs from all workers together, and how long a step takes that waits for nothing. Where the measured run does not say
something, the prediction is a range, and the plan says why.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lightning_sm._table import draw_table
from lightning_sm._text import count, duration, percent, size, step_time
from lightning_sm.data.settings import default_workers
from lightning_sm.errors import JobConfigError
from lightning_sm.record.bottleneck import NOT_INPUT_BOUND, WORKERS_ARE_BUSY, StepModel
from lightning_sm.record.prices import Prices, cost
from lightning_sm.report.figures import Figures

# Batches that vary less than this do not hold up others, whatever the number of workers.
_VARIES = 0.3
# From twice the measured number of workers on, other limits may come first.
_FAR = 2.0
# Even overloaded workers may be busy for only this share of the time: they wait for requests, and for free slots.
_LEAST_BUSY = 0.9
# Cores of another kind, and threads that share a core, work at these multiples of the measured speed.
_OTHER_KIND = (0.7, 1.4)
# A line of a plan is a number of workers or of hosts; more lines than this help nobody.
_MAX_LINES = 7
_GBIT_S = 1e9 / 8


@dataclass(frozen=True)
class Hosts:
    """The data hosts that a plan is to use.

    Attributes:
        vcpus: vCPUs of each; None for hosts like those of the measured run.
        kind: Their instance type or group, for prices; None for that of the measured run.
        speed: How fast one of their vCPUs builds batches, compared to one of the measured run; None if unknown.
        network_gbit: What their network, and that of the trainers, can do, in Gbit/s; None if unknown.
    """

    vcpus: int | None = None
    kind: str | None = None
    speed: float | None = None
    network_gbit: float | None = None

    @property
    def is_other_kind(self) -> bool:
        """Whether they are of another kind than those that were measured."""
        return self.vcpus is not None or self.kind is not None


@dataclass(frozen=True)
class MeasuredRun:
    """The measurements of a run's input.

    Attributes:
        model: The model of its step.
        step_s: Seconds of a step.
        waiting: Share of it in which training waited for data.
        is_remote: Whether data hosts build the batches.
        num_hosts: Number of hosts whose workers build them.
        bytes_per_step: Bytes of the batches of a step of all ranks; None if they cross no network.
        busy: Share of the time that the workers of data hosts worked; None if unknown.
        variation: Standard deviation of the time for a batch, divided by its mean; None if unknown.
        is_bound: Whether the work of a step is only known not to be more than the model says.
        reason: Why more workers would not help; empty if they would, or if none are needed.
    """

    model: StepModel
    step_s: float
    waiting: float
    is_remote: bool
    num_hosts: int
    bytes_per_step: float | None = None
    busy: float | None = None
    variation: float | None = None
    is_bound: bool = False
    reason: str = ""


@dataclass(frozen=True)
class SizingRow:
    """A prediction.

    Attributes:
        workers: Number of workers, of all ranks or data hosts together.
        num_hosts: Number of hosts that they are on.
        step_s: Seconds of a step: the least and the most.
        limit: What limits it: ``training``, ``workers`` or ``network``.
        network: Share of what the network can do, if that is known.
        seconds: Seconds of the whole job, the least and the most.
        cost: What the job costs, the least and the most; None if a price is unknown.
        is_measured: Whether this is the measured run.
    """

    workers: int
    num_hosts: int
    step_s: tuple[float, float]
    limit: str
    network: float | None
    seconds: tuple[float, float]
    cost: tuple[float, float] | None
    is_measured: bool = False


@dataclass(frozen=True)
class Sizing:
    """The changes that other numbers of workers would bring.

    Attributes:
        name: Name of the measured run.
        measured: What it says.
        lines: The measured numbers of workers first, then more, up to the number that removes the waiting.
        steps: Number of steps of the whole job.
        has_data_hosts: Whether the predictions are for data hosts, and not for workers on the hosts of the trainers.
        caveats: What the predictions rest on.
    """

    name: str
    measured: MeasuredRun
    lines: tuple[SizingRow, ...]
    steps: int
    has_data_hosts: bool
    caveats: tuple[str, ...]

    @property
    def best(self) -> SizingRow:
        """The prediction without waiting."""
        return self.lines[-1]


def measure(run: Figures) -> MeasuredRun:
    """Return the measurements of a run's input.

    Args:
        run: A run, of which a minute is enough.

    Raises:
        JobConfigError: It does not say enough.
    """
    if run.slowest.n == 0:
        raise JobConfigError(f"{run.run.source}: no training steps are recorded, and nothing can be planned from that.")
    step_s, waiting = run.slowest.step_s, run.slowest.waiting
    own_s = min(rank.own_s for rank in run.ranks.values())
    if run.data[0]:
        return _remote(run, own_s)
    loaders = list(run.loaders.values())
    if not loaders:
        raise JobConfigError(
            f"{run.run.source}: the record does not say how many workers built the batches. Record a run with "
            "this version of lightning_sm."
        )
    workers = round(run.of_all_ranks([loader.workers for loader in loaders]))
    num_hosts = sum(host.role == "trainer" for host in run.hosts)
    if workers == 0:  # the training process builds its batches between two steps
        model = StepModel(own_s, waiting * step_s * max(1, run.world_size), workers=0)
        return MeasuredRun(model, step_s, waiting, is_remote=False, num_hosts=num_hosts)
    at_work = min(workers, max(1, sum(host.cpus for host in run.hosts if host.role == "trainer") or workers))
    is_bound = waiting < NOT_INPUT_BOUND
    model = StepModel(own_s, at_work * (own_s if is_bound else step_s), workers)
    return MeasuredRun(model, step_s, waiting, is_remote=False, num_hosts=num_hosts, is_bound=is_bound)


def plan(run: Figures, prices: Prices, wanted: Hosts | None = None, steps: int | None = None) -> Sizing:
    """Plan from a measured run.

    Args:
        run: The run.
        prices: Prices of hosts, if the user gives any.
        wanted: The data hosts to plan with. Default: more of the measured ones.
        steps: Steps of the whole job. Default: as many as the measured run had.

    Raises:
        JobConfigError: The run does not say enough.
    """
    wanted = wanted or Hosts()
    measured = measure(run)
    steps = steps or run.num_steps
    caveats = list(_caveats(run, measured, wanted))
    per_host = max(1, round(measured.model.workers / max(1, measured.num_hosts)))
    if wanted.vcpus is not None:
        per_host = default_workers(wanted.vcpus)
    _, slowest = _speeds(wanted)
    needed = replace(measured.model, cost_s=measured.model.cost_s / slowest).workers_needed
    first = _measured_line(run, measured, prices, steps)
    if measured.waiting < NOT_INPUT_BOUND and not wanted.is_other_kind:
        return Sizing(run.run.name, measured, (first,), steps, measured.is_remote, ())
    most = max(1, math.ceil(needed / per_host))
    # Hosts of the measured kind are added to those that there are; another kind takes their place.
    least = measured.num_hosts + 1 if measured.is_remote and not wanted.is_other_kind else 1
    has_data_hosts = measured.is_remote or wanted.is_other_kind
    if not has_data_hosts:
        numbers = _between(measured.model.workers + 1, max(measured.model.workers + 1, needed))
        pairs = [(number, measured.num_hosts) for number in numbers]
    else:
        pairs = [(number * per_host, number) for number in _between(least, max(least, most))]
    lines = [
        _line(run, measured, prices, wanted, steps, workers=workers, num_hosts=num_hosts)
        for workers, num_hosts in pairs
    ]
    return Sizing(run.run.name, measured, (first, *lines), steps, has_data_hosts, tuple(caveats))


def sentence(planned: Sizing, prices: Prices) -> str:
    """Return the plan in a sentence or two."""
    measured, best = planned.measured, planned.best
    first = planned.lines[0]
    if best is first:
        return (
            f"Training waits {percent(measured.waiting)} of the time for data: more workers would change nothing worth "
            "mentioning."
        )
    if measured.reason:
        return f"Training waits {percent(measured.waiting)} of the time for data. {measured.reason}"
    where = f" on {count(best.num_hosts, 'data host')}" if planned.has_data_hosts else ""
    effect = "is the most that the network can feed" if best.limit == "network" else "would remove the wait"
    text = (
        f"{count(best.workers, 'worker')}{where} {effect}: a step would take "
        f"{_range(best.step_s, step_time)} instead of {step_time(measured.step_s)}, and "
        f"the job of {count(planned.steps, 'step')} "
        f"{_range(best.seconds, duration)} instead of {duration(first.seconds[0])}."
    )
    if best.cost and first.cost:
        text += f" The job would cost {_range(best.cost, prices.amount)} instead of {prices.amount(first.cost[0])}."
    return text


def as_text(planned: Sizing, prices: Prices) -> str:
    """Return the plan for people: a sentence, a table, and what it rests on."""
    model, measured = planned.measured.model, planned.measured
    bound = "at most " if measured.is_bound else ""
    facts = [
        f"Measured in {planned.name}: {step_time(measured.step_s)} a step, {percent(measured.waiting)} of it waiting "
        f"for data; without waiting {step_time(model.own_s)}.",
        f"A step needs {bound}{step_time(model.cost_s)} of work by all workers together"
        + (
            "."
            if measured.busy is None
            else f", which were busy {percent(measured.busy)} of the time while batches were requested."
        ),
    ]
    if measured.variation is not None:
        facts.append(f"The time for a batch varies by {percent(measured.variation)} (standard deviation / mean).")
    return "\n\n".join(
        [
            sentence(planned, prices),
            _table(planned, prices),
            "\n".join(facts),
            "\n".join(f"- {caveat}" for caveat in planned.caveats),
        ]
    ).rstrip()


def as_json(planned: Sizing) -> dict[str, Any]:
    """Return the plan for programs; ranges are pairs of the least and the most."""
    return {
        "name": planned.name,
        "steps": planned.steps,
        "measured": asdict(planned.measured),
        "lines": [asdict(line) for line in planned.lines],
        "caveats": list(planned.caveats),
    }


def _remote(run: Figures, own_s: float) -> MeasuredRun:
    ranks, hosts = run.data
    up = [host for host in hosts if host.state == "up" and host.workers]
    workers = sum(host.workers for host in up)
    if not workers:
        raise JobConfigError(f"{run.run.source}: the record has no data host that was up and had workers.")
    # Each by its own steps: the last figures of some ranks may have come too late.
    cost_s = run.of_all_ranks([rank.produce_s / rank.num_steps for rank in ranks.values()])
    num_bytes = run.of_all_ranks([rank.num_bytes / rank.num_steps for rank in ranks.values()])
    capacity_s = math.fsum(host.capacity_s for host in up)
    busy = min(1.0, math.fsum(host.busy_s for host in up) / capacity_s) if capacity_s else 1.0
    variations = [rank.produce_variation for rank in ranks.values() if rank.produce_variation is not None]
    step_s, waiting = run.slowest.step_s, run.slowest.waiting
    reason = ""
    if waiting >= NOT_INPUT_BOUND and busy < WORKERS_ARE_BUSY:
        reason = (
            f"The workers of the data hosts ({workers:,}) were busy only {percent(busy)} of the time, so more of "
            "them are not the answer: look at the network, at a slow host, and at data_service.window_batches."
        )
    return MeasuredRun(
        # Workers that wait for something else do not show how busy they can be.
        model=StepModel(own_s, cost_s, workers, busy if busy >= WORKERS_ARE_BUSY and not reason else 1.0),
        step_s=step_s,
        waiting=waiting,
        is_remote=True,
        num_hosts=len(up),
        bytes_per_step=num_bytes,
        busy=busy,
        variation=max(variations, default=None),
        reason=reason,
    )


def _measured_line(run: Figures, measured: MeasuredRun, prices: Prices, steps: int) -> SizingRow:
    seconds = _job_s(run, measured.step_s, steps)
    price = prices.total((host.group, host.instance_type) for host in run.hosts)
    amount = None if price is None else cost(price, seconds)
    return SizingRow(
        workers=measured.model.workers,
        num_hosts=measured.num_hosts,
        step_s=(measured.step_s, measured.step_s),
        limit="training" if measured.waiting < NOT_INPUT_BOUND else "workers",
        network=None,
        seconds=(seconds, seconds),
        cost=None if amount is None else (amount, amount),
        is_measured=True,
    )


def _line(
    run: Figures, measured: MeasuredRun, prices: Prices, wanted: Hosts, steps: int, *, workers: int, num_hosts: int
) -> SizingRow:
    model = replace(measured.model, wire_s=_wire_s(run, measured, wanted, num_hosts))
    fastest, slowest = _speeds(wanted)
    least = replace(model, cost_s=model.cost_s / fastest, busy=1.0 if model.busy >= _LEAST_BUSY else model.busy)
    most = replace(model, cost_s=model.cost_s / slowest, busy=min(model.busy, 1.0))
    step_s = (least.step_s(workers), most.step_s(workers) * _in_order(measured.variation, workers))
    seconds = (_job_s(run, step_s[0], steps), _job_s(run, step_s[1], steps))
    price = _price(run, measured, prices, wanted, num_hosts)
    return SizingRow(
        workers=workers,
        num_hosts=num_hosts,
        step_s=step_s,
        limit=most.limit(workers),
        network=model.wire_s / step_s[0] if model.wire_s else None,
        seconds=seconds,
        cost=None if price is None else (cost(price, seconds[0]), cost(price, seconds[1])),
    )


def _in_order(variation: float | None, workers: int) -> float:
    """Return the factor by which a step may take longer at most, because batches are taken in order.

    It bounds simulations with windows of 2 W + 2 batches: with a variation of 1 and 2, 8 workers took up to 1.5 and 2.5
    times as long as the model predicts, 32 workers 2.0 and 4.9 times.
    """
    if variation is None or variation <= _VARIES:
        return 1.0
    return 1.0 + 0.2 * variation**2 * math.log2(max(1, workers))


def _wire_s(run: Figures, measured: MeasuredRun, wanted: Hosts, num_hosts: int) -> float:
    """Return the seconds that the network of data hosts or trainers needs for the batches of a step."""
    if wanted.network_gbit is None or not measured.bytes_per_step:
        return 0.0
    trainers = sum(host.role == "trainer" for host in run.hosts) or 1
    return measured.bytes_per_step / (wanted.network_gbit * _GBIT_S * min(num_hosts, trainers))


def _speeds(wanted: Hosts) -> tuple[float, float]:
    """Return the highest and the lowest speed of the wanted workers, compared to the measured ones."""
    if wanted.speed is not None:
        return wanted.speed, wanted.speed
    return (_OTHER_KIND[1], _OTHER_KIND[0]) if wanted.is_other_kind else (1.0, 1.0)


def _price(run: Figures, measured: MeasuredRun, prices: Prices, wanted: Hosts, num_hosts: int) -> float | None:
    """Return the price of an hour of all hosts, with this number of data hosts."""
    if not (measured.is_remote or wanted.is_other_kind):
        return prices.total((host.group, host.instance_type) for host in run.hosts)
    trainers = [(host.group, host.instance_type) for host in run.hosts if host.role == "trainer"]
    data = next(((host.group, host.instance_type) for host in run.hosts if host.role == "data"), ("data", None))
    kind = (wanted.kind, wanted.kind) if wanted.kind else data
    return prices.total([*trainers, *([kind] * num_hosts)])


def _job_s(run: Figures, step_s: float, steps: int) -> float:
    """Return the seconds of the job: its steps, and all else, of which validations and checkpoints grow with them."""
    grows = sum(run.shares[name] for name in ("validation", "checkpoints"))
    fixed = run.apart_s - grows
    return fixed + grows * steps / max(1, run.num_steps) + step_s * steps


def _between(first: int, last: int) -> list[int]:
    """Return some whole numbers from the first to the last."""
    if last - first < _MAX_LINES:
        return list(range(first, last + 1))
    parts = _MAX_LINES - 1
    return sorted({round(first + (last - first) * index / parts) for index in range(parts + 1)})


def _caveats(run: Figures, measured: MeasuredRun, wanted: Hosts) -> Any:
    needed = measured.model.workers_needed
    if measured.reason:
        yield measured.reason
    if measured.is_bound:
        yield (
            "The workers were never too slow, so the run says only how much work a step needs at most: fewer workers "
            "may do as well."
        )
    if wanted.is_other_kind and wanted.speed is None:
        low, high = _OTHER_KIND
        yield (
            f"Hosts of this kind were not measured: the ranges assume that one of their vCPUs builds batches {low:g} "
            f"to {high:g} times as fast as a measured one. Measure a minute there, or give --speed."
        )
    if wanted.speed is not None:
        yield f"--speed {wanted.speed:g} is an assumption, not a measurement."
    if measured.variation is not None and measured.variation > _VARIES:
        yield (
            f"The time for a batch varies by {percent(measured.variation)}: training takes batches in order, so a slow "
            f"one holds up those behind it. A window of at least {8 * needed} batches (data_service.window_batches) "
            "removes most of the range."
        )
    if not measured.is_remote:
        yield (
            "The work of a step is estimated from the time of a step and the number of workers, as data hosts would "
            "measure it. Workers on the hosts of the trainers share their CPUs with training."
        )
    if needed > _FAR * max(1, measured.model.workers):
        yield (
            f"Predictions for more than {math.floor(_FAR * max(1, measured.model.workers))} workers, twice the "
            "measured number, say what is possible at best: storage, memory or network may limit them first."
        )
    if measured.bytes_per_step and wanted.network_gbit is None:
        rate = measured.bytes_per_step / measured.step_s
        then = measured.bytes_per_step / measured.model.own_s
        yield (
            f"The network carried {size(rate)}/s and would carry {size(then)}/s without waiting. The run does not show "
            "whether it can: give --network GBIT."
        )


def _table(planned: Sizing, prices: Prices) -> str:
    headers = [
        "workers",
        "hosts for data",
        "time of a step",
        "limited by",
        f"job of {count(planned.steps, 'step')}",
    ]
    has_network = any(line.network is not None for line in planned.lines)
    has_costs = any(line.cost for line in planned.lines)
    headers += ["network"] * has_network + ["cost"] * has_costs
    if not planned.has_data_hosts:
        headers[1] = "hosts"
    rows = []
    for line in planned.lines:
        row = [
            f"{line.workers:,}" + (" (measured)" if line.is_measured else ""),
            f"{line.num_hosts:,}",
            _range(line.step_s, step_time),
            line.limit,
            _range(line.seconds, duration),
        ]
        row += ["" if line.network is None else percent(line.network)] * has_network
        row += ["" if line.cost is None else _range(line.cost, prices.amount)] * has_costs
        rows.append(row)
    return draw_table(rows, headers)


def _range(values: Sequence[float], text: Any) -> str:
    low, high = (str(text(value)) for value in values)
    return low if low == high else f"{low} to {high}"
