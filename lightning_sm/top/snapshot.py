"""Snapshots of a job, put together from the traces that its hosts leave: Watch, and the snapshots that it takes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lightning_sm.data.protocol.calls import HostReport
from lightning_sm.data.protocol.figures import RankFigures
from lightning_sm.job.control_folder import Beat, ControlFolder, Phase
from lightning_sm.job.topology import Role, Topology
from lightning_sm.job.variables import CONTROL_DIR, RECORD_DIR
from lightning_sm.record import events
from lightning_sm.record.events import FAILED, INTERRUPTED, STOPPED, SUCCEEDED, End, Event, HostUse, Metrics
from lightning_sm.record.tail import RecordTail, Writer
from lightning_sm.record.totals import Totals, pace_of, samples_per_step
from lightning_sm.top.data_hosts import HostAnswer, StatusPoller
from lightning_sm.top.running import RunningHost

# A rank that should be training counts as silent after this time without a heartbeat.
_SILENT_S = 30.0
# The rates of data hosts and ranks are taken over this window: over one second, they would jump.
_WINDOW_S = 10.0
_MAX_EVENTS = 50

STARTING, TRAINING, SILENT = Phase.STARTING.value, Phase.TRAINING.value, "silent"
SERVING, IDLE, NO_ANSWER = "serving", "idle", "no answer"
FINISHING = Phase.FINISHING.value
ELSEWHERE = "not seen from here"
_T = TypeVar("_T", HostReport, RankFigures)
_AFTER_FIT = {FINISHING, SUCCEEDED, FAILED, INTERRUPTED, STOPPED}


@dataclass(frozen=True)
class HostRow:
    """A host of the job; None where a value is not known here.

    Attributes:
        host: Its name.
        group: Its instance group.
        role: ``trainer`` or ``data``.
        instance_type: Its instance type.
        state: In a word or a few.
        note: Why it is in this state, or for how long.
        ranks: Number of training processes.
        step: Completed optimizer steps, those of the rank that is furthest behind.
        epoch: From 1.
        steps_per_s: Training steps per second.
        samples_per_s: Samples of all ranks of the host per second.
        wait_share: Part of the time in which training waits for data, 0 to 1, as far as its ranks are concerned.
        batches_per_s: Batches per second that a data host builds.
        batch_s: Seconds of a worker for a batch.
        workers: Worker processes of a data host.
        busy: How many of them work.
        queued: Requests that wait for a worker.
        cpu: Part of the CPUs in use, 0 to 1.
        memory_bytes: Memory in use.
        memory_total_bytes: Memory that the job may use.
        received_bytes_s: Bytes per second from the network.
        sent_bytes_s: Bytes per second to the network.
        gpu: Part of the time in which a GPU worked, 0 to 1; the mean of the GPUs.
    """

    host: str
    group: str
    role: str
    instance_type: str | None = None
    state: str = STARTING
    note: str = ""
    ranks: int | None = None
    step: int | None = None
    epoch: int | None = None
    steps_per_s: float | None = None
    samples_per_s: float | None = None
    wait_share: float | None = None
    batches_per_s: float | None = None
    batch_s: float | None = None
    workers: int | None = None
    busy: int | None = None
    queued: int | None = None
    cpu: float | None = None
    memory_bytes: int | None = None
    memory_total_bytes: int | None = None
    received_bytes_s: float | None = None
    sent_bytes_s: float | None = None
    gpu: float | None = None


@dataclass(frozen=True)
class EventRow:
    """An event of the job.

    Attributes:
        t: When, in seconds since the Unix epoch.
        host: Where.
        what: See ``events.Event``.
        text: It in words.
    """

    t: float
    host: str
    what: str
    text: str


@dataclass(frozen=True)
class Snapshot:
    """A job at one moment.

    Attributes:
        t: When, in seconds since the Unix epoch.
        job: Its name.
        attempt: From 1; 0 if the job has written no record yet.
        seconds: How long its processes have been running.
        step: Completed optimizer steps.
        epoch: From 1.
        steps_per_s: Training steps per second.
        samples_per_s: Samples per second of all ranks.
        wait_share: Part of the time in which training waits for data, 0 to 1.
        metrics: What the model logged last, by name.
        hosts: Its hosts; trainers first.
        events: What happened, the newest last.
        others: Names of other jobs that run on this machine.
    """

    t: float
    job: str
    attempt: int = 0
    seconds: float = 0.0
    step: int | None = None
    epoch: int | None = None
    steps_per_s: float | None = None
    samples_per_s: float | None = None
    wait_share: float | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    hosts: Sequence[HostRow] = ()
    events: Sequence[EventRow] = ()
    others: Sequence[str] = ()


class Watch:
    """A watch over one job; a context manager.

    Args:
        name: Name of the job.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tail = RecordTail()
        self._data_hosts = StatusPoller()
        self._history: dict[str, deque[tuple[float, Any]]] = {}

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self._data_hosts.close()

    def look(self, hosts: Sequence[RunningHost], others: Sequence[str] = ()) -> Snapshot:
        """Take a snapshot.

        Args:
            hosts: The hosts of the job that run on this machine.
            others: Names of other jobs.
        """
        now = time.time()
        job = hosts[0].job
        topology = Topology.from_job(job)
        writers = self._tail.read({_record_folder(host) for host in hosts})
        world_size = max((writer.head.world_size or 0 for writer in writers), default=0)
        beats = {host.job.current_host: _beats(host) for host in hosts}
        answers = self._data_hosts.ask(job, hosts[0].env)
        # As in a report, data hosts speak for the ranks that have no record here.
        recorded = {writer.head.host for writer in _ranks(writers) if writer.recent_steps()}
        reports = [answer.report for answer in answers.values() if answer.report is not None]
        waits = {host: share for host, share in self._waits(now, reports).items() if host not in recorded}
        rows: list[HostRow] = []
        for name in (*topology.trainer_hosts, *topology.data_hosts):  # trainers first
            group = next(group for group in job.groups if name in group.hosts)
            row = HostRow(name, group.name, topology.role_of(name).value, group.instance_type)
            own = [writer for writer in writers if writer.head.host == name]
            facts = _use(own)
            if topology.role_of(name) is Role.TRAINER:
                facts |= _rates(_ranks(own), [waits[name]] if name in waits else [])
                facts |= _state(beats.get(name))
            else:
                is_over = all(row.state in _AFTER_FIT for row in rows if row.role == Role.TRAINER.value)
                facts |= self._serving(now, name, answers[name], is_over=is_over)
            facts |= _ended(own)
            rows.append(HostRow(**{**vars(row), **facts}))
        return Snapshot(
            now,
            self._name,
            self._tail.attempt,
            now - min(host.since for host in hosts),
            metrics=next((line.values for writer in writers for line in writer.newest(Metrics)[-1:]), {}),
            hosts=rows,
            events=_events(writers),
            others=others,
            step=min((row.step for row in rows if row.step is not None), default=None),
            epoch=min((row.epoch for row in rows if row.epoch is not None), default=None),
            **_rates(_ranks(writers), waits.values(), world_size),
        )

    def _serving(self, now: float, name: str, answer: HostAnswer, *, is_over: bool) -> dict[str, Any]:
        """Return the fields of a data host's row, from its answer."""
        report = answer.report
        if report is None:
            if is_over:  # a data host exits once all trainers have finished
                return {"state": FINISHING}
            return {"state": NO_ANSWER if name in self._history else STARTING, "note": answer.problem}
        then, before = self._remember(name, now, report)
        facts: dict[str, Any] = {name: getattr(report, name) for name in ("workers", "busy", "queued")}
        facts["state"] = SERVING if report.busy else IDLE
        built = report.built - before.built
        if now > then and built >= 0:
            facts["batches_per_s"] = built / (now - then)
        if built > 0:
            facts["batch_s"] = (report.built_s - before.built_s) / built
        return facts

    def _waits(self, now: float, reports: Iterable[HostReport]) -> dict[str, float]:
        """Return the longest share of the time window in which a rank waited for data hosts, by trainer host."""
        figures: dict[str, RankFigures] = {}
        hosts: dict[str, str] = {}
        for report in reports:
            hosts |= report.hosts
            for rank, values in report.figures.items():
                if rank not in figures or values.num_batches > figures[rank].num_batches:
                    figures[rank] = values
        shares: dict[str, float] = {}
        for rank, values in figures.items():
            _, before = self._remember(rank, now, values)
            added = values.since(before)
            if added.wait_s >= 0 and added.busy_s >= 0 and added.seconds:
                shares[hosts[rank]] = max(shares.get(hosts[rank], 0.0), added.wait_fraction)
        return shares

    def _remember(self, name: str, now: float, sums: _T) -> tuple[float, _T]:
        """Keep sums since the start, and return those of some seconds ago and their time."""
        history = self._history.setdefault(name, deque())
        history.append((now, sums))
        while now - history[0][0] > _WINDOW_S:
            history.popleft()
        return history[0]


