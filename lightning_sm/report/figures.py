"""Figures computed from the record of a run: its outcome, where its time went, and how its hosts were used."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, pairwise
from statistics import fmean
from typing import TypeVar

import msgspec

from lightning_sm.record.data_figures import HostFigures, RankFigures
from lightning_sm.record.events import (
    FAILED,
    LAUNCHER,
    SPANS,
    SUCCEEDED,
    DataService,
    End,
    Event,
    FileHead,
    HostUse,
    Line,
    Loader,
    Metrics,
    Span,
    Steps,
)
from lightning_sm.record.runs import ProcessRecord, RunRecord
from lightning_sm.record.thresholds import RankPace
from lightning_sm.record.totals import Totals, pace_of, samples_per_step, with_longest_wait

# The parts of the job's total time, in the order used by charts and tables.
WAITING = "waiting for data"
STEPS = "training steps"
RESTARTS = "restarts"
SHUTDOWN = "shutdown"
OTHER = "not measured"
_START, _FIRST, *_LATER = dict.fromkeys(SPANS.values())
SHARES = (_START, _FIRST, STEPS, WAITING, *_LATER, RESTARTS, SHUTDOWN, OTHER)
# The spans that recur: their time grows with the number of steps.
_GROWING = ("validation", "between epochs", "checkpoints")
# With at least this many lines about data hosts, skip the first one, which includes the slow first batches.
_LEAST_LINES = 4
# Readers cannot distinguish more intervals than this in a chart.
_MAX_BINS = 80
_NO_DATA = DataService(0.0)
RUNNING = "no end recorded"
_USUAL_EVENTS = {"checkpoint_saved", "succeeded"}

_L = TypeVar("_L", bound=Line)
_F = TypeVar("_F", RankFigures, HostFigures)


@dataclass(frozen=True)
class AttemptFigures:
    """One attempt of a job.

    Attributes:
        number: The attempt number, counted from 1.
        begin: When its first process began, in seconds since the Unix epoch.
        end: When its last line was written, in seconds since the Unix epoch.
        outcome: ``succeeded``, ``failed``, ``interrupted``, ``stopped``, or ``RUNNING``.
        reason: Why it did not succeed.
    """

    number: int
    begin: float
    end: float
    outcome: str
    reason: str

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return self.end - self.begin


@dataclass(frozen=True)
class HostSummary:
    """A host of a job, and how it was used.

    Attributes:
        name: Name of the host.
        group: Instance group of the host.
        role: ``trainer`` or ``data``.
        instance_type: Instance type; None if unknown.
        cpus: Number of CPUs that the host may use; None if its record is missing.
        gpus: Number of GPUs; None if the host's record is missing.
        uses: Its use over time, in all attempts in which its group had a host with this name; empty if its record is
            missing.
    """

    name: str
    group: str
    role: str
    instance_type: str | None
    cpus: int | None = None
    gpus: int | None = None
    uses: tuple[HostUse, ...] = ()

    @property
    def cpu(self) -> float | None:
        """Mean share of the host's CPUs in use."""
        return _mean(use.cpu for use in self.uses)

    @property
    def gpu(self) -> float | None:
        """Share of the time in which a kernel ran, as the mean over the host's GPUs."""
        return _mean(use.gpu for use in self.uses)

    @property
    def memory(self) -> tuple[int, int] | None:
        """Peak and total memory in bytes."""
        peak = max(self.uses, key=lambda use: use.memory_bytes, default=None)
        return None if peak is None else (peak.memory_bytes, peak.memory_total_bytes)


@dataclass(frozen=True)
class TrainingRestart:
    """A restart of training after an interruption or a failure.

    Attributes:
        since: When the previous training ended, in seconds since the Unix epoch.
        until: When the steps of the restarted training began, in seconds since the Unix epoch.
        seconds: The seconds in between, excluding the time between attempts, when hosts cost nothing.
        num_repeated: Number of steps that were trained again.
    """

    since: float
    until: float
    seconds: float
    num_repeated: int


@dataclass(frozen=True)
class Happening:
    """An event, or the exit of a host, for display.

    Attributes:
        seconds: Seconds since the run began.
        host: Name of the host.
        what: Kind of the event, or outcome of the host.
        text: Description of the event.
    """

    seconds: float
    host: str
    what: str
    text: str


