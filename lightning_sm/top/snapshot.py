"""Snapshots of a job, put together from the traces that its hosts leave: Watch, and the snapshots that it takes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_sm.errors import DataServiceError, JobConfigError
from lightning_sm.job.control_folder import Beat, ControlFolder, Phase
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.topology import Role, Topology
from lightning_sm.job.variables import CONTROL_DIR, RECORD_DIR
from lightning_sm.record import events
from lightning_sm.record.tail import RecordTail, Writer
from lightning_sm.top.data_hosts import Answer, StatusPoller
from lightning_sm.top.running import RunningHost

# A rank that should be training counts as silent after this time without a heartbeat.
_SILENT_S = 30.0
_ASK_S = 1.0
# The rates of data hosts and ranks are taken over this window: over one second, they would jump.
_WINDOW_S = 10.0
_MAX_EVENTS = 50

STARTING, TRAINING, SILENT = Phase.STARTING.value, Phase.TRAINING.value, "silent"
SERVING, IDLE, NO_ANSWER = "serving", "idle", "no answer"
SUCCEEDED, FAILED, INTERRUPTED, STOPPED = "succeeded", "failed", "interrupted", "stopped"
FINISHING = Phase.FINISHING.value
ELSEWHERE = "not seen from here"
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
        wait_share: Part of the time in which its ranks wait for data, 0 to 1; the mean of the ranks.
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
        steps_per_s: Training steps per second, of the slowest host.
        samples_per_s: Samples per second of all hosts that are seen.
        wait_share: Part of the time in which ranks wait for data, 0 to 1: the mean of the hosts.
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
        self._data_hosts: StatusPoller | None = None
        self._asked_for: tuple[Any, ...] = ()
        self._why_not_asked = ""
        self._history: dict[str, deque[tuple[float, Mapping[str, Any]]]] = {}

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        if self._data_hosts is not None:
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
        beats = {host.job.current_host: _beats(host) for host in hosts}
        answers = self._ask(job, hosts[0].env)
        waits = self._waits(now, answers)
        rows: list[HostRow] = []
        for name in (*topology.trainer_hosts, *topology.data_hosts):  # trainers first
            group = next(group for group in job.groups if name in group.hosts)
            row = HostRow(name, group.name, topology.role_of(name).value, group.instance_type)
            own = [writer for writer in writers if writer.head.host == name]
            facts = _use(own)
            if topology.role_of(name) is Role.TRAINER:
                facts |= _training(own, beats.get(name), waits.get(name))
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
            metrics=next((writer.metrics.values for writer in writers if writer.metrics is not None), {}),
            hosts=rows,
            events=_events(writers),
            others=others,
            **_totals(rows),
        )

    def _ask(self, job: SageMakerJob, env: Mapping[str, str]) -> dict[str, Answer]:
        data_hosts = Topology.from_job(job).data_hosts
        if data_hosts and self._asked_for != data_hosts:  # in another attempt, other hosts may serve
            if self._data_hosts is not None:
                self._data_hosts.close()
            self._data_hosts = None
            self._asked_for = data_hosts
            try:
                self._data_hosts = StatusPoller(job, env)
            except (DataServiceError, JobConfigError) as error:
                self._why_not_asked = str(error)
        answers = {} if self._data_hosts is None else self._data_hosts.ask(_ASK_S)
        return {host: answers.get(host, Answer(problem=self._why_not_asked)) for host in data_hosts}

    def _serving(self, now: float, name: str, answer: Answer, *, is_over: bool) -> dict[str, Any]:
        """Return the fields of a data host's row, from its answer."""
        state = answer.state
        if state is None:
            if is_over:  # a data host exits once all trainers have finished
                return {"state": FINISHING}
            return {"state": NO_ANSWER if name in self._history else STARTING, "note": answer.problem}
        then, before = self._remember(name, now, state)
        facts = {key: state[key] for key in ("workers", "busy", "queued")}
        facts["state"] = SERVING if state["busy"] else IDLE
        built = state.get("built", 0) - before.get("built", 0)
        if now > then and built >= 0:
            facts["batches_per_s"] = built / (now - then)
        if built > 0:
            facts["batch_s"] = (state["built_s"] - before["built_s"]) / built
        return facts

    def _waits(self, now: float, answers: Mapping[str, Answer]) -> dict[str, float]:
        """Return the share of the time window in which ranks waited for data hosts, by trainer host."""
        figures: dict[str, Mapping[str, float]] = {}
        hosts: dict[str, str] = {}
        for answer in answers.values():
            hosts |= (answer.state or {}).get("hosts", {})
            for rank, values in (answer.state or {}).get("figures", {}).items():
                if rank not in figures or values["num_batches"] > figures[rank]["num_batches"]:
                    figures[rank] = values
        shares: dict[str, list[float]] = {}
        for rank, values in figures.items():
            _, before = self._remember(rank, now, values)
            waited, worked = (values[key] - before[key] for key in ("wait_s", "busy_s"))
            if waited >= 0 and worked >= 0 and waited + worked > 0:
                shares.setdefault(hosts[rank], []).append(waited / (waited + worked))
        return {host: sum(found) / len(found) for host, found in shares.items()}

    def _remember(self, name: str, now: float, values: Mapping[str, Any]) -> tuple[float, Mapping[str, Any]]:
        """Keep sums since the start, and return those of some seconds ago and their time."""
        history = self._history.setdefault(name, deque())
        history.append((now, values))
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


