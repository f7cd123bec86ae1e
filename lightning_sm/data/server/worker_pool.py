"""The worker pool in a data host's server process, which gives tasks to idle workers. It does not use gRPC."""

from __future__ import annotations

import contextlib
import sched
import selectors
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from msgspec.structs import replace

from lightning_sm.data.ipc.host_messages import Build, BuildAnswer, NewWorker, Ready
from lightning_sm.data.ipc.messages import Message, MessageSocket
from lightning_sm.data.ipc.ring import Ring
from lightning_sm.data.protocol.calls import HostReport
from lightning_sm.data.protocol.failures import Failure
from lightning_sm.data.protocol.frames import StepRangeHeader
from lightning_sm.data.protocol.spec import StreamEnd
from lightning_sm.record.data_figures import HostFigures

# A worker is considered hung if a cancelled task takes longer than this time, and longer than this multiple of the
# longest task.
_CANCEL_GRACE_S = 30.0
_GRACE_FACTOR = 5.0


@dataclass(frozen=True)
class ServedRange:
    """The batches of a step range, which stay in a worker's slot until ``release``.

    Attributes:
        header: Size, timings and layout of the range.
        data: The bytes of the slot.
        release: Frees the slot; must be called once.
    """

    header: StepRangeHeader
    data: memoryview
    release: Callable[[], None]


Answer: TypeAlias = ServedRange | Failure | StreamEnd


@dataclass(eq=False)
class Task:
    """A request for the batches of a step range.

    Attributes:
        client: The sender; clients share the workers fairly.
        opening: Name of the opening; each opening has its own workers.
        encoded_spec: The ``FetchSpec``, encoded.
        answer: Called once with the outcome, from any thread; must not block.
        is_stream: Whether the batches come from a stream, which a worker can read only in order.
    """

    client: object
    opening: str
    encoded_spec: bytes
    answer: Callable[[Answer], None]
    is_stream: bool = False
    received: float = field(default_factory=time.perf_counter)
    is_cancelled: bool = False


class _Worker:
    def __init__(self, new: NewWorker) -> None:
        sock, ring = new.fds
        self.id = new.worker
        self.number = new.number
        self.opening = new.opening
        self.socket = MessageSocket(socket.socket(fileno=sock))
        self.ring = Ring(ring, new.num_slots, new.slot_bytes)
        self.free_slots = list(range(self.ring.num_slots))
        self.has_started = False
        self.is_retired = False  # no longer needed: finishes its current task and gets no others
        self.is_connected = True
        self.task: Task | None = None
        self.task_started = 0.0

    @property
    def is_available(self) -> bool:
        """Whether the worker can take tasks; it may be busy."""
        return self.has_started and self.is_connected and not self.is_retired

    def close(self) -> None:
        """Close the connection, which makes the worker exit. The ring is freed when its last batch is released."""
        self.socket.close()


@dataclass
class _Work:
    """The load on the workers while trainers have more to request.

    Time counts while requests wait for a worker, or if the next request arrives before the previous ones are done. The
    time in which the last batches are built does not count, because no request follows.

    Attributes:
        busy_s: Seconds that workers were busy, summed over all workers.
        capacity_s: Seconds that workers could have been busy, summed over all workers.
    """

    busy_s: float = 0.0
    capacity_s: float = 0.0
    _measured_at: float = field(default_factory=time.perf_counter)
    # The sums since the last request, which do not count yet.
    _recent_busy_s: float = 0.0
    _recent_capacity_s: float = 0.0

    def advance(self, now: float, num_busy: int, num_workers: int, *, has_waiting: bool = False) -> None:
        """Add the time since the last call, and count it if requests were waiting for a worker."""
        seconds = now - self._measured_at
        self._measured_at = now
        self._recent_busy_s += seconds * num_busy
        self._recent_capacity_s += seconds * num_workers
        if has_waiting:
            self.request(is_needed=True)

    def request(self, *, is_needed: bool) -> None:
        """Count the time since the last call if other requests were still in progress (``is_needed``)."""
        if is_needed:
            self.busy_s += self._recent_busy_s
            self.capacity_s += self._recent_capacity_s
        self._recent_busy_s = 0.0
        self._recent_capacity_s = 0.0