@dataclass(frozen=True)
class Figures:
    """The figures of a run, computed from its record.

    Attributes:
        run: The record of the run.
    """

    run: RunRecord = field(repr=False)

    @cached_property
    def attempts(self) -> list[AttemptFigures]:
        """The attempts of the job, in order."""
        by_number = groupby(self.run.records, key=lambda record: record.attempt)
        return [_attempt(number, list(records)) for number, records in by_number]

    @property
    def begin(self) -> float:
        """When the first attempt began, in seconds since the Unix epoch."""
        return min(attempt.begin for attempt in self.attempts)

    @property
    def seconds(self) -> float:
        """Total duration of the attempts in seconds, excluding the time between them, when hosts cost nothing."""
        return math.fsum(attempt.seconds for attempt in self.attempts)

    @property
    def outcome(self) -> str:
        """Outcome of the last attempt."""
        return self.attempts[-1].outcome

    @cached_property
    def hosts(self) -> list[HostSummary]:
        """All hosts of the last attempt, trainers first, including hosts whose records are missing."""
        heads = [record.head for record in self._latest]
        head = max(heads, key=lambda head: len(head.hosts))
        # For groups without records, rank 0's figures name the data hosts, once it has received batches.
        roles = {record.head.group: record.head.role for record in self.run.records}
        served = {host.name for host in self.data[1]}
        hosts = []
        for name, group in (head.hosts or {head.host: head.group for head in heads}).items():
            own = [record for record in self.run.records if (record.head.host, record.head.group) == (name, group)]
            hosts.append(
                HostSummary(
                    name=name,
                    group=group,
                    role=roles.get(group, "data" if name in served or group.startswith("data") else "trainer"),
                    instance_type=head.instance_types.get(group),
                    cpus=max((record.head.cpus for record in own), default=None),
                    gpus=max((record.head.gpus for record in own), default=None),
                    uses=tuple(lines_of(own, HostUse)),
                )
            )
        return sorted(hosts, key=lambda host: (host.role == "data", host.name))

    @property
    def kinds(self) -> list[tuple[str, str | None]]:
        """Instance group and type of each host of the last attempt."""
        return [(host.group, host.instance_type) for host in self.hosts]

    @property
    def hosts_without_end(self) -> list[str]:
        """Hosts of the last attempt whose records have no end: they were killed, or were still running."""
        launchers = {record.head.host: record for record in self._latest if record.head.who == LAUNCHER}
        return [name for name, record in launchers.items() if not lines_of([record], End)]

    @cached_property
    def main_records(self) -> list[ProcessRecord]:
        """Records of the lowest rank that has any, from all attempts."""
        ranks = {record.head.rank for record in self.run.records if record.head.rank is not None}
        return [record for record in self.run.records if ranks and record.head.rank == min(ranks)]

    @cached_property
    def ranks(self) -> dict[int, Totals]:
        """The steps of each rank in all attempts."""
        numbers = sorted({record.head.rank for record in self.run.records if record.head.rank is not None})
        totals = {rank: Totals.of(lines_of(self._of_rank(rank), Steps)) for rank in numbers}
        return {rank: steps for rank, steps in totals.items() if steps.num_steps}

    @cached_property
    def pace_rank(self) -> int | None:
        """The rank that sets the pace; None without steps.

        Only ranks that trained in the last attempt count: a host may have records of other hosts, but only from earlier
        attempts.
        """
        last = {rank: [one.attempt for one in self._of_rank(rank) if lines_of([one], Steps)][-1] for rank in self.ranks}
        return pace_of({rank: self.ranks[rank] for rank in last if last[rank] == max(last.values())})[0]

    @cached_property
    def pace_records(self) -> list[ProcessRecord]:
        """Records of the rank that sets the pace, or of the lowest rank if there are no steps, from all attempts."""
        return self.main_records if self.pace_rank is None else self._of_rank(self.pace_rank)

    @cached_property
    def pace(self) -> Totals:
        """The steps of the rank that sets the pace, on which all numbers on the page are based.

        A rank whose record is missing may wait longer for data, and the other ranks then wait for it in their backward
        pass. The data service's figures include the waits of all ranks, so they are used to correct the steps.
        """
        rank = self.pace_rank
        steps = Totals() if rank is None else self.ranks[rank]
        shares = {_rank_number(name): figures.wait_fraction for name, figures in self.data[0].items()}
        longer = max(shares.values(), default=0.0) - shares.get(-1 if rank is None else rank, steps.waiting)
        return replace(steps, parts=with_longest_wait(steps.parts, steps.waiting + longer))

    @cached_property
    def rank_paces(self) -> list[RankPace]:
        """The speed of each rank that has a record."""
        paces = []
        for rank, steps in self.ranks.items():
            own_s = sum(steps.parts[part] for part in ("to_device", "forward", "other"))
            n, wait_s = steps.num_steps, steps.parts["data_wait"]
            paces.append(RankPace(self.name_of(rank), steps.num_trained, steps.step_s, own_s / n, wait_s / n))
        return paces

    @cached_property
    def spans(self) -> dict[str, list[float]]:
        """Seconds of each span on the pace rank and its host, by display name. Spans during restarts are left out."""
        spans: dict[str, list[float]] = defaultdict(list)
        for span in lines_of([*self.pace_records, *self._pace_launchers], Span):
            # Skip every span that overlaps a restart: the span of a process that waits for it begins earlier.
            if not any(span.begin < restart.until and restart.since < span.t for restart in self.restarts):
                spans[SPANS.get(span.name, OTHER)].append(span.seconds)
        return dict(spans)

    @cached_property
    def restarts(self) -> list[TrainingRestart]:
        """The restarts of the pace rank's training."""
        restarts = []
        for before, after in pairwise(record for record in self.pace_records if lines_of([record], Loader)):
            steps, earlier = lines_of([after], Steps), lines_of([before], Steps)
            since = _stopped_at(before)
            until = steps[0].t - steps[0].wall_s if steps else max(line.t for line in after.lines)
            between = (one for one in self.attempts if before.attempt <= one.number <= after.attempt)
            without_hosts_s = math.fsum(max(0.0, later.begin - one.end) for one, later in pairwise(between))
            repeated = max(0, self._num_undone(before, after)) if steps and earlier else 0
            seconds = max(0.0, until - since - without_hosts_s)
            restarts.append(TrainingRestart(since, until, seconds, repeated))
        return restarts

    def _num_undone(self, before: ProcessRecord, after: ProcessRecord) -> int:
        """Return how many steps of ``before`` were repeated in ``after``; negative if the record lacks some steps."""
        begun = lines_of([before], Loader)[-1]
        steps = [line for line in before.lines[before.lines.index(begun) :] if isinstance(line, Steps)]
        return begun.batch + Totals.of(steps).num_trained - lines_of([after], Loader)[0].batch

    @property
    def on_gpu(self) -> bool:
        """Whether the parts of steps were measured on the GPU."""
        return any(line.gpu_parts for line in lines_of(self.main_records, Steps))

    @property
    def fullest_memory(self) -> tuple[str, int, int] | None:
        """The host or GPU with the largest share of memory in use: its name, and its used and total bytes."""
        memories = [(host.name, *host.memory) for host in self.hosts if host.memory is not None]
        memories += [
            (f"A GPU of {host.name}", gpu.memory_bytes, gpu.memory_total_bytes)
            for host in self.hosts
            for use in host.uses
            for gpu in use.gpus
        ]
        return max((one for one in memories if one[2]), key=lambda one: one[1] / one[2], default=None)

    @property
    def num_steps(self) -> int:
        """Number of steps in the whole run. Repeated steps count once."""
        trained = [one for one in self.pace_records if any(lines_of([one], Loader)) and any(lines_of([one], Steps))]
        undone = sum(self._num_undone(before, after) for before, after in pairwise(trained))
        return sum(line.n + line.untimed for line in lines_of(self.pace_records, Steps)) - undone

    @property
    def samples_per_step(self) -> float | None:
        """Samples per step of all ranks; None if unknown for any rank."""
        return samples_per_step(self.ranks.values(), self.world_size)

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second of all ranks; None if unknown for any rank, or without steps."""
        return self.samples_per_step / self.pace.step_s if self.samples_per_step else None

    @property
    def world_size(self) -> int:
        """Number of ranks, including ranks without a record; 0 if no rank has a record."""
        return max((record.head.world_size or 0 for record in self.run.records), default=0)

    @cached_property
    def shares(self) -> dict[str, float]:
        """Seconds by category (``SHARES``), for the pace rank and its host in all attempts."""
        shares = dict.fromkeys(SHARES, 0.0) | {name: math.fsum(seconds) for name, seconds in self.spans.items()}
        shares[RESTARTS] = math.fsum(restart.seconds for restart in self.restarts)
        for record in self.pace_records[-1:]:
            # The time from the training process's last line to the end of its launcher, which may wait for other hosts.
            launchers = [one for one in self._pace_launchers if one.attempt == record.attempt]
            ended = max(line.t for line in record.lines)
            if lines_of([record], End):  # otherwise, the process was killed, or its record is cut off
                shares[SHUTDOWN] = max([0.0, *(end.t - ended for end in lines_of(launchers, End))])
        shares[WAITING] = self.pace.parts["data_wait"]
        shares[STEPS] = self.pace.wall_s - shares[WAITING]
        shares[OTHER] += max(0.0, self.seconds - math.fsum(shares.values()))
        return shares

    @property
    def repeated_s(self) -> float:
        """Seconds of the steps that were repeated after a restart."""
        return sum(restart.num_repeated for restart in self.restarts) * self.pace.step_s

    @property
    def growing_step_s(self) -> float:
        """Seconds outside the steps, per step, in spans whose total time is proportional to the number of steps."""
        return math.fsum(self.shares[name] for name in _GROWING) / max(1, self.pace.num_trained)

    @property
    def fixed_s(self) -> float:
        """Seconds that do not depend on the number of steps, excluding restarts, which occur by chance."""
        of_steps = self.num_steps * (self.pace.step_s + self.growing_step_s)
        return max(0.0, self.seconds - self.shares[RESTARTS] - self.repeated_s - of_steps)

    @cached_property
    def loaders(self) -> dict[int, Loader]:
        """The source of each rank's batches."""
        return {
            record.head.rank: line
            for record in self.run.records
            if record.head.rank is not None
            for line in lines_of([record], Loader)
        }

    @cached_property
    def data(self) -> tuple[dict[str, RankFigures], list[HostFigures]]:
        """Figures for ranks and data hosts, summed over the processes of rank 0.

        The first figures of each process include the slow first batches, and are excluded if enough others follow.
        """
        ranks: dict[int, RankFigures] = {}
        names: dict[int, str] = {}  # the newest name of each rank: a restart may move a rank to another host
        hosts: dict[str, HostFigures] = {}
        for record in self.main_records:
            lines = lines_of([record], DataService) or [_NO_DATA]
            first_ranks, first_hosts = _by_name(lines[0] if len(lines) >= _LEAST_LINES else _NO_DATA)
            last_ranks, last_hosts = _by_name(lines[-1])
            for name, rank in last_ranks.items():
                number = _rank_number(name)
                ranks[number] = ranks.get(number, RankFigures()).plus(rank.since(first_ranks.get(name)))
                names[number] = name
            # A host that existed only in an earlier attempt counts as having no workers.
            for name in {**hosts, **last_hosts} if last_hosts else ():
                host = last_hosts.get(name, HostFigures(name)).since(first_hosts.get(name))
                hosts[name] = hosts.get(name, HostFigures(name)).plus(host)
        return {names[number]: rank for number, rank in ranks.items() if rank.num_steps}, list(hosts.values())

    @property
    def data_hosts(self) -> list[HostFigures]:
        """Figures of the last attempt's data hosts, in all attempts."""
        names = {host.name for host in self.hosts if host.role == "data"}
        return [host for host in self.data[1] if host.name in names]

    @cached_property
    def metrics(self) -> dict[str, list[tuple[int, float]]]:
        """Steps and values of each metric; infinity becomes NaN. Values of repeated steps replace earlier ones."""
        series: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for record in self.main_records:
            own: dict[str, list[tuple[int, float]]] = defaultdict(list)
            for line in lines_of([record], Metrics):
                for name, value in line.values.items():
                    own[name].append((line.step, math.nan if value is None else value))
            for name, points in own.items():
                series[name] = [point for point in series[name] if point[0] < points[0][0]] + points
        return dict(series)

    @property
    def command(self) -> tuple[str, ...]:
        """The script of the last attempt and its arguments, with secrets hidden; empty if unknown."""
        return tuple(next((record.head.command for record in self._latest if record.head.command), ()))

    @property
    def hyperparameters(self) -> dict[str, str]:
        """The hyperparameters of the last attempt as the job received them, with secrets hidden."""
        return dict(next((record.head.hyperparameters for record in self._latest if record.head.hyperparameters), {}))

    @cached_property
    def events(self) -> list[Happening]:
        """All events in chronological order. An event that several hosts report is listed once per host."""
        events = []
        for record in self.run.records:
            for line in record.lines:
                seconds = line.t - self.begin
                if isinstance(line, Event):
                    events.append(Happening(seconds, record.head.host, line.what, line.text))
                elif isinstance(line, End) and record.head.who == LAUNCHER:
                    code = "" if line.exit_code is None else f" with exit code {line.exit_code}"
                    events.append(Happening(seconds, record.head.host, line.outcome, f"This host exited{code}."))
        return sorted(events, key=lambda event: event.seconds)

    @property
    def unusual_events(self) -> list[Happening]:
        """The events that do not occur in every job. Charts mark them."""
        return [event for event in self.events if event.what not in _USUAL_EVENTS]

    @cached_property
    def bins(self) -> list[tuple[float, float, Totals]]:
        """The steps of the rank that sets the pace, summed over intervals of time for charts.

        Each interval that has steps is given by its start and end, in seconds since the run began, and its totals.
        """
        width = max(1e-9, (self.attempts[-1].end - self.begin) / _MAX_BINS)
        bins = []
        for record in self.pace_records:
            lines = [line for line in lines_of([record], Steps) if line.n]
            for _, own in groupby(lines, key=lambda line: int((line.t - self.begin) / width)):
                group = list(own)
                begin = group[0].t - group[0].wall_s - self.begin
                bins.append((max(0.0, begin), group[-1].t - self.begin, Totals.of(group)))
        return bins

    @cached_property
    def _latest(self) -> list[ProcessRecord]:
        """Records of the last attempt."""
        return [record for record in self.run.records if record.attempt == self.attempts[-1].number]

    @property
    def newest_records(self) -> list[ProcessRecord]:
        """Records of the last attempt, with only the newest one for each restarted process."""
        return list({(record.head.host, record.head.who): record for record in self._latest}.values())

    @cached_property
    def _pace_launchers(self) -> list[ProcessRecord]:
        """Records of the launchers that started the rank that sets the pace."""
        hosts = {(record.attempt, record.head.host) for record in self.pace_records}
        return [one for one in self.run.records if one.head.who == LAUNCHER and (one.attempt, one.head.host) in hosts]

    def name_of(self, rank: int) -> str:
        """Return the display name of a rank that has a record."""
        return f"rank {rank} on {self._of_rank(rank)[-1].head.host}"

    def _of_rank(self, rank: int) -> list[ProcessRecord]:
        return [record for record in self.run.records if record.head.rank == rank]


