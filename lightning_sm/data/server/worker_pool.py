"""The workers of a data host as the network process sees them: who is idle, who gets the next batch. No gRPC."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from lightning_sm.data.ipc.messages import Message, MessageSocket
from lightning_sm.data.ipc.ring import Ring

# Opening, loader, shard.
Affinity: TypeAlias = tuple[str, int, int]


@dataclass(frozen=True)
class Produced:
    """A batch that lies in a worker's slot until ``release``.

    Attributes:
        header: Structure of the batch.
        data: The bytes of its slot, uint8.
        num_bytes: How many of them are the batch.
        pieces: Where its compressed pieces lie in the slot, as (start, size); empty: it is not compressed.
        queue_s: Seconds between the request and a worker's start on it.
        produce_s: Seconds that the worker took.
        release: Gives the slot back; to be called once.
    """

    header: bytes
    data: np.ndarray
    num_bytes: int
    pieces: list[tuple[int, int]]
    queue_s: float
    produce_s: float
    release: Callable[[], None]


@dataclass(frozen=True)
class Failed:
    """Why there is no batch.

    Attributes:
        error: Name of the error: a class of ``lightning_sm.errors``, or "WorkerLost", "ShardEnded", "ShardMoved",
            "NotOpen".
        text: What happened: a traceback, or a sentence.
        where: What the user's code was given, and the worker.
    """

    error: str
    text: str
    where: str = ""


@dataclass(eq=False)
class Task:
    """A request for a batch.

    Attributes:
        client: Who asked; workers are shared fairly between clients.
        opening: Name of the loaders that a worker must have.
        payload: The encoded ``BatchSpec``.
        answer: Called once with the outcome, from any thread; must not block.
        affinity: Tasks of the same virtual shard go to the same worker, which has its iterator.
    """

    client: object
    opening: str
    payload: bytes
    answer: Callable[[Produced | Failed], None]
    affinity: Affinity | None = None
    received: float = field(default_factory=time.perf_counter)
    is_cancelled: bool = False


class _Worker:
    def __init__(self, message: Message) -> None:
        sock, ring = message.fds
        self.id: int = message.facts["worker"]
        self.number: int = message.facts["number"]
        self.openings = frozenset(message.facts["openings"])
        self.socket = MessageSocket(socket.socket(fileno=sock))
        self.ring = Ring(ring, message.facts["num_slots"], message.facts["slot_bytes"])
        self.free = list(range(self.ring.num_slots))
        self.task: Task | None = None
        self.started = 0.0
        self.is_ready = self.was_ready = False
        self.is_retired = False
        self.is_heard = True

    def close(self) -> None:
        """Close the connection, at which the worker exits, and let go of its memory."""
        self.socket.close()
        self.ring.close()


class WorkerPool:
    """Hands tasks to idle workers, in turn over the clients.

    Args:
        ask_to_kill: Called with the id of a worker that hangs on a cancelled task.
        cancel_grace_s: Seconds that a worker may go on with a cancelled task.
    """

    def __init__(self, ask_to_kill: Callable[[int], None], cancel_grace_s: float = 10.0) -> None:
        self._ask_to_kill = ask_to_kill
        self._cancel_grace_s = cancel_grace_s
        self._lock = threading.RLock()
        self._workers: dict[int, _Worker] = {}
        self._queues: OrderedDict[object, deque[Task]] = OrderedDict()
        self._hanging: dict[int, float] = {}
        self._homes: dict[Affinity, int] = {}  # numbers of workers
        self._selector = selectors.DefaultSelector()
        self._waker, self._wakened = socket.socketpair()
        self._selector.register(self._wakened, selectors.EVENT_READ, None)
        self._is_closed = False
        self.num_batches = 0
        self.num_bytes = 0
        self.busy_s = 0.0
        self._thread = threading.Thread(target=self._run, name="worker-pool", daemon=True)
        self._thread.start()

    def submit(self, task: Task) -> None:
        """Queue a task.

        Args:
            task: The request.
        """
        with self._lock:
            self._queues.setdefault(task.client, deque()).append(task)
            self._dispatch()

    def cancel(self, task: Task) -> None:
        """Forget a task. A worker that is at it may finish; one that does not is replaced after a while.

        Args:
            task: The request.
        """
        with self._lock:
            task.is_cancelled = True
            queue = self._queues.get(task.client)
            if queue is not None and task in queue:
                queue.remove(task)
                return
            for worker in self._workers.values():
                if worker.task is task:
                    self._hanging[worker.id] = time.monotonic() + self._cancel_grace_s
                    self._wake()

    def add(self, message: Message) -> None:
        """Take in a worker. Workers without the newest loaders finish what they have and are let go.

        Args:
            message: Its facts, with its socket and its ring.
        """
        worker = _Worker(message)
        with self._lock:
            for other in list(self._workers.values()):
                if other.number == worker.number:
                    other.is_retired = True
                    self._let_go(other)
            self._workers[worker.id] = worker
            self._homes = {shard: number for shard, number in self._homes.items() if shard[0] in worker.openings}
            self._selector.register(worker.socket, selectors.EVENT_READ, worker)
            self._wake()

    def lose(self, worker_id: int, why: str) -> None:
        """Take out a worker that died.

        Args:
            worker_id: Its id.
            why: How it ended, for messages.
        """
        with self._lock:
            worker = self._workers.pop(worker_id, None)
            if worker is None:
                return
            # One that died before it was ready would die again and again, unseen: it takes a task with it.
            task = worker.task or (None if worker.was_ready else self._next_task(worker))
            worker.task = None
            moved = self._take_shards(worker)
            self._forget(worker)
            self._hanging.pop(worker_id, None)
            worker.close()
        if task is not None and not task.is_cancelled:
            task.answer(Failed("WorkerLost", f"worker {worker.number} {why}", f"worker {worker.number}"))
        for other in moved:
            other.answer(Failed("ShardMoved", f"worker {worker.number}, which had its shard open, {why}"))

    def state(self) -> dict[str, Any]:
        """Return what a data host tells of itself."""
        with self._lock:
            ready = [worker for worker in self._workers.values() if worker.is_ready and not worker.is_retired]
            return {
                "workers": len(ready),
                "busy": sum(worker.task is not None for worker in ready),
                "queued": sum(map(len, self._queues.values())),
                "batches": self.num_batches,
                "bytes": self.num_bytes,
                "busy_s": self.busy_s,
            }

    def close(self) -> None:
        """Let all workers go."""
        with self._lock:
            self._is_closed = True
            for worker in self._workers.values():
                worker.close()
            self._workers.clear()
        self._wake()
        self._thread.join(timeout=5)
        # Not by the thread, which may end before it is woken.
        self._selector.close()
        self._waker.close()
        self._wakened.close()

    def _next_task(self, worker: _Worker) -> Task | None:
        for queue in self._queues.values():
            for task in queue:
                if self._suits(worker, task):
                    queue.remove(task)
                    return task
        return None

    def _take_shards(self, worker: _Worker) -> list[Task]:
        """Take out the tasks that wait for the shards of a lost worker.

        They are asked for anew after the one that was lost with it: else its successor would open a shard for a later
        batch, and once more for that one.
        """
        moved: list[Task] = []
        for client, queue in self._queues.items():
            waiting = [task for task in queue if task.affinity and self._homes.get(task.affinity) == worker.number]
            moved += waiting
            self._queues[client] = deque(task for task in queue if task not in waiting)
        return moved

    def _suits(self, worker: _Worker, task: Task) -> bool:
        """Tell whether a worker has the loaders of a task, and its shard: a new shard is that of who has the fewest."""
        if task.opening not in worker.openings:
            return False
        if task.affinity is None:
            return True
        if task.affinity not in self._homes:
            others = (other.number for other in self._workers.values() if task.opening in other.openings)
            numbers = {worker.number, *others}
            loads = Counter(self._homes.values())
            self._homes[task.affinity] = min(sorted(numbers), key=lambda number: loads[number])
        return self._homes[task.affinity] == worker.number

    def _dispatch(self) -> None:
        """Give idle workers something to do; called with the lock held, after everything that may change it."""
        for client in list(self._queues):
            queue = self._queues[client]
            if not queue:
                del self._queues[client]
        idle = [w for w in self._workers.values() if w.is_ready and w.task is None and w.free and not w.is_retired]
        while idle and self._queues:
            started = None
            for client, queue in self._queues.items():
                pairs = ((worker, task) for task in queue for worker in idle if self._suits(worker, task))
                pair = next(pairs, None)
                if pair is not None:
                    queue.remove(pair[1])
                    self._start(*pair)
                    idle.remove(pair[0])
                    started = client
                    break
            if started is None:
                return
            self._queues.move_to_end(started)
            if not self._queues[started]:
                del self._queues[started]

    def _start(self, worker: _Worker, task: Task) -> None:
        worker.task, worker.started = task, time.perf_counter()
        try:
            worker.socket.send("batch", task.payload, slot=worker.free.pop())
        except OSError:  # it died; ``lose`` will answer the task
            self._wake()

    def _run(self) -> None:
        while not self._is_closed:
            with self._lock:
                deadline = min(self._hanging.values(), default=None)
            wait = None if deadline is None else max(0.0, deadline - time.monotonic())
            for key, _ in self._selector.select(wait):
                if key.data is None:
                    self._wakened.recv(4096)
                else:
                    self._hear(key.data)
            self._replace_hanging()

    def _replace_hanging(self) -> None:
        now = time.monotonic()
        with self._lock:
            late = [worker_id for worker_id, deadline in self._hanging.items() if deadline <= now]
            for worker_id in late:
                del self._hanging[worker_id]
        for worker_id in late:
            self._ask_to_kill(worker_id)

    def _hear(self, worker: _Worker) -> None:
        with self._lock:
            if self._workers.get(worker.id) is not worker:
                return
            try:
                messages = worker.socket.pending()
            except OSError:
                messages = []
            if not messages and worker.socket.is_at_end:
                # It is dying; the main process, its parent, will say how. Until then it gets nothing.
                self._forget(worker)
                return
            answers = [self._take(worker, message) for message in messages]
            self._let_go(worker)
            self._dispatch()
        for answer in answers:
            answer()

    def _forget(self, worker: _Worker) -> None:
        """Hear nothing more from a worker, and give it nothing more."""
        if worker.is_heard:
            worker.is_heard = worker.is_ready = False
            self._selector.unregister(worker.socket)

    def _take(self, worker: _Worker, message: Message) -> Callable[[], None]:
        if message.kind == "ready":
            worker.is_ready = worker.was_ready = True
            return lambda: None
        task, worker.task = worker.task, None
        self._hanging.pop(worker.id, None)
        self.busy_s += time.perf_counter() - worker.started
        slot = message.facts["slot"]
        if task is None or task.is_cancelled or message.kind != "done":
            worker.free.append(slot)
            if task is None or task.is_cancelled:
                return lambda: None
            return lambda: task.answer(_failure(worker, message))
        return self._produced(worker, task, message, slot)

    def _produced(self, worker: _Worker, task: Task, message: Message, slot: int) -> Callable[[], None]:
        num_bytes = message.facts["num_bytes"]
        self.num_batches += 1
        self.num_bytes += num_bytes

        def release() -> None:
            with self._lock:
                worker.free.append(slot)
                self._let_go(worker)
                self._dispatch()

        produced = Produced(
            message.payload,
            worker.ring.slot(slot),
            num_bytes,
            message.facts["pieces"],
            worker.started - task.received,
            message.facts["produce_s"],
            release,
        )
        return lambda: task.answer(produced)

    def _let_go(self, worker: _Worker) -> None:
        """Close a retired worker once it has nothing to do and nothing of it is being sent."""
        is_idle = worker.task is None and len(worker.free) == worker.ring.num_slots
        if worker.is_retired and is_idle and self._workers.pop(worker.id, None) is not None:
            self._forget(worker)
            worker.close()

    def _wake(self) -> None:
        self._waker.send(b".")


def _failure(worker: _Worker, message: Message) -> Failed:
    if message.kind == "ended":
        end = message.facts["end"]
        return Failed("ShardEnded", "" if end is None else str(end))
    where = ", ".join(filter(None, (message.facts.get("where"), f"worker {worker.number}")))
    return Failed(message.facts["error"], message.facts["text"], where)