def _record_folder(host: RunningHost) -> Any:
    named = RECORD_DIR.read(host.env)
    # The variable names the attempt's folder.
    return events.record_folder(host.job) if named is None else named.parent


def _beats(host: RunningHost) -> list[Beat]:
    folder = CONTROL_DIR.read(host.env)
    return [] if folder is None or not folder.is_dir() else ControlFolder(folder).beats()


def _ranks(writers: Iterable[Writer]) -> list[Writer]:
    return [writer for writer in writers if writer.head.rank is not None]


def _rates(ranks: Iterable[Writer], waits: Iterable[float], world_size: int = 0) -> dict[str, float | None]:
    """Return how fast some ranks are, as a report of their last seconds would.

    Args:
        ranks: What each wrote.
        waits: Shares of the time that ranks without a record here waited, as data hosts know them.
        world_size: Number of ranks, of those without a record, too; 0: these are all.
    """
    steps = {number: Totals.of(rank.recent_steps()) for number, rank in enumerate(ranks)}
    steps = {number: sums for number, sums in steps.items() if sums.step_s}
    longest = max(waits, default=None)
    slowest, pace = pace_of(steps, longest or 0.0)
    if slowest is None:
        return {"wait_share": longest}
    samples = samples_per_step(steps.values(), world_size)
    return {
        "steps_per_s": 1 / pace.step_s,
        "samples_per_s": samples / pace.step_s if samples else None,
        "wait_share": pace.waiting,
    }


