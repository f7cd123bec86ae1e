"""The main process of a data host, which holds the trainers' sources, and runs the workers and the gRPC server process.

It has no threads and never loads gRPC, so that it can fork its workers. It restarts every child that dies, and its
children die with it.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import sched
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import TypeAlias, cast

from lightning_sm.data.host.source_builder import WorkerPlace, builder_of
from lightning_sm.data.host.sources import Sources
from lightning_sm.data.host.spawned_worker import load_builder, run_spawned_worker
from lightning_sm.data.host.worker import run_worker
from lightning_sm.data.host.worker_notes import WorkerNotes
from lightning_sm.data.host.world import show_world_of_one
from lightning_sm.data.ipc import host_messages
from lightning_sm.data.ipc.messages import Message, MessageSocket
from lightning_sm.data.ipc.processes import InheritedDescriptor, describe_exit, run_and_exit, start_module
from lightning_sm.data.ipc.ring import Ring
from lightning_sm.data.protocol.failures import Failure, first_line
from lightning_sm.data.protocol.openings import Opening
from lightning_sm.data.settings import HostSettings
from lightning_sm.errors import DataServiceError
from lightning_sm.job.control_folder import GENTLE_SIGNAL, Phase, announce

logger = logging.getLogger(__name__)

# A worker fills one slot while the other is being sent.
_SLOTS_PER_WORKER = 2

# Start each worker at most this often. Otherwise, restarts of workers that cannot start would take up a whole CPU.
_RESTART_PERIOD_S = 1.0

# Time for the server process to finish the batches that it is sending, and to notify the trainers.
_STOP_TIMEOUT_S = 5.0

_Child: TypeAlias = "subprocess.Popen[bytes] | BaseProcess"


class _Terminated(BaseException):
    """Interrupts the user's hook. Not an ``Exception``, so that ``except Exception`` in the hook does not catch it."""


@dataclass(frozen=True)
class _WorkerProcess:
    """A worker process of this data host.

    Attributes:
        process: The process.
        opening: The opening that it serves.
        number: Its number on the host.
        notes: The notes that it shares with this process.
        started: When it was started.
    """

    process: BaseProcess
    opening: Opening
    number: int
    notes: WorkerNotes
    started: float = field(default_factory=time.monotonic)


def _exit_status(child: _Child) -> int:
    """Wait for a child to exit, and return its status."""
    if isinstance(child, subprocess.Popen):
        return child.wait()
    child.join()  # not waitpid: multiprocessing may have reaped it while starting another process
    return cast(int, child.exitcode)


