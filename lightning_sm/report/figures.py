"""The numbers in the record of a run: how it ended, where its time went, what its hosts did. Pure functions."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from statistics import fmean
from typing import Any, TypeVar

from lightning_sm.data.protocol.figures import HostFigures, RankFigures
from lightning_sm.record.events import (
    LAUNCHER,
    PARTS,
    DataService,
    End,
    Event,
    HostUse,
    Line,
    Loader,
    Metrics,
    Span,
    Steps,
)
from lightning_sm.record.runs import ProcessRecord, RunRecord

# The parts of the job's whole time, in the order of pictures and tables: spans first, then steps.
_SPANS = {
    "preparation": "start-up",
    "startup": "start-up",
    "first_batch": "first batch",
    "validation": "validation",
    "checkpoint": "checkpoints",
    "export": "export",
    "between": "ends of epochs",
    "test": "test and prediction",
    "predict": "test and prediction",
}
WAITING = "waiting for data"
STEPS = "training steps"
SHUTDOWN = "shutdown"
OTHER = "not measured"
SHARES = (
    "start-up",
    "first batch",
    STEPS,
    WAITING,
    "validation",
    "ends of epochs",
    "checkpoints",
    "export",
    "test and prediction",
    SHUTDOWN,
    OTHER,
)
# Leave the first seconds of a series out of means if enough follow: caches fill, and the clocks of CPUs rise.
_LEAST_LINES = 4
RUNNING = "no end recorded"

_L = TypeVar("_L", bound=Line)


@dataclass(frozen=True)
class AttemptFigures:
    """One attempt of a job.

    Attributes:
        number: From 1.
        begin: When its first process began, in seconds since the Unix epoch.
        end: When its last line was written.
        outcome: ``succeeded``, ``failed``, ``interrupted``, ``stopped``, or ``RUNNING``.
        reason: Why it has not succeeded.
    """

    number: int
    begin: float
    end: float
    outcome: str
    reason: str

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.begin


@dataclass(frozen=True)
class HostSummary:
    """A host of a job, and what it did.

    Attributes:
        name: Its name.
        group: Its instance group.
        role: ``trainer`` or ``data``.
        instance_type: None if unknown.
        cpus: CPUs that it may use; 0 if it has no record here.
        gpus: Number of its GPUs.
        uses: What it did, over time; empty if it has no record here.
    """

    name: str
    group: str
    role: str
    instance_type: str | None
    cpus: int = 0
    gpus: int = 0
    uses: tuple[HostUse, ...] = ()

    @property
    def cpu(self) -> float | None:
        """Mean share of its CPUs in use."""
        return fmean(use.cpu for use in self.uses) if self.uses else None

    @property
    def gpu(self) -> float | None:
        """Mean share of the time in which a kernel ran, over its GPUs."""
        shares = [gpu.use for use in self.uses for gpu in use.gpus]
        return fmean(shares) if shares else None

    @property
    def memory(self) -> tuple[int, int] | None:
        """Most memory in use, and the memory that it has, in bytes."""
        if not self.uses:
            return None
        most = max(self.uses, key=lambda use: use.memory_bytes)
        return most.memory_bytes, most.memory_total_bytes

    @property
    def received_bytes_s(self) -> float | None:
        """Mean bytes per second from the network."""
        return fmean(use.received_bytes_s for use in self.uses) if self.uses else None

    @property
    def sent_bytes_s(self) -> float | None:
        """Mean bytes per second to the network."""
        return fmean(use.sent_bytes_s for use in self.uses) if self.uses else None


@dataclass(frozen=True)
class StepFigures:
    """Steps of one rank, added up.

    Attributes:
        n: Number of steps.
        wall_s: Seconds that they took.
        samples: Samples of this rank.
        longest_s: The longest one.
        parts: Seconds by part of a step.
    """

    n: int
    wall_s: float
    samples: int
    longest_s: float
    parts: Mapping[str, float]

    @classmethod
    def of(cls, lines: Iterable[Steps]) -> StepFigures:
        """Add up lines of a record."""
        lines = list(lines)
        return cls(
            n=sum(line.n for line in lines),
            wall_s=math.fsum(line.wall_s for line in lines),
            samples=sum(line.samples for line in lines),
            longest_s=max((line.longest_s for line in lines), default=0.0),
            parts={part: math.fsum(line.parts.get(part, 0.0) for line in lines) for part in PARTS},
        )

    @property
    def step_s(self) -> float:
        """Mean seconds of a step; 0 without steps."""
        return self.wall_s / self.n if self.n else 0.0

    @property
    def waiting(self) -> float:
        """Share of the time that the rank waited for data."""
        return self.parts["data_wait"] / self.wall_s if self.wall_s else 0.0

    @property
    def own_s(self) -> float:
        """Mean seconds of a step without waiting for data."""
        return self.step_s * (1.0 - self.waiting)


@dataclass(frozen=True)
class Happening:
    """An event, or how an attempt ended, for people.

    Attributes:
        seconds: Since the run began.
        host: Where.
        what: What kind of event.
        text: It in words.
    """

    seconds: float
    host: str
    what: str
    text: str


@dataclass(frozen=True)
class Figures:
    """The numbers of a run.

    Attributes:
        run: Its record.
    """

    run: RunRecord = field(repr=False)

    @cached_property
    def attempts(self) -> list[AttemptFigures]:
        """The attempts of the job, in order."""
        by_number: dict[int, list[ProcessRecord]] = defaultdict(list)
        for record in self.run.records:
            by_number[record.attempt].append(record)
        return [_attempt(number, records) for number, records in sorted(by_number.items())]

    @property
    def begin(self) -> float:
        """When the first attempt began, in seconds since the Unix epoch."""
        return min(attempt.begin for attempt in self.attempts)

    @property
    def seconds(self) -> float:
        """How long the attempts took together: hosts cost money only then."""
        return math.fsum(attempt.seconds for attempt in self.attempts)

    @property
    def outcome(self) -> str:
        """How the last attempt ended."""
        return self.attempts[-1].outcome

    @property
    def reason(self) -> str:
        """Why the last attempt has not succeeded."""
        return self.attempts[-1].reason

    @cached_property
    def hosts(self) -> list[HostSummary]:
        """All hosts of the last attempt, also those without a record here. Trainers come first."""
        latest = self._of_attempt(self.attempts[-1].number)
        head = max((record.head for record in latest), key=lambda head: len(head.hosts))
        groups = dict(head.hosts) or {record.head.host: record.head.group for record in latest}
        roles = {record.head.group: record.head.role for record in self.run.records}
        hosts = []
        for name, group in groups.items():
            own = [record for record in latest if record.head.host == name]
            heads = [record.head for record in own]
            kind = next((one.instance_type for one in heads if one.instance_type), head.instance_types.get(group))
            hosts.append(
                HostSummary(
                    name=name,
                    group=group,
                    # Where no host of the group has a record here, it is one that rank 0 gets its batches from.
                    role=roles.get(group, "data"),
                    instance_type=kind,
                    cpus=max((one.cpus for one in heads), default=0),
                    gpus=max((one.gpus for one in heads), default=0),
                    uses=tuple(_lines(own, HostUse)),
                )
            )
        return sorted(hosts, key=lambda host: (host.role == "data", host.name))

    @cached_property
    def main_records(self) -> list[ProcessRecord]:
        """What the first rank that has a record wrote, over all attempts."""
        ranks = {record.head.rank for record in self.run.records if record.head.rank is not None}
        return [record for record in self.run.records if ranks and record.head.rank == min(ranks)]

    @cached_property
    def ranks(self) -> dict[int, StepFigures]:
        """The steps of each rank, without the first lines, over all attempts."""
        lines: dict[int, list[Steps]] = defaultdict(list)
        for record in self.run.records:
            if record.head.rank is not None:
                own = _lines([record], Steps)
                lines[record.head.rank] += own[1:] if len(own) >= _LEAST_LINES else own
        return {rank: StepFigures.of(own) for rank, own in sorted(lines.items()) if any(line.n for line in own)}

    @cached_property
    def slowest(self) -> StepFigures:
        """The steps of the rank that waited the longest for data: others wait for it when they exchange gradients."""
        return max(self.ranks.values(), key=lambda rank: rank.waiting, default=StepFigures.of([]))

    @property
    def num_steps(self) -> int:
        """Number of steps of the whole run."""
        return sum(line.n for line in _lines(self.main_records, Steps))

    @property
    def samples_per_step(self) -> float | None:
        """Samples of a step of all ranks; None if one does not know."""
        means = [rank.samples / rank.n for rank in self.ranks.values()]
        return self.of_all_ranks(means) if means and all(means) else None

    @property
    def world_size(self) -> int:
        """Number of ranks, of those without a record, too; 0 if no rank has one."""
        return max((record.head.world_size or 0 for record in self.run.records), default=0)

    def of_all_ranks(self, values: Sequence[float]) -> float:
        """Return the sum over all ranks; ranks without a value are taken to be like the others."""
        return math.fsum(values) * max(1.0, self.world_size / len(values)) if values else 0.0

    @cached_property
    def shares(self) -> dict[str, float]:
        """Seconds of the main rank's host by what they went into (``SHARES``), over all attempts."""
        shares = dict.fromkeys(SHARES, 0.0)
        for attempt in self.attempts:
            own = [record for record in self.main_records if record.attempt == attempt.number]
            hosts = {record.head.host for record in own}
            launchers = [
                record
                for record in self._of_attempt(attempt.number)
                if record.head.who == LAUNCHER and record.head.host in hosts
            ]
            for span in _lines([*own, *launchers], Span):
                shares[_SPANS.get(span.name, OTHER)] += span.seconds
            steps = StepFigures.of(_lines(own, Steps))
            shares[WAITING] += steps.parts["data_wait"]
            shares[STEPS] += steps.wall_s - steps.parts["data_wait"]
            # From the last line of the training process to that of its launcher, which may wait for other hosts.
            ends = [line.t for line in _lines(launchers, End)]
            if ends and own:
                shares[SHUTDOWN] += max(0.0, max(ends) - max(line.t for record in own for line in record.lines))
        shares[OTHER] += max(0.0, self.seconds - math.fsum(shares.values()))
        return shares

    @property
    def apart_s(self) -> float:
        """Seconds that the job took besides its training steps."""
        return max(0.0, self.seconds - self.shares[STEPS] - self.shares[WAITING])

    @cached_property
    def loaders(self) -> dict[int, Loader]:
        """Where the batches of each rank come from."""
        return {
            record.head.rank: line
            for record in self.run.records
            if record.head.rank is not None
            for line in _lines([record], Loader)
        }

    @cached_property
    def data(self) -> tuple[dict[str, RankFigures], list[HostFigures]]:
        """What ranks and data hosts did, from the first figures of each life of rank 0 to its last, added up.

        Without the first figures, in which the first batches are, if there are enough.
        """
        ranks: dict[str, RankFigures] = {}
        hosts: dict[str, HostFigures] = {}
        for record in self.main_records:
            lines = _lines([record], DataService)
            if not lines:
                continue
            last = lines[-1]
            first = lines[0] if len(lines) >= _LEAST_LINES else DataService(0.0)
            before = {str(host.get("name")): host for host in first.hosts}
            for name, values in last.ranks.items():
                change = _difference(RankFigures, values, first.ranks.get(name, {}))
                ranks[name] = _sum(ranks[name], change) if name in ranks else change
            for values in last.hosts:
                host = _difference(HostFigures, values, before.get(str(values.get("name")), {}))
                hosts[host.name] = _sum(hosts[host.name], host) if host.name in hosts else host
        return {name: rank for name, rank in ranks.items() if rank.num_steps}, list(hosts.values())

    @cached_property
    def metrics(self) -> dict[str, list[tuple[int, float]]]:
        """Steps and values of each metric; what an attempt repeats replaces what the one before had logged.

        Lines repeat the last value of metrics that are logged once an epoch: only changes are points.
        """
        series: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for record in self.main_records:
            begins: dict[str, int] = {}
            for line in _lines([record], Metrics):
                for name, value in line.values.items():
                    if value is None:
                        continue
                    if name not in begins:
                        begins[name] = line.step
                        series[name] = [point for point in series[name] if point[0] < line.step]
                    if not series[name] or series[name][-1][1] != value:
                        series[name].append((line.step, value))
        return dict(series)

    @cached_property
    def events(self) -> list[Happening]:
        """What happened, in the order of time. What several hosts say of the same thing is there once for each."""
        found = []
        for record in self.run.records:
            for line in record.lines:
                seconds = line.t - self.begin
                if isinstance(line, Event):
                    found.append(Happening(seconds, record.head.host, line.what, line.text))
                elif isinstance(line, End) and record.head.who == LAUNCHER:
                    code = "" if line.exit_code is None else f" with exit code {line.exit_code}"
                    found.append(Happening(seconds, record.head.host, line.outcome, f"This host ended{code}."))
        return sorted(found, key=lambda event: event.seconds)

    @cached_property
    def series(self) -> list[tuple[int, list[Steps]]]:
        """Rank 0's steps over time, by attempt."""
        return [(record.attempt, _lines([record], Steps)) for record in self.main_records]

    def _of_attempt(self, number: int) -> list[ProcessRecord]:
        return [record for record in self.run.records if record.attempt == number]