def _attempt(number: int, records: Sequence[ProcessRecord]) -> AttemptFigures:
    outcome, reason = _outcome(records)
    times = [line.t for record in records for line in record.lines]
    begins = [record.head.t for record in records]
    begins += [line.begin for record in records for line in record.lines if isinstance(line, Span)]
    return AttemptFigures(number, min(begins), max(times + begins), outcome, reason)


def _outcome(records: Sequence[ProcessRecord]) -> tuple[str, str]:
    """Return the outcome of an attempt, and why it did not succeed.

    Use the job's outcome if any launcher recorded it. If not, use the outcome of trainer hosts only, because a data
    host may fail on its own or no longer be needed. As on the service, the first failure is the job's failure.
    """
    ends = [(record.head, line) for record in records for line in record.lines if isinstance(line, End)]
    known = [(head, end) for head, end in ends if end.job_outcome is not None or head.role == "trainer"]
    if not known:
        return RUNNING, ""
    _, end = min(known, key=lambda one: _precedence(*one))
    return end.job_outcome or end.outcome, end.reason


def _precedence(head: FileHead, end: End) -> tuple[bool, bool, bool, int, float]:
    """Return a sort key: the end with the smallest key determines the job's outcome."""
    kind = {FAILED: 0, SUCCEEDED: 2}.get(end.outcome, 1)
    return end.job_outcome is None, head.role != "trainer", head.who != LAUNCHER, kind, end.t


