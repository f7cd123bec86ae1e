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
from lightning_sm.job.instance_types import num_vcpus
from lightning_sm.record.bottleneck import NOT_INPUT_BOUND, WORKERS_ARE_BUSY, StepModel
from lightning_sm.record.limits import MIN_STEPS
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
# Any host's network carries at least 1 Gbit/s, so that the latency of small batches is not taken for its limit.
_LEAST_NETWORK = _GBIT_S
# A change that saves less of the job is not proposed.
_WORTH = 0.02
# More than this many times the measured workers are not proposed: transforms are what is too slow.
_MOST_WORKERS = 10


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
        num_ranks: Number of ranks.
        most_per_rank: The most workers for the loader of a rank, for which there are CPUs; None if batches are built on
            data hosts.
        bytes_per_step: Bytes of the batches of a step of all ranks; None if they cross no network.
        bytes_per_s: The most that the network has carried for a rank; None if batches cross no network.
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
    num_ranks: int = 1
    most_per_rank: int | None = None
    bytes_per_step: float | None = None
    bytes_per_s: float | None = None
    busy: float | None = None
    variation: float | None = None
    is_bound: bool = False
    reason: str = ""


@dataclass(frozen=True)
class SizingRow:
    """A prediction.

    Attributes:
        workers: Number of workers, of all ranks or data hosts together.
        per_rank: The same as ``num_workers`` of the loader of each rank; None if data hosts build the batches.
        num_hosts: Number of hosts that they are on.
        step_s: Seconds of a step: the least and the most.
        limit: What limits it: ``training``, ``workers`` or ``network``.
        network: Share of what the network can do, if that is known.
        seconds: Seconds of the whole job, the least and the most.
        cost: What the job costs, the least and the most; None if a price is unknown.
        is_measured: Whether this is the measured run.
    """

    workers: int
    per_rank: int | None
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
        lines: The measured numbers of workers first, then more, up to the number that removes the waiting, or up to the
            CPUs that there are.
        best: The line to choose: the cheapest one. If no prices are given, all hosts count as equally expensive.
        kind: Instance type or group of the data hosts; None for that of the measured run.
        steps: Number of steps of the whole job.
        has_data_hosts: Whether the predictions are for data hosts, and not for workers on the hosts of the trainers.
        caveats: What the predictions rest on.
    """

    name: str
    measured: MeasuredRun
    lines: tuple[SizingRow, ...]
    best: SizingRow
    kind: str | None
    steps: int
    has_data_hosts: bool
    caveats: tuple[str, ...]

    @property
    def saved(self) -> float:
        """The share of the job's time that the best line saves, 0 to 1; of its cost, if that is larger."""
        first, best = self.lines[0], self.best
        saved = 1.0 - sum(best.seconds) / max(1e-9, sum(first.seconds))
        if first.cost and best.cost and sum(first.cost):
            saved = max(saved, 1.0 - sum(best.cost) / sum(first.cost))
        return saved