def _attempt(number: int, records: Sequence[ProcessRecord]) -> AttemptFigures:
    ends = [(record.head, line) for record in records for line in record.lines if isinstance(line, End)]
    # A data host may fail, or may no longer be needed: trainers decide how the job ends.
    ends = [(head, end) for head, end in ends if head.role == "trainer"]
    launchers = [end for head, end in ends if head.who == LAUNCHER] or [end for _, end in ends]
    # As on the service, the first failure is that of the job.
    worst = min(
        launchers,
        key=lambda end: (end.outcome != "failed", end.outcome == "succeeded", end.t),
        default=End(0.0, RUNNING),
    )
    times = [line.t for record in records for line in record.lines]
    begins = [record.head.t for record in records]
    begins += [line.begin for record in records for line in record.lines if isinstance(line, Span)]
    return AttemptFigures(number, min(begins), max(times + begins), worst.outcome, worst.reason)


def _lines(records: Iterable[ProcessRecord], kind: type[_L]) -> list[_L]:
    return [line for record in records for line in record.lines if isinstance(line, kind)]


_F = TypeVar("_F", RankFigures, HostFigures)


def _difference(kind: type[_F], after: Mapping[str, Any], before: Mapping[str, Any]) -> _F:
    """Return what was added between two lines; everything, if a restart has reset the sums."""
    known = {one.name: one for one in fields(kind)}
    values = {name: value for name, value in after.items() if name in known}
    numbers = {name for name, value in values.items() if _is_sum(name, value)}
    if all(values[name] >= before.get(name, 0) for name in numbers):
        values |= {name: values[name] - before.get(name, 0) for name in numbers}
    return kind(**values)


def _sum(first: _F, second: _F) -> _F:
    """Add up the sums of both; take every other value from the second."""
    values = {
        name: value + getattr(first, name) if _is_sum(name, value) else value for name, value in vars(second).items()
    }
    return type(second)(**values)


def _is_sum(name: str, value: Any) -> bool:
    return type(value) in (int, float) and name != "workers"