class WorkerPool:
    """A pool that gives tasks to idle workers and serves clients in turn.

    Args:
        kill: Called with the id of a worker that hangs on a cancelled task.
    """

    def __init__(self, kill: Callable[[int], None]) -> None:
        self._kill = kill
        self._lock = threading.RLock()
        self._workers: dict[int, _Worker] = {}
        self._queues: OrderedDict[object, deque[Task]] = OrderedDict()
        self._live: Collection[str] | None = None  # the wanted openings; None if unknown
        self._work = _Work()
        self._num_built = 0
        self._built_s = 0.0
        self._longest_s = 0.0
        self._selector = selectors.DefaultSelector()
        self._waker, self._wakeup = socket.socketpair()
        self._selector.register(self._wakeup, selectors.EVENT_READ, None)
        self._is_closed = False
        self._scheduler = sched.scheduler(time.monotonic)
        self._thread = threading.Thread(target=self._run, name="worker-pool", daemon=True)
        self._thread.start()

    def submit(self, task: Task) -> None:
        """Queue a task. If its opening is closed, fail the task instead, since no worker would ever take it."""
        with self._lock:
            is_gone = self._live is not None and task.opening not in self._live
            if not is_gone:
                self._measure()
                self._work.request(is_needed=any(self._queues.values()) or any(w.task for w in self._workers.values()))
                self._queues.setdefault(task.client, deque()).append(task)
                self._dispatch()
        if is_gone:
            task.answer(_not_open(task))

    def cancel(self, task: Task) -> None:
        """Drop a task. A worker that has started it may finish, but is killed if that takes too long."""
        with self._lock:
            task.is_cancelled = True
            queue = self._queues.get(task.client)
            if queue is not None and task in queue:
                queue.remove(task)
                return
            for worker in self._workers.values():
                if worker.task is task:
                    # Do not kill a worker for a slow batch: its caches, open files and streams would be lost.
                    grace_s = max(_CANCEL_GRACE_S, _GRACE_FACTOR * self._longest_s)
                    self._scheduler.enter(grace_s, 0, self._kill_if_hanging, (worker, task))
                    self._wake()

    def add(self, new: NewWorker) -> None:
        """Add a worker."""
        worker = _Worker(new)
        with self._lock:
            self._workers[worker.id] = worker
            self._selector.register(worker.socket, selectors.EVENT_READ, worker)
            self._wake()

    def keep(self, live: Collection[str]) -> None:
        """Retire the workers of closed openings, and fail the tasks that are waiting for these workers.

        Args:
            live: Names of the openings that are wanted.
        """
        with self._lock:
            self._live = live
            gone = self._remove_tasks(lambda task: task.opening not in live)
            for other in list(self._workers.values()):
                if other.opening not in live:
                    other.is_retired = True
                    self._close_if_retired(other)
        for task in gone:
            task.answer(_not_open(task))

    def lose(self, worker_id: int, why: str) -> None:
        """Remove a worker that died.

        Args:
            worker_id: Id of the worker.
            why: How the worker exited, for messages.
        """
        with self._lock:
            worker = self._workers.get(worker_id)
            if worker is None:
                return
            task = worker.task
            if not worker.has_started:
                # Fail a task: otherwise, a worker that cannot start would be replaced forever, unnoticed by trainers.
                task = self._next_task([worker])
            error = "WorkerLost" if worker.has_started else "WorkerNotStarted"
            worker.task = None
            # Trainers request the waiting tasks of a stream again, after the one that was lost with the worker. If they
            # stayed queued, the new worker might get them first: it would read the stream up to a later batch, then
            # again from the start for the lost batch.
            moved = self._remove_tasks(lambda other: other.is_stream and other.opening == worker.opening)
            del self._workers[worker_id]
            self._disconnect(worker)
            worker.close()
        if task is not None and not task.is_cancelled:
            task.answer(Failure(error, why, f"worker {worker.number}"))
        for other in moved:
            other.answer(Failure("StreamMoved", f"worker {worker.number}, which had the stream open, {why}"))

    def report(self, name: str, num_workers: int) -> HostReport:
        """Return a report about the work.

        Args:
            name: Name of the data host.
            num_workers: Number of workers that it is to have.
        """
        with self._lock:
            host = HostFigures(
                name,
                workers=num_workers,
                busy_s=self._work.busy_s,
                capacity_s=self._work.capacity_s,
                num_built=self._num_built,
                built_s=self._built_s,
            )
            return HostReport(host, busy=self._load()[0])

    def close(self) -> None:
        """Close the connections to all workers, which makes them exit."""
        with self._lock:
            self._is_closed = True
            for worker in self._workers.values():
                worker.close()
            self._workers.clear()
        self._wake()
        self._thread.join(timeout=5)
        # Close these here, not in the thread, which may exit before ``_wake`` uses them.
        self._selector.close()
        self._waker.close()
        self._wakeup.close()

    def _measure(self) -> float:
        """Count the time since the last change, and return the current time for tasks that start or finish now.

        Call this with the lock held, before workers start or finish a task.
        """
        now = time.perf_counter()
        self._work.advance(now, *self._load(), has_waiting=any(self._queues.values()))
        return now

    def _load(self) -> tuple[int, int]:
        """Return how many workers are busy, and how many can be busy at once: one per number, across openings."""
        available = [worker for worker in self._workers.values() if worker.is_available]
        return sum(worker.task is not None for worker in available), len({worker.number for worker in available})

    def _dispatch(self) -> None:
        """Give tasks to idle workers. Call this with the lock held, after every change to queues, workers or slots."""
        now = self._measure()
        available = [worker for worker in self._workers.values() if worker.is_available]
        busy = {worker.number for worker in available if worker.task is not None}
        idle = [worker for worker in available if worker.number not in busy and worker.free_slots]
        while idle:
            task = self._next_task(idle)
            if task is None:
                return
            worker = next(worker for worker in idle if worker.opening == task.opening)
            idle = [other for other in idle if other.number != worker.number]
            self._queues.move_to_end(task.client)
            worker.task = task
            worker.task_started = now
            with contextlib.suppress(OSError):  # the worker died; ``lose`` will answer the task
                worker.socket.send(Build(worker.free_slots.pop(), task.encoded_spec))

    def _next_task(self, workers: list[_Worker]) -> Task | None:
        """Remove and return the next task for one of these workers. Clients take turns; their tasks stay in order."""
        for client, queue in list(self._queues.items()):
            for task in queue:
                if any(worker.opening == task.opening for worker in workers):
                    queue.remove(task)
                    return task
            if not queue:
                del self._queues[client]
        return None

    def _remove_tasks(self, is_unwanted: Callable[[Task], bool]) -> list[Task]:
        """Remove and return the waiting tasks for which a function returns true."""
        removed = [task for queue in self._queues.values() for task in queue if is_unwanted(task)]
        for task in removed:
            self._queues[task.client].remove(task)
        return removed

    # The pool's thread

    def _run(self) -> None:
        while not self._is_closed:
            for key, _ in self._selector.select(self._scheduler.run(blocking=False)):
                if key.data is None:
                    self._wakeup.recv(4096)
                else:
                    self._receive(key.data)

    def _kill_if_hanging(self, worker: _Worker, cancelled: Task) -> None:
        if worker.task is cancelled:
            self._kill(worker.id)

    def _receive(self, worker: _Worker) -> None:
        with self._lock:
            if self._workers.get(worker.id) is not worker:
                return
            try:
                messages = worker.socket.pending()
            except OSError:
                messages = []
            if not messages and worker.socket.is_at_end:
                # The worker is exiting. The main process, its parent, will report how it exited.
                self._disconnect(worker)
                return
            answers = [self._process(worker, message) for message in messages]
            self._close_if_retired(worker)
            self._dispatch()
        for answer in answers:
            answer()

    def _process(self, worker: _Worker, message: Message) -> Callable[[], None]:
        """Update a worker's state, and return a function that answers its task, to be called without the lock."""
        if isinstance(message, Ready):
            worker.has_started = True
            return lambda: None
        if not isinstance(message, BuildAnswer):
            raise TypeError(f"a worker sent {message}")
        task_s = self._measure() - worker.task_started
        task = worker.task
        worker.task = None
        self._num_built += 1
        self._built_s += task_s
        self._longest_s = max(self._longest_s, task_s)
        if task is None or task.is_cancelled:
            worker.free_slots.append(message.slot)
            return lambda: None
        return partial(task.answer, self._answer(worker, task, message))

    def _answer(self, worker: _Worker, task: Task, message: BuildAnswer) -> Answer:
        outcome, slot = message.outcome, message.slot
        if isinstance(outcome, StepRangeHeader):

            def release() -> None:
                with self._lock:
                    worker.free_slots.append(slot)
                    self._close_if_retired(worker)
                    self._dispatch()

            header = replace(outcome, queue_s=worker.task_started - task.received)
            return ServedRange(header, worker.ring.slot(slot), release)
        worker.free_slots.append(slot)
        if isinstance(outcome, Failure):
            where = ", ".join(filter(None, (outcome.where, f"worker {worker.number}")))
            return replace(outcome, where=where)
        return outcome

    def _close_if_retired(self, worker: _Worker) -> None:
        """Close a retired worker once it is idle and none of its batches is being sent."""
        is_idle = worker.task is None and len(worker.free_slots) == worker.ring.num_slots
        if worker.is_retired and is_idle and self._workers.pop(worker.id, None) is not None:
            self._disconnect(worker)
            worker.close()

    def _disconnect(self, worker: _Worker) -> None:
        """Stop receiving from a worker, and give it no more tasks."""
        if worker.is_connected:
            worker.is_connected = False
            self._selector.unregister(worker.socket)

    def _wake(self) -> None:
        self._waker.send(b".")


def _not_open(task: Task) -> Failure:
    return Failure("NotOpen", f"{task.opening} is not open")