def _stopped_at(record: ProcessRecord) -> float:
    """Return when a training process began to stop: before any checkpoint that it saved because of an interruption."""
    saved_at = None
    for line in record.lines:
        match line:
            case Steps():
                saved_at = None
            case Span(name="checkpoint"):
                saved_at = line.begin
            case Event(what="interruption"):
                return line.t if saved_at is None else saved_at
    return max(line.t for line in record.lines)


def _rank_number(name: str) -> int:
    """Return the number in a name such as ``rank 3 on algo-1``."""
    return int(name.split()[1])


def _by_name(line: DataService) -> tuple[dict[str, RankFigures], dict[str, HostFigures]]:
    """Return the figures of ranks and data hosts by name. Addresses are removed from the names of data hosts.

    A line with invalid values, from a damaged record, counts as empty.
    """
    try:
        ranks = {name: _known(RankFigures, rank) for name, rank in line.ranks.items()}
        hosts = [_known(HostFigures, {**one, "name": str(one["name"]).partition(" (")[0]}) for one in line.hosts]
    except (msgspec.ValidationError, KeyError):
        return {}, {}
    return ranks, {host.name: host for host in hosts}


def _known(kind: type[_F], values: Mapping[str, object]) -> _F:
    """Convert figures, ignoring fields that only other versions of this package have."""
    return msgspec.convert({name: values[name] for name in kind.__struct_fields__ if name in values}, kind)


def lines_of(records: Iterable[ProcessRecord], kind: type[_L]) -> list[_L]:
    """Return the lines of one kind in the given records, in order."""
    return [line for record in records for line in record.lines if isinstance(line, kind)]


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