class MainProcess:
    """A data host that serves trainers from the current process until they have finished.

    Args:
        settings: Address, workers, limits and credentials.
        listening: Called with the address once trainers can connect.
    """

    def __init__(self, settings: HostSettings, listening: Callable[[str], None]) -> None:
        self._settings = settings
        self._listening = listening
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, _Child] = {}  # by pidfd
        self._workers: dict[int, _WorkerProcess] = {}  # by worker id
        self._num_workers_started = 0
        self._num_streams = 0
        self._sources = Sources()
        self._scheduler = sched.scheduler(time.monotonic)
        self._server: MessageSocket  # connection to the current server process
        self._has_listened = False  # whether any server process has started listening
        self._outcome: host_messages.Finished | None = None
        self._in_hook = False
        self._job_is_ending = False

    def serve(self, until: MessageSocket | None = None) -> None:
        """Serve until the trainers have finished, SIGTERM arrives, or the owner closes its end of a socket.

        Args:
            until: Socket to the owner, if any.

        Raises:
            DataServiceError: The host cannot serve: its address is in use, or no trainer connected.
        """
        show_world_of_one()
        if until is not None:
            self._selector.register(until, selectors.EVENT_READ, self._on_owner_closed)
        self._start_server()
        wakeup, waker = socket.socketpair()
        waker.setblocking(False)
        self._selector.register(wakeup, selectors.EVENT_READ, lambda: self._on_wakeup(wakeup))
        # Set this before the handlers: after a handler that only sets a flag, Python resumes the wait, which this ends.
        signal.set_wakeup_fd(waker.fileno())
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(GENTLE_SIGNAL, self._on_gentle_signal)
        process = announce()
        if process is not None:
            process.beat(phase=Phase.SERVING)
        try:
            outcome = self._wait_for_outcome()
        except _Terminated:
            outcome = self._outcome or host_messages.Finished("the job was stopped before it served anything")
        finally:
            self._close()
            # Ignore signals until the process has exited, which takes a second. Otherwise, the interpreter would
            # restore the default handlers, and a signal from the ending job would change the exit code.
            for signum in (signal.SIGTERM, GENTLE_SIGNAL):
                signal.signal(signum, signal.SIG_IGN)
            signal.set_wakeup_fd(-1)
            wakeup.close()
            waker.close()
        if outcome.is_error:
            raise DataServiceError(outcome.reason)
        logger.info("Data host done: %s.", outcome.reason)

    def _wait_for_outcome(self) -> host_messages.Finished:
        while True:
            next_s = self._scheduler.run(blocking=False)  # until the next event; None if there is none
            for key, _ in self._selector.select(next_s):
                key.data()
                if self._outcome is not None:
                    return self._outcome

    def _on_owner_closed(self) -> None:
        self._outcome = host_messages.Finished("its owner closed it")

    def _on_sigterm(self, *_: object) -> None:
        """Exit as soon as possible. Interrupt the user's hook, which may be downloading for hours."""
        self._outcome = host_messages.Finished("it was terminated (SIGTERM)")
        if self._in_hook:
            raise _Terminated

    def _on_gentle_signal(self, *_: object) -> None:
        """Note that the job is ending. Keep serving: trainers need batches until all ranks have saved a checkpoint."""
        self._job_is_ending = True
        if self._in_hook and not self._sources.openings:
            raise _Terminated

    def _on_wakeup(self, wakeup: socket.socket) -> None:
        """Tell the server process that the job is ending, if the gentle signal has arrived."""
        wakeup.recv(4096)
        if self._job_is_ending:
            self._send(host_messages.JobEnds())

    # The server process

    def _start_server(self) -> None:
        process, self._server = start_module("lightning_sm.data.server.process")
        self._watch(process, self._on_server_exit)
        self._server.send(host_messages.Serve(self._settings, snapshots=list(self._sources.snapshots)))
        self._sources.keep(())  # trainers will reopen them
        if self._job_is_ending:
            self._server.send(host_messages.JobEnds())
        self._selector.register(self._server, selectors.EVENT_READ, self._on_server_messages)

    def _on_server_messages(self) -> None:
        for message in self._server.pending():
            match message:
                case host_messages.Listening(address):
                    # If the server process restarts, trainers must find it at the same address.
                    self._settings = replace(self._settings, address=address)
                    self._has_listened = True
                    self._listening(address)
                case host_messages.NewSnapshot(digest, kept, (fd,)):
                    self._sources.take(digest, fd, kept)
                case host_messages.StartWorkers(opening):
                    self._open_source(opening)
                case host_messages.KeepOpenings(names):
                    self._sources.keep(names)
                case host_messages.KillWorker(worker_id):
                    worker = self._workers.get(worker_id)
                    if worker is not None:
                        worker.process.kill()
                case host_messages.Finished():
                    self._outcome = message

    def _on_server_exit(self, status: int) -> None:
        if self._outcome is not None:
            return
        how = describe_exit(status)
        if not self._has_listened:
            reason = f"The data host's gRPC server {how} before it started listening. See the log lines above."
            self._outcome = host_messages.Finished(reason, is_error=True)
            return
        logger.warning("The data host's gRPC server %s. Restarting it.", how)
        self._selector.unregister(self._server)
        self._server.close()
        self._start_server()

    def _open_source(self, opening: Opening) -> None:
        self._in_hook = True
        try:
            outcome = self._sources.open(opening)
        finally:
            self._in_hook = False
        if outcome is None:
            self._start_workers(opening)
        if isinstance(outcome, Failure):
            logger.warning("%s failed; trainers get the error: %s", outcome.where, first_line(outcome.text))
        self._send(host_messages.StartedWorkers(opening.name, outcome))

    def _send(self, message: Message) -> bool:
        try:
            self._server.send(message)
        except OSError:
            logger.debug("The server process has exited and will be restarted.")
            return False
        return True

    # Workers

    def _start_workers(self, opening: Opening) -> None:
        """Start workers for an opening.

        Of the workers with the same number, only one works at a time; the others keep their caches and open files.
        """
        numbers = [*range(self._settings.workers)]
        if opening.stream is not None:
            self._num_streams += 1
            numbers = [self._settings.workers - 1 + self._num_streams]
        for number in numbers:
            self._start_worker(opening, number)

    def _start_worker(self, opening: Opening, number: int) -> None:
        self._num_workers_started += 1
        worker_id = self._num_workers_started
        ring = Ring.create(_SLOTS_PER_WORKER, self._settings.max_batch_bytes)
        notes = WorkerNotes()
        place = WorkerPlace(self._settings.name or self._settings.address, number, self._settings.workers)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        process: BaseProcess
        if opening.is_spawned:
            snapshot = InheritedDescriptor(self._sources.snapshots[opening.source])
            load = partial(load_builder, snapshot, opening.stream, place)
            run = partial(run_spawned_worker, theirs, ring, load, notes)
            process = multiprocessing.get_context("spawn").Process(target=run)
        else:
            load = partial(builder_of, self._sources.unpickled[opening.source], opening.stream, place)
            run = partial(run_worker, MessageSocket(theirs), ring, load, notes)
            process = multiprocessing.get_context("fork").Process(target=self._run_forked_worker, args=(ours, run))
        process.start()
        theirs.close()
        self._send(
            host_messages.NewWorker(
                worker=worker_id,
                number=number,
                opening=opening.name,
                num_slots=ring.num_slots,
                slot_bytes=ring.slot_bytes,
                fds=(ours.fileno(), ring.fd),
            )
        )
        ours.close()
        ring.close()
        self._workers[worker_id] = _WorkerProcess(process, opening, number, notes)
        self._watch(process, partial(self._on_worker_exit, worker_id))

    def _run_forked_worker(self, ours: socket.socket, run: Callable[[], None]) -> None:
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGTERM, GENTLE_SIGNAL):
            signal.signal(signum, signal.SIG_DFL)
        self._server.close()
        ours.close()  # with a copy of this end, the worker would never see it close
        atexit._clear()  # these functions belong to the main process
        run_and_exit(run)

    def _on_worker_exit(self, worker_id: int, status: int) -> None:
        worker = self._workers.pop(worker_id)
        place = worker.notes.place()
        how = describe_exit(status) + (f" at {place}" if place else "")
        was_sent = self._send(host_messages.WorkerLost(worker_id, how))
        # Do not replace a worker that was meant to exit: its source was closed, or its server process died.
        if self._outcome is not None or not was_sent or not self._is_needed(worker):
            return
        logger.warning("Worker %d %s. Starting a new one.", worker.number, how)
        pause_s = max(0.0, worker.started + _RESTART_PERIOD_S - time.monotonic())
        self._scheduler.enter(pause_s, 0, self._start_again, (worker,))

    def _is_needed(self, worker: _WorkerProcess) -> bool:
        """Return whether a worker's opening is still open. A source that was reopened has new workers."""
        return self._sources.openings.get(worker.opening.name) is worker.opening

    def _start_again(self, worker: _WorkerProcess) -> None:
        if self._is_needed(worker):
            self._start_worker(worker.opening, worker.number)

    # All children

    def _watch(self, child: _Child, on_exit: Callable[[int], None]) -> None:
        pidfd = os.pidfd_open(cast(int, child.pid))
        self._children[pidfd] = child

        def reap() -> None:
            del self._children[pidfd]
            self._selector.unregister(pidfd)
            os.close(pidfd)
            on_exit(_exit_status(child))

        self._selector.register(pidfd, selectors.EVENT_READ, reap)

    def _close(self) -> None:
        """Stop all children. The server process gets time to notify the trainers."""
        self._server.close()
        for worker in self._workers.values():
            worker.process.kill()
        for pidfd, child in self._children.items():
            if not wait([pidfd], _STOP_TIMEOUT_S):
                child.kill()
            _exit_status(child)
            os.close(pidfd)
        self._children.clear()
        self._selector.close()
