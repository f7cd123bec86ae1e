"""The arithmetic of ``lightning-sm plan``, which predicts from a short run what more workers or hosts would change.

As in tf.data service's autoscaler, the slowest part of a step sets the pace:

    T(W) = max(t0, c / (W * e), wire) + rest

where ``t0`` is the time of a step without waiting for data, ``c`` is the total work of all workers for one step, ``W``
is the number of workers, ``e`` is the share of the time in which they are busy, ``wire`` is the network's time for one
step, and ``rest`` is the time by which the measured step exceeded the maximum. All times are in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from lightning_sm._table import draw_table
from lightning_sm._text import count, duration, percent, step_time
from lightning_sm.data.settings import default_workers
from lightning_sm.errors import JobConfigError
from lightning_sm.job.instance_types import num_vcpus
from lightning_sm.record.prices import Prices, cost
from lightning_sm.record.thresholds import MIN_STEPS, NOT_INPUT_BOUND, WORKERS_ARE_BUSY
from lightning_sm.record.totals import of_all_ranks
from lightning_sm.report.figures import Figures
from lightning_sm.report.limits import cause_of_wait

# Plan for workers that are busy for at most this share of the time, because some batches take longer.
_TARGET = 0.9
# Assume a network of at least 1 Gbit/s. Otherwise, the latency of small batches would look like a lack of bandwidth.
_LEAST_BYTES_S = 1e9 / 8
# Do not propose changes that save less than this share of the job.
_WORTH = 0.02
# Do not propose more than this multiple of the measured workers: if more are needed, the transforms are the problem.
_MOST_WORKERS = 10


@dataclass(frozen=True)
class MeasuredRun:
    """The measurements of a run's input pipeline.

    Attributes:
        own_s: ``t0``: seconds of a step without waiting, the larger of the host's and the GPU's work.
        cost_s: ``c``: seconds of work, summed over all workers, for one step of all ranks.
        workers: Total number of workers of all ranks or data hosts.
        num_ranks: Number of ranks.
        num_hosts: Number of data hosts that build the batches.
        busy: ``e``: the share of the time in which workers were busy while training waited, 0 to 1.
        wire_s: Minimum seconds that the network needs for one step; 0 if batches do not cross a network.
        rest_s: Seconds of a measured step beyond the slowest part, such as its share of the wait for the first batch of
            each epoch.
        most_here: Maximum number of workers that the CPUs of the run's ranks or data hosts allow.
    """

    own_s: float
    cost_s: float
    workers: int
    num_ranks: int = 1
    num_hosts: int = 0
    busy: float = 1.0
    wire_s: float = 0.0
    rest_s: float = 0.0
    most_here: int = 0

    @property
    def workers_needed(self) -> int:
        """The number of workers that would remove all waiting, with 10% in reserve."""
        return max(1, math.ceil(self.cost_s / max(1e-9, _TARGET * self.own_s)))

    def predict(self, workers: int) -> tuple[float, str]:
        """Predict the seconds and the limit (see ``SizingRow``) of a step with another number of workers."""
        building_s = self.cost_s / max(1e-9, workers * self.busy)
        terms = ("training", self.own_s), ("network", self.wire_s), ("workers", building_s)
        limit, seconds = max(terms, key=itemgetter(1))
        return seconds + self.rest_s, limit


@dataclass(frozen=True)
class SizingRow:
    """One line of a plan: a number of workers and data hosts, with its predicted times and cost.

    Attributes:
        workers: Total number of workers of all ranks or data hosts.
        per_rank: ``num_workers`` of each rank's loader; None if data hosts build the batches.
        num_hosts: Number of data hosts; 0 if the workers run on trainer hosts.
        kind: Instance type of the data hosts; None for the measured one.
        step_s: Seconds of a step.
        limit: The limit of a step: ``training``, ``workers`` or ``network``.
        seconds: Seconds of the whole job.
        cost: Cost of the whole job; None if a price is unknown.
    """

    workers: int
    per_rank: int | None
    num_hosts: int
    kind: str | None
    step_s: float
    limit: str
    seconds: float
    cost: float | None


@dataclass(frozen=True)
class Sizing:
    """The predictions for other numbers of workers and hosts.

    Attributes:
        run: The measured run.
        measured: The measurements of its input.
        lines: The lines for the measured, the best and the largest number of workers. The largest removes the wait for
            workers, as far as CPUs and ``_MOST_WORKERS`` allow.
        best: The line to choose: the cheapest one, or the first line if the cheapest would save too little. Without
            prices, all hosts count as equally expensive.
        steps: Number of steps of the whole job.
    """

    run: Figures
    measured: MeasuredRun
    lines: tuple[SizingRow, ...]
    best: SizingRow
    steps: int


def measure(run: Figures) -> MeasuredRun:
    """Return the measurements of a run's input pipeline.

    Args:
        run: A run; one minute is long enough.

    Raises:
        JobConfigError: The record lacks data, or training waits for something other than workers.
    """
    if run.pace.num_trained < MIN_STEPS:
        steps = count(run.pace.num_trained, "training step")
        raise JobConfigError(f"{run.run.source}: {steps} in the record; a plan needs at least {MIN_STEPS}.")
    cause = cause_of_wait(run)
    if cause is not None and not cause.is_building:
        raise JobConfigError(f"{run.run.source}: more workers would not help. {cause.text} {cause.change}".rstrip())
    # A rank's backward pass includes waiting for the other ranks' data, even for ranks without a record. So take the
    # minimum over all ranks.
    own = [rank.step_s * (1.0 - rank.waiting) for rank in run.ranks.values()]
    own += [rank.busy_s / rank.num_timed for rank in run.data[0].values() if rank.busy_s and rank.num_timed]
    measured = _remote(run, min(own)) if run.data[0] else _local(run, min(own))
    return replace(measured, rest_s=max(0.0, run.pace.step_s - measured.predict(measured.workers)[0]))


def plan(run: Figures, prices: Prices, kind: str | None = None, steps: int | None = None) -> Sizing:
    """Plan workers and hosts from a measured run.

    Args:
        run: The run.
        prices: Prices of hosts; empty if the user gave none.
        kind: Instance type of the planned data hosts. Defaults to the measured one.
        steps: Number of steps of the whole job. Defaults to the measured run's.

    Raises:
        JobConfigError: The record lacks data, training waits for something other than workers, or the number of vCPUs
            of ``kind`` is unknown.
    """
    if any(host.role == "data" and kind in (host.group, host.instance_type) for host in run.hosts):
        kind = None
    measured = measure(run)
    steps = steps or run.num_steps

    def row(workers: int, num_hosts: int, step_s: float, limit: str, kind: str | None) -> SizingRow:
        per_rank = None if num_hosts else round(workers / measured.num_ranks)
        seconds = run.fixed_s + steps * (step_s + run.growing_step_s)
        price = prices.total(_hosts(run, kind, num_hosts))
        amount = None if price is None else cost(price, seconds)
        return SizingRow(workers, per_rank, num_hosts, kind, step_s, limit, seconds, amount)

    waits = run.pace.waiting >= NOT_INPUT_BOUND
    first = row(measured.workers, measured.num_hosts, run.pace.step_s, "workers" if waits else "training", None)
    if not waits:
        return Sizing(run, measured, (first,), first, steps)
    numbers = [] if kind is not None else list(_same_hosts(measured))
    numbers += _more_hosts(measured, kind) if measured.num_hosts or kind is not None else []
    lines = [row(workers, num_hosts, *measured.predict(workers), kind) for workers, num_hosts in numbers]
    best = _cheapest(run, first, lines)
    shown = tuple(line for line in lines if line is best or line is lines[-1])
    return Sizing(run, measured, (first, *shown), best, steps)


def sentence(planned: Sizing, prices: Prices) -> str:
    """Return the plan in a few sentences."""
    waiting = planned.run.pace.waiting
    waits = f"Training waits {percent(waiting)} of the time for data"
    if waiting < NOT_INPUT_BOUND:
        return f"{waits}: more workers would make no noticeable difference."
    return f"{waits}. {advice(planned, prices)}"


def advice(planned: Sizing, prices: Prices) -> str:
    """Return advice on reducing the wait, in a sentence or two."""
    measured, said = planned.measured, []
    first, last = planned.lines[0], planned.lines[-1]
    most = _MOST_WORKERS * measured.workers if measured.num_hosts else measured.most_here
    is_too_much = planned.best is first and (last is first or last.seconds < (1.0 - _WORTH) * first.seconds)
    if is_too_much or measured.workers_needed > most:
        ratio = measured.cost_s / measured.num_ranks / max(1e-9, measured.own_s)
        said.append(
            f"Make the transforms cheaper first, or run them beforehand: building a batch takes {ratio:.2g} times as "
            f"long as training on it, and keeping up would take {count(measured.workers_needed, 'worker')}, each with "
            "a CPU of its own."
        )
    if last is first:
        said.append("Every CPU of these hosts already has a worker. Data hosts would add more CPUs.")
    elif planned.best is first:
        said.append(f"No other number of workers or hosts would save at least {percent(_WORTH)} of the job's cost.")
    else:
        said.append(_proposal(planned, prices))
    return " ".join(said)


def _proposal(planned: Sizing, prices: Prices) -> str:
    measured, best, first = planned.measured, planned.best, planned.lines[0]
    effect = {"network": ", the most that the network can feed", "training": ", which would remove the wait"}
    if best.num_hosts == first.num_hosts and best.kind is None:
        option, places = ("data_service.workers", "data hosts") if best.num_hosts else ("num_workers", "ranks")
        number = best.num_hosts or measured.num_ranks
        each = f" for each of the {number:,} {places}" if number > 1 else ""
        where = f"Set {option}={best.workers // number}{each}"
    else:
        more = f" instead of {first.num_hosts:,}" if first.num_hosts else ""
        kind = "" if best.kind is None else f" of {best.kind}"
        where = f"Use {count(best.num_hosts, 'data host')}{kind}{more}, with {count(best.workers, 'worker')} in all"
    text = (
        f"{where}{effect.get(best.limit, '')}: a step would take {step_time(best.step_s)} instead of "
        f"{step_time(first.step_s)}, and the job of {count(planned.steps, 'step')} {duration(best.seconds)} "
        f"instead of {duration(first.seconds)}."
    )
    if best.cost and first.cost:
        text += f" It would cost {prices.amount(best.cost)} instead of {prices.amount(first.cost)}."
    return text


def as_text(planned: Sizing, prices: Prices) -> str:
    """Return the plan as a sentence, a table, and its assumptions."""
    measured, run = planned.measured, planned.run
    waits = run.pace.waiting >= NOT_INPUT_BOUND
    without = f", or {step_time(measured.own_s)} without waiting" if waits else ""
    facts = [
        f"Measured in {run.run.name}: {step_time(run.pace.step_s)} a step, {percent(run.pace.waiting)} of it waiting "
        f"for data{without}. A step needs {step_time(measured.cost_s)} of work from all workers together.",
        *([run.run.flaws] if run.run.flaws else []),
    ]
    last = planned.lines[-1]
    if last.cost is None and last.num_hosts:
        gap = prices.gap(_hosts(run, last.kind, last.num_hosts)) or "Give prices with --price."
        facts.append(f"This assumes equal prices for all hosts, and a job that is much longer than its start-up. {gap}")
    if last.kind is not None:
        facts.append("Hosts of this kind were not measured: their vCPUs are assumed to be as fast as measured ones.")
    if not measured.num_hosts:
        facts.append(
            "This work is estimated from the time of a step and the number of workers. Workers on trainer "
            "hosts share the CPUs with training."
        )
    return "\n\n".join([sentence(planned, prices), _table(planned, prices), "\n".join(facts)])


def _local(run: Figures, own_s: float) -> MeasuredRun:
    loaders = list(run.loaders.values())
    if not loaders:
        raise JobConfigError(f"{run.run.source}: the record does not show how many workers built the batches.")
    step_s, waiting = run.pace.step_s, run.pace.waiting
    workers = round(of_all_ranks([loader.workers for loader in loaders], run.world_size))
    num_ranks = max(1, run.world_size)
    most = num_ranks * min(max(1, loader.cpus // max(1, loader.ranks_of_host)) for loader in loaders)
    # If workers are too slow, they are always busy. If not, this is an upper bound on their work. Without workers, the
    # training process builds its batches between steps.
    cost_s = min(workers, most) * step_s if workers else waiting * step_s * num_ranks
    return MeasuredRun(own_s, cost_s, workers, num_ranks, most_here=most)


def _remote(run: Figures, own_s: float) -> MeasuredRun:
    ranks, hosts = run.data
    up = [host for host in hosts if host.state == "up" and host.workers]
    workers = sum(host.workers for host in up)
    if not workers:
        raise JobConfigError(f"{run.run.source}: no data host in the record was up and had workers.")
    num_ranks = max(1, run.world_size)
    # Divide by each rank's steps: the last figures of some ranks may be missing.
    cost_s = of_all_ranks([rank.produce_s / rank.num_steps for rank in ranks.values()], run.world_size)
    num_bytes = of_all_ranks([rank.num_bytes / rank.num_steps for rank in ranks.values()], run.world_size)
    # Bytes/s over whole steps, and during transfers alone, which is higher if workers were slower than the network.
    rates = [rank.num_bytes / rank.seconds for rank in ranks.values() if rank.seconds > 0]
    rates += [rank.num_bytes / rank.transfer_s for rank in ranks.values() if rank.transfer_s > 0]
    capacity_s = math.fsum(host.capacity_s for host in up)
    busy = min(1.0, math.fsum(host.busy_s for host in up) / capacity_s) if capacity_s else 1.0
    cpus = [host.cpus or num_vcpus(host.instance_type or "") or 0 for host in run.hosts if host.role == "data"]
    return MeasuredRun(
        own_s,
        cost_s,
        workers,
        num_ranks,
        num_hosts=len(up),
        # If workers were often idle, this share does not show how busy they can be.
        busy=busy if busy >= WORKERS_ARE_BUSY else 1.0,
        # Ranks receive their batches in parallel.
        wire_s=num_bytes / num_ranks / max([_LEAST_BYTES_S, *rates]),
        most_here=max(workers, len(up) * default_workers(min(cpus, default=0))),
    )


def _same_hosts(measured: MeasuredRun) -> Iterator[tuple[int, int]]:
    """Yield pairs (workers, data hosts) with more workers per rank or data host, up to the number of CPUs."""
    places = measured.num_hosts or measured.num_ranks
    first = round(measured.workers / places) + 1
    needed = max(first, math.ceil(measured.workers_needed / places))
    for number in range(first, min(measured.most_here // places, needed) + 1):
        yield places * number, measured.num_hosts


def _more_hosts(measured: MeasuredRun, kind: str | None) -> Iterator[tuple[int, int]]:
    """Yield pairs (workers, data hosts) with ever more data hosts, until training no longer waits for data."""
    # Hosts of the measured kind are added to the existing ones; hosts of another kind replace them.
    first, per_host = measured.num_hosts + 1, measured.most_here // max(1, measured.num_hosts)
    if kind is not None:
        vcpus = num_vcpus(kind)
        if vcpus is None:
            raise JobConfigError(f"--kind {kind}: expected an instance type such as ml.c5.4xlarge.")
        first, per_host = 1, default_workers(vcpus)
    needed = measured.workers_needed
    if measured.num_hosts:
        needed = min(needed, _MOST_WORKERS * measured.workers)
    for number in range(first, max(first, math.ceil(needed / per_host)) + 1):
        yield number * per_host, number


def _cheapest(run: Figures, first: SizingRow, lines: Sequence[SizingRow]) -> SizingRow:
    """Return the cheapest line if it saves enough, else ``first``. Among equally cheap lines, prefer the fastest.

    Without prices, all hosts count as equally expensive, and only step times count: a short run is mostly start-up.
    """
    trainers = sum(host.role == "trainer" for host in run.hosts) or 1
    has_prices = first.cost is not None and all(line.cost is not None for line in lines)

    def key(line: SizingRow) -> tuple[float, float, int]:
        price = line.cost if has_prices and line.cost is not None else (trainers + line.num_hosts) * line.step_s
        return price, line.seconds, -line.workers  # spare workers cost nothing

    best = min([first, *lines], key=key)
    saved = 1.0 - best.seconds / max(1e-9, first.seconds)
    if first.cost and best.cost:
        saved = max(saved, 1.0 - best.cost / first.cost)
    return best if saved >= _WORTH else first


def _hosts(run: Figures, kind: str | None, num_data_hosts: int) -> list[tuple[str, str | None]]:
    """Return group and type of the trainers and the data hosts. If ``kind`` is None, use the measured kind."""
    trainers = [(host.group, host.instance_type) for host in run.hosts if host.role == "trainer"]
    measured = [(host.group, host.instance_type) for host in run.hosts if host.role == "data"] or [("data", None)]
    return trainers + num_data_hosts * [measured[0] if kind is None else (kind, kind)]


def _table(planned: Sizing, prices: Prices) -> str:
    job = f"job of {count(planned.steps, 'step')}"
    headers = ["workers", "num_workers", "data hosts", "time of a step", "limited by", job, "cost"]
    rows = []
    for line in planned.lines:
        mark = " (measured)" if line is planned.lines[0] else " (best)" if line is planned.best else ""
        numbers = [f"{line.workers:,}{mark}", "" if line.per_rank is None else line.per_rank, line.num_hosts]
        amount = "" if line.cost is None else prices.amount(line.cost)
        rows.append([*numbers, step_time(line.step_s), line.limit, duration(line.seconds), amount])
    return draw_table(rows, headers)