def _state(beats: Sequence[Beat] | None) -> dict[str, Any]:
    """Return the fields of a trainer host's row that its ranks' heartbeats say."""
    facts: dict[str, Any] = {}
    ranks = [beat for beat in beats or () if beat.rank >= 0]
    if beats is None:
        facts["state"] = ELSEWHERE
    elif ranks:
        last = min(ranks, key=lambda beat: beat.at)
        age_s = time.monotonic() - last.at
        facts |= {"ranks": len(ranks), "step": min(beat.step for beat in ranks), "epoch": last.epoch + 1}
        is_silent = age_s > _SILENT_S and not last.phase.may_pause
        facts["state"] = SILENT if is_silent else last.doing
        if age_s > _SILENT_S:
            facts["note"] = f"rank {last.rank} {last.doing} for {age_s:.0f} s"
    return facts


def _use(own: Iterable[Writer]) -> dict[str, Any]:
    use = max((line for writer in own for line in writer.newest(HostUse)), key=lambda line: line.t, default=None)
    if use is None:
        return {}
    names = ("cpu", "memory_bytes", "memory_total_bytes", "received_bytes_s", "sent_bytes_s", "gpu")
    return {name: getattr(use, name) for name in names}


def _ended(own: Iterable[Writer]) -> dict[str, Any]:
    ends = [end for writer in own if writer.head.who == events.LAUNCHER for end in writer.newest(End)]
    return {"state": ends[-1].outcome, "note": ends[-1].reason} if ends else {}


def _events(writers: Iterable[Writer]) -> list[EventRow]:
    rows = [
        EventRow(event.t, writer.head.host, event.what, event.text)
        for writer in writers
        for event in writer.newest(Event)
    ]
    return sorted(rows, key=lambda row: row.t)[-_MAX_EVENTS:]