def _training(own: Iterable[Writer], beats: Sequence[Beat] | None, wait: float | None) -> dict[str, Any]:
    """Return the fields of a trainer host's row, from its ranks."""
    facts: dict[str, Any] = {}
    rates, samples, waits = [], [], []
    for writer in own:
        lines = writer.recent_steps()
        wall_s = sum(line.wall_s for line in lines)
        if wall_s > 0:
            rates.append(sum(line.n for line in lines) / wall_s)
            samples.append(sum(line.samples for line in lines) / wall_s)
            waits.append(sum(line.parts.get("data_wait", 0.0) for line in lines) / wall_s)
    if rates:
        facts |= {"steps_per_s": min(rates), "samples_per_s": sum(samples) or None}
        facts["wait_share"] = sum(waits) / len(waits)
    elif wait is not None:
        facts["wait_share"] = wait
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
    uses = [writer.use for writer in own if writer.use is not None]
    if not uses:
        return {}
    use = max(uses, key=lambda one: one.t)
    facts: dict[str, Any] = {
        name: getattr(use, name)
        for name in ("cpu", "memory_bytes", "memory_total_bytes", "received_bytes_s", "sent_bytes_s")
    }
    if use.gpus:
        facts["gpu"] = sum(gpu.use for gpu in use.gpus) / len(use.gpus)
    return facts


def _ended(own: Iterable[Writer]) -> dict[str, Any]:
    ends = [writer.end for writer in own if writer.end is not None and writer.head.who == events.LAUNCHER]
    return {"state": ends[0].outcome, "note": ends[0].reason} if ends else {}


def _events(writers: Iterable[Writer]) -> list[EventRow]:
    events = [
        EventRow(event.t, writer.head.host, event.what, event.text)
        for writer in writers
        for event in writer.recent_events
    ]
    return sorted(events, key=lambda event: event.t)[-_MAX_EVENTS:]


def _totals(rows: Sequence[HostRow]) -> dict[str, Any]:
    """Return the values of the whole job."""

    def known(name: str) -> list[Any]:
        return [value for row in rows if (value := getattr(row, name)) is not None]

    waits = known("wait_share")
    return {
        "step": min(known("step"), default=None),
        "epoch": min(known("epoch"), default=None),
        "steps_per_s": min(known("steps_per_s"), default=None),
        "samples_per_s": sum(known("samples_per_s")) or None,
        "wait_share": sum(waits) / len(waits) if waits else None,
    }
