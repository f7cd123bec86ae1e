"""The launcher's part of a run's record: the host's resource usage, and events."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from signal import Signals

from lightning_sm._linux import usable_cpus
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.outcomes import JobOutcome, Outcome, OutcomeKind
from lightning_sm.job.topology import Role
from lightning_sm.job.variables import RECORD_DIR
from lightning_sm.record import events
from lightning_sm.record.host_use import HostMeter

_USE_S = 5.0
_EVENTS = {OutcomeKind.LOST: "host_lost", OutcomeKind.INTERRUPTION: "interruption"}


class HostRecord:
    """The launcher's file in the run's record; as a context manager, it samples the host's resource usage.

    Args:
        job: The job.
        role: The role of this host.
        env: Environment variables.
    """

    def __init__(self, job: SageMakerJob, role: Role, env: Mapping[str, str]) -> None:
        self._job = job
        self._role = role
        self._record = events.open_record(job, events.LAUNCHER, env)
        self._was_stopped = False
        self._has_begun = False
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="record", daemon=True)

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that make the script's processes write their files to the same folder."""
        return {RECORD_DIR.name: str(self._record.path.parent)}

    def __enter__(self) -> HostRecord:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_sampling()

    def began(self, command: Sequence[str]) -> None:
        """Write the head of the file, which names the host and the command, unless it was already written.

        Args:
            command: The command line of the script, without secrets; empty if it is not known.
        """
        head = events.head_of(self._job, events.LAUNCHER, role=self._role.value, cpus=usable_cpus(), command=command)
        with self._lock:
            if not self._has_begun:
                self._record.append(head)
            self._has_begun = True

    def event(self, what: str, text: str) -> None:
        """Write an event with the current time, if the head has been written; see ``events.Event``."""
        self._write(events.Event(time.time(), what, text))

    def on_stop(self, signum: int) -> None:
        """Record that this host was told to stop."""
        self._was_stopped = True
        self.began([])
        self.event("signal", f"{Signals(signum).name}: this host was told to stop")

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Measure and write the duration of a ``with`` block."""
        began_at, began = time.time(), time.perf_counter()
        try:
            yield
        finally:
            self._write(events.Span(time.time(), name, began_at, time.perf_counter() - began))

    def on_job_outcome(self, job: JobOutcome) -> None:
        """Write the job's outcome, if another host caused it."""
        if job.is_failure and job.host != self._job.current_host:
            what = _EVENTS.get(job.kind, "failure")
            why = job.reason.text
            text = why if job.kind is OutcomeKind.LOST else f"host {job.host}: {why}"
            self.event(what, text)

    def end(self, outcome: Outcome, job: JobOutcome | None, *, is_saved: bool) -> None:
        """Write the outcomes of this host and of the job, and close the file.

        Args:
            outcome: The outcome of this host.
            job: The outcome of the job; None if this host has not learned it, or was stopped before the job ended.
            is_saved: Whether a checkpoint was saved after the interruption.
        """
        self.began([])  # if the launcher exits before it knows the script
        self._stop_sampling()
        what = _word(outcome.kind, is_saved=is_saved)
        if what == events.SUCCEEDED and self._was_stopped:
            what = events.STOPPED  # a stopped data host also counts as successful: it served all ranks until then
        of_job = None if job is None else _word(job.kind, is_saved=is_saved)
        reason = outcome.reason if job is None else job.reason
        self._write(events.End(time.time(), what, outcome.exit_code, reason.headline, of_job))
        self._record.close()

    def _write(self, line: events.Line) -> None:
        with self._lock:
            if self._has_begun:
                self._record.append(line)

    def _stop_sampling(self) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        meter = HostMeter(is_machine_shared=self._job.shares_machine)
        began = time.monotonic()
        due = began + _USE_S
        while not self._closing.wait(due - time.monotonic()):
            now = time.monotonic()
            due = now + events.gap_s(now - began, _USE_S)
            self._write(meter.measure())
        # Ensure that even a short-lived host has one line of resource usage.
        self._write(meter.measure())


def _word(kind: OutcomeKind, *, is_saved: bool) -> str:
    if kind is OutcomeKind.SUCCESS:
        return events.SUCCEEDED
    if kind is OutcomeKind.INTERRUPTION:
        return events.INTERRUPTED if is_saved else events.STOPPED
    return events.FAILED