def measure(run: Figures) -> MeasuredRun:
    """Return the measurements of a run's input.

    Args:
        run: A run, of which a minute is enough.

    Raises:
        JobConfigError: It does not say enough.
    """
    if run.pace.num_steps == 0:
        raise JobConfigError(f"{run.run.source}: no training steps are recorded, and nothing can be planned from that.")
    if run.pace.num_trained < MIN_STEPS:
        raise JobConfigError(
            f"{run.run.source}: {count(run.pace.num_trained, 'step')} are recorded; a plan takes at least {MIN_STEPS}."
        )
    step_s, waiting = run.pace.step_s, run.pace.waiting
    # In the backward pass, each rank waits for the data of the others, too: of those without a record here as well.
    own = [rank.step_s * (1.0 - rank.waiting) for rank in run.ranks.values()]
    own_s = min(
        [*own, *(rank.busy_s / rank.num_timed for rank in run.data[0].values() if rank.busy_s and rank.num_timed)]
    )
    if run.data[0]:
        return _remote(run, own_s)
    loaders = list(run.loaders.values())
    if not loaders:
        raise JobConfigError(
            f"{run.run.source}: the record does not say how many workers built the batches. Record a run with "
            "this version of lightning_sm."
        )
    workers = round(run.of_all_ranks([loader.workers for loader in loaders]))
    num_ranks = max(1, run.world_size)
    found = MeasuredRun(
        StepModel(own_s, 0.0, workers),
        step_s,
        waiting,
        is_remote=False,
        num_hosts=sum(host.role == "trainer" for host in run.hosts),
        num_ranks=num_ranks,
        most_per_rank=min(max(1, loader.cpus // max(1, loader.ranks_of_host)) for loader in loaders),
        is_bound=workers > 0 and waiting < NOT_INPUT_BOUND,
    )
    if workers == 0:  # the training process builds its batches between two steps
        return replace(found, model=replace(found.model, cost_s=waiting * step_s * num_ranks))
    at_work = min(workers, num_ranks * (found.most_per_rank or workers))
    cost_s = at_work * (own_s if found.is_bound else step_s)
    return replace(found, model=replace(found.model, cost_s=cost_s))


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
    wanted = _known(run, wanted or Hosts())
    measured = measure(run)
    steps = steps or run.num_steps
    first = _measured_line(run, measured, prices, steps)
    has_data_hosts = measured.is_remote or wanted.is_other_kind
    if measured.waiting < NOT_INPUT_BOUND and not wanted.is_other_kind:
        return Sizing(run.run.name, measured, (first,), first, wanted.kind, steps, has_data_hosts, ())
    lines = [
        _line(run, measured, prices, wanted, steps, workers=workers, num_hosts=num_hosts)
        for workers, num_hosts in (_data_hosts if has_data_hosts else _loaders)(measured, wanted)
    ]
    best = _cheapest(run, measured, first, lines)
    shown = [line for line in lines if line is best or line.workers in _spread([one.workers for one in lines])]
    caveats = tuple(_caveats(run, measured, wanted))
    return Sizing(run.run.name, measured, (first, *shown), best, wanted.kind, steps, has_data_hosts, caveats)


def sentence(planned: Sizing, prices: Prices) -> str:
    """Return the plan in a few sentences."""
    measured = planned.measured
    waits = f"Training waits {percent(measured.waiting)} of the time for data"
    if measured.waiting < NOT_INPUT_BOUND and len(planned.lines) == 1:
        return f"{waits}: more workers would change nothing worth mentioning."
    said = [measured.reason, advice(planned, prices)]
    return f"{waits}. {' '.join(filter(None, said))}"


def advice(planned: Sizing, prices: Prices) -> str:
    """Return what to do about the waiting, in a sentence or two; empty if the plan knows nothing that helps."""
    measured, best, first = planned.measured, planned.best, planned.lines[0]
    if measured.reason:
        return ""
    said = []
    needed = measured.model.workers_needed
    if needed > _most_workers(measured):
        ratio = measured.model.cost_s / measured.num_ranks / max(1e-9, measured.model.own_s)
        said.append(
            f"Make the transforms cheaper first, or do them beforehand: building a batch takes {ratio:.2g} times as "
            f"long as training on it, and to keep up would take {count(needed, 'worker')}, each with a CPU of its own."
        )
    if best is first and not planned.has_data_hosts and len(planned.lines) == 1:
        said.append("Each CPU of these hosts has a worker: data hosts would add some.")
        return " ".join(said)
    if best is first or planned.saved < _WORTH:
        quickest = min(planned.lines, key=lambda line: sum(line.seconds))
        if sum(quickest.seconds) > (1.0 - _WORTH) * sum(first.seconds):
            said.append(f"No other number of workers or hosts saves {percent(_WORTH)} of the job.")
        elif quickest.cost and first.cost:
            said.append(
                f"{count(quickest.num_hosts, 'data host')} would shorten the job of {count(planned.steps, 'step')} to "
                f"{_range(quickest.seconds, duration)} from {duration(first.seconds[0])}, but it would cost "
                f"{_range(quickest.cost, prices.amount)} instead of {prices.amount(first.cost[0])}."
            )
        else:
            said.append(
                "If all hosts cost the same, more of them cost more than they save: give their prices (--price)."
            )
        return " ".join(said)
    effect = {"network": ", the most that the network can feed", "training": ", which would remove the wait"}
    where = f"Set num_workers={best.per_rank}{_of_each_rank(measured)}"
    if best.per_rank is None:
        more = f" instead of {first.num_hosts:,}" if measured.is_remote else ""
        kind = "" if planned.kind is None else f" of {planned.kind}"
        where = f"Use {count(best.num_hosts, 'data host')}{kind}{more}, with {count(best.workers, 'worker')} in all"
    text = (
        f"{where}{effect.get(best.limit, '')}: a step would take {_range(best.step_s, step_time)} instead of "
        f"{step_time(measured.step_s)}, and the job of {count(planned.steps, 'step')} {_range(best.seconds, duration)} "
        f"instead of {duration(first.seconds[0])}."
    )
    if best.cost and first.cost:
        text += f" It would cost {_range(best.cost, prices.amount)} instead of {prices.amount(first.cost[0])}."
    elif best.per_rank is None:
        text += " This is the cheapest number if all hosts cost the same: give their prices (--price)."
    return " ".join([*said, text])


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
        "best": planned.lines.index(planned.best),
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
    # What a rank received while it waited, or batch by batch while workers were slower than the network.
    rates = [rank.num_bytes / rank.seconds for rank in ranks.values() if rank.seconds > 0]
    rates += [rank.num_bytes / rank.transfer_s for rank in ranks.values() if rank.transfer_s > 0]
    variations = [rank.produce_variation for rank in ranks.values() if rank.produce_variation is not None]
    step_s, waiting = run.pace.step_s, run.pace.waiting
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
        num_ranks=max(1, run.world_size),
        bytes_per_step=num_bytes,
        bytes_per_s=max([_LEAST_NETWORK, *rates]),
        busy=busy,
        variation=max(variations, default=None),
        reason=reason,
    )


def _measured_line(run: Figures, measured: MeasuredRun, prices: Prices, steps: int) -> SizingRow:
    seconds = _job_s(run, measured, measured.step_s, steps)
    price = prices.total((host.group, host.instance_type) for host in run.hosts)
    amount = None if price is None else cost(price, seconds)
    return SizingRow(
        workers=measured.model.workers,
        per_rank=None if measured.is_remote else round(measured.model.workers / measured.num_ranks),
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
    seconds = (_job_s(run, measured, step_s[0], steps), _job_s(run, measured, step_s[1], steps))
    price = _price(run, measured, prices, wanted, num_hosts)
    return SizingRow(
        workers=workers,
        per_rank=None if measured.is_remote or wanted.is_other_kind else workers // measured.num_ranks,
        num_hosts=num_hosts,
        step_s=step_s,
        limit=most.limit(workers),
        network=model.wire_s / step_s[0] if model.wire_s and wanted.network_gbit is not None else None,
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
    """Return the seconds that the network of data hosts or trainers needs for the batches of a step.

    As fast as the user says, or else as was measured for the batches of one rank; ranks receive theirs side by side.
    """
    if not measured.bytes_per_step:
        return 0.0
    if wanted.network_gbit is None:
        return measured.bytes_per_step / measured.num_ranks / (measured.bytes_per_s or _LEAST_NETWORK)
    trainers = sum(host.role == "trainer" for host in run.hosts) or 1
    return measured.bytes_per_step / (wanted.network_gbit * _GBIT_S * min(num_hosts, trainers))


def _known(run: Figures, wanted: Hosts) -> Hosts:
    """Return the wanted hosts with their vCPUs, which follow from an instance type; no kind if it is the measured one.

    Raises:
        JobConfigError: They do not follow, and are not given.
    """
    measured = {(host.group, host.instance_type) for host in run.hosts if host.role == "data"}
    if wanted.vcpus is not None or wanted.kind is None or any(wanted.kind in pair for pair in measured):
        return wanted if wanted.vcpus is not None else replace(wanted, kind=None)
    vcpus = num_vcpus(wanted.kind)
    if vcpus is None:
        raise JobConfigError(
            f"--kind {wanted.kind}: the number of its vCPUs is not known, because it is not an instance type such as "
            "ml.c5.4xlarge. Give it with --vcpus N."
        )
    return replace(wanted, vcpus=vcpus)


def _most_workers(measured: MeasuredRun) -> int:
    """Return the most workers that a plan proposes."""
    if measured.most_per_rank is not None:
        return measured.num_ranks * measured.most_per_rank
    return _MOST_WORKERS * max(1, measured.model.workers)


def _loaders(measured: MeasuredRun, wanted: Hosts) -> list[tuple[int, int]]:
    """Return numbers of workers of all ranks, and of trainer hosts: more than measured, as far as there are CPUs."""
    ranks = measured.num_ranks
    first = round(measured.model.workers / ranks) + 1
    last = min(measured.most_per_rank or first, max(first, math.ceil(measured.model.workers_needed / ranks)))
    return [(ranks * number, measured.num_hosts) for number in range(first, last + 1)]


def _data_hosts(measured: MeasuredRun, wanted: Hosts) -> list[tuple[int, int]]:
    """Return numbers of workers of all data hosts, and of these hosts, up to the number that removes the waiting."""
    per_host = max(1, round(measured.model.workers / max(1, measured.num_hosts)))
    if wanted.vcpus is not None:
        per_host = default_workers(wanted.vcpus)
    _, slowest = _speeds(wanted)
    needed = replace(measured.model, cost_s=measured.model.cost_s / slowest).workers_needed
    # Hosts of the measured kind are added to those that there are; another kind takes their place.
    least = measured.num_hosts + 1 if measured.is_remote and not wanted.is_other_kind else 1
    most = max(least, math.ceil(needed / per_host))
    return [(number * per_host, number) for number in range(least, most + 1)]


def _cheapest(run: Figures, measured: MeasuredRun, first: SizingRow, lines: Sequence[SizingRow]) -> SizingRow:
    """Return the line whose job costs least; of equally cheap ones, the quickest.

    Without prices, all hosts count as equally expensive, and only steps as work: a short run to plan from is mostly
    start-up. A line with many times the measured workers is not proposed, unless it is the one with the fewest.
    """
    trainers = sum(host.role == "trainer" for host in run.hosts) or 1
    has_prices = first.cost is not None and all(line.cost is not None for line in lines)

    def key(line: SizingRow) -> tuple[float, float, int]:
        hosts = trainers + (line.num_hosts if line.per_rank is None else 0)
        price = sum(line.cost) if has_prices and line.cost is not None else hosts * sum(line.step_s)
        return price, sum(line.seconds), -line.workers  # workers in reserve cost nothing

    most = _most_workers(measured) if measured.is_remote else math.inf
    return min([first, *(line for line in lines if line is lines[0] or line.workers <= most)], key=key)


def _of_each_rank(measured: MeasuredRun) -> str:
    return "" if measured.num_ranks == 1 else f" for each of the {measured.num_ranks:,} ranks"


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


def _job_s(run: Figures, measured: MeasuredRun, step_s: float, steps: int) -> float:
    """Return the seconds of the job: its steps, and all else, a part of which grows with them.

    A prediction of the measured run is the time that it took.
    """
    work = run.growing_s + (run.seconds - run.apart_s) * step_s / measured.step_s
    return run.apart_s - run.growing_s + work * steps / max(1, run.num_steps)


def _spread(numbers: Sequence[int]) -> set[int]:
    """Return some of the numbers, with the first and the last."""
    parts = min(len(numbers), _MAX_LINES) - 1
    return {numbers[round((len(numbers) - 1) * index / max(1, parts))] for index in range(parts + 1)}


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
            f"The network carried {size(rate)}/s and would carry {size(then)}/s without waiting. The plan counts on "
            f"{size(measured.bytes_per_s or 0.0)}/s for a rank, the most that was measured, but at least 1 Gbit/s; "
            "--network GBIT says otherwise."
        )


def _table(planned: Sizing, prices: Prices) -> str:
    headers = [
        "workers" if planned.has_data_hosts else "num_workers",
        "data hosts" if planned.has_data_hosts else "ranks",
        "time of a step",
        "limited by",
        f"job of {count(planned.steps, 'step')}",
    ]
    has_network = any(line.network is not None for line in planned.lines)
    has_costs = any(line.cost for line in planned.lines)
    headers += ["network"] * has_network + ["cost"] * has_costs
    rows = []
    for line in planned.lines:
        row = [
            f"{line.workers if planned.has_data_hosts else line.per_rank:,}{' (measured)' * line.is_measured}"
            f"{' (best)' * (line is planned.best and not line.is_measured)}",
            _hosts_or_ranks(planned, line),
            _range(line.step_s, step_time),
            line.limit,
            _range(line.seconds, duration),
        ]
        row += ["" if line.network is None else percent(line.network)] * has_network
        row += ["" if line.cost is None else _range(line.cost, prices.amount)] * has_costs
        rows.append(row)
    return draw_table(rows, headers)


def _hosts_or_ranks(planned: Sizing, line: SizingRow) -> str:
    if not planned.has_data_hosts:
        return f"{planned.measured.num_ranks:,}"
    return "none" if line.per_rank is not None else f"{line.num_hosts:,}"


def _range(values: Sequence[float], text: Any) -> str:
    low, high = (str(text(value)) for value in values)
    return low if low == high else f"{low} to {high}"
