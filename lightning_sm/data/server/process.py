"""The network process of a data host: moves bytes between workers and trainers, and runs nothing of the user's."""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from lightning_sm._linux import end_with_parent
from lightning_sm._log import show_log_lines
from lightning_sm.data.ipc.messages import Message, MessageSocket
from lightning_sm.data.ipc.processes import end_with_any_thread, run_and_leave
from lightning_sm.data.protocol import calls, grpc_transport
from lightning_sm.data.protocol.calls import Call
from lightning_sm.data.protocol.grpc_transport import FrameKind
from lightning_sm.data.protocol.spec import CHUNK_BYTES, BatchSpec
from lightning_sm.data.server.leases import Leases, is_success
from lightning_sm.data.server.worker_pool import Affinity, Failed, Produced, Task, WorkerPool
from lightning_sm.data.settings import HostSettings
from lightning_sm.errors import DataSettingsError, WireError

logger = logging.getLogger(__name__)

# Each rank holds one thread for its stream and one now and then for a short call. Threads are made on demand.
_MAX_THREADS = 2048

# A call that waits for the user's setup() answers "not yet" after this time, so that a trainer can say what it awaits.
_PATIENCE_S = 5.0

# Ranks are at most an epoch apart, and an epoch has a list for each loader; who comes too late has it made again.
_NUM_LISTINGS = 32

# The end of a traceback, which may show the repr of a dataset, says what happened.
_MAX_TEXT = 1 << 20

# Answers that are ready at the same time go in one message up to this size: a message costs more than a small batch.
_TOGETHER_BYTES = 256 << 10

# Time for trainers to be told that this host leaves; it is up when they have been.
_GRACE_S = 1.0

# Number of shards, shard, offset, whether the batch is wanted.
_NUM_SHARD_KEYS = 4


class NetworkProcess:
    """The gRPC server and what it knows.

    Args:
        main: Connection to the main process of the data host.
        settings: Address, limits, credentials.
    """

    def __init__(self, main: MessageSocket, settings: HostSettings) -> None:
        self._main = main
        self._settings = settings
        self._pool = WorkerPool(lambda worker: self._tell("kill", worker=worker))
        self._leases = Leases(settings.lease_s, settings.startup_timeout_s, time.monotonic())
        self._changed = threading.Condition()
        self._opened: dict[str, dict[str, Any]] = {}
        self._asked: set[str] = set()
        self._listings: dict[str, bytes] = {}  # nothing while the sampler runs
        self._streams: set[_Stream] = set()
        self._started = time.monotonic()
        self._server = grpc.server(
            ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="grpc"),
            handlers=[grpc.method_handlers_generic_handler(grpc_transport.SERVICE, self._handlers())],
            interceptors=[grpc_transport.Guard(settings.credentials, settings.name)],
            options=grpc_transport.server_options(),
        )

    def run(self) -> None:
        """Serve until the main process closes the connection, or the trainers have finished."""
        try:
            address = grpc_transport.bind(self._server, self._settings.address, self._settings.credentials)
        except DataSettingsError as error:
            self._tell("finished", error=str(error))
            return
        self._server.start()
        self._tell("listening", address=address)
        while True:
            try:
                message = self._main.receive(timeout_s=0.5)
            except TimeoutError:
                outcome = self._leases.outcome(time.monotonic())
                if outcome is not None:
                    self._tell("finished", **outcome)
                continue
            if message is None:
                break
            self._hear(message)
        for stream in list(self._streams):
            stream.close()
        self._server.stop(_GRACE_S).wait()
        self._pool.close()

    def _hear(self, message: Message) -> None:
        if message.kind == "worker":
            self._pool.add(message)
        elif message.kind == "job_ends":
            self._leases.expect_no_more()
        elif message.kind == "lost":
            self._pool.lose(message.facts["worker"], message.facts["why"])
        else:
            with self._changed:
                if message.kind == "opened":
                    facts = dict(message.facts)
                    opening = facts.pop("opening")
                    self._forget_other_runs(opening)
                    self._opened[opening] = facts
                elif message.kind == "listed":
                    self._listed(message)
                self._changed.notify_all()

    def _listed(self, message: Message) -> None:
        with os.fdopen(message.fds[0], "rb") as file:
            file.seek(0)
            data = file.read()
        if message.facts["why"]:
            data = json.dumps({"lost": message.facts["why"]}).encode()
        self._listings.pop(message.facts["listing"], None)
        self._listings[message.facts["listing"]] = data
        while len(self._listings) > _NUM_LISTINGS:
            del self._listings[next(iter(self._listings))]

    def _forget_other_runs(self, opening: str) -> None:
        """Ask the main process again for loaders of a run that is over; it knows what became of them."""
        run = opening.partition("/")[0]
        self._opened = {name: facts for name, facts in self._opened.items() if name.partition("/")[0] == run}
        self._asked = {name for name in self._asked if name in self._opened or name.partition("/")[0] == run}

    def _tell(self, kind: str, **facts: Any) -> None:
        try:
            self._main.send(kind, **facts)
        except OSError:
            logger.debug("The main process is gone; this one ends with it.")

    def _handlers(self) -> dict[str, Any]:
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        return {
            "Open": unary(self._open),
            "List": stream(self._list),
            "Fetch": stream(self._fetch),
            "Beat": unary(self._beat),
            "Finish": unary(self._finish),
        }

    def _open(self, request: bytes, context: Any) -> bytes:
        facts = _facts(calls.OPEN, request, context)
        opening = facts["opening"]
        with self._changed:
            if opening not in self._asked:
                self._asked.add(opening)
                self._tell("open", **facts)
            self._changed.wait_for(lambda: opening in self._opened, _PATIENCE_S)
            reply = self._opened.get(opening)
            if reply is not None and "error" in reply:
                # The next trainer that asks may find the disk mended.
                self._asked.discard(opening)
                del self._opened[opening]
        return json.dumps(reply or {"state": "opening"}).encode()

    def _list(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        request = next(requests)
        facts = _facts(calls.LIST, request, context)
        listing = json.dumps(facts, sort_keys=True)
        with self._changed:
            if listing not in self._listings:
                self._listings[listing] = b""
                self._tell("list", listing=listing, **facts)
            self._changed.wait_for(lambda: self._listings.get(listing), _PATIENCE_S)
            answer = self._listings.get(listing) or json.dumps({"state": "listing"}).encode()
            if answer.startswith(b'{"lost"'):  # whoever asks next may be luckier
                del self._listings[listing]
        for start in range(0, len(answer), CHUNK_BYTES):
            yield answer[start : start + CHUNK_BYTES]

    def _fetch(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        stream = _Stream(self._pool)
        self._streams.add(stream)
        context.add_callback(stream.close)
        reader = threading.Thread(target=self._read, args=(requests, stream), name="requests", daemon=True)
        reader.start()
        try:
            yield from stream.messages()
        finally:
            stream.close()
            self._streams.discard(stream)

    def _read(self, requests: Iterator[bytes], stream: _Stream) -> None:
        try:
            for message in requests:
                for request_id, kind, _, payload in grpc_transport.frames(message):
                    if kind == FrameKind.CANCEL:
                        stream.cancel(request_id)
                    else:
                        self._request(stream, request_id, kind, bytes(payload))
        except WireError as error:
            logger.warning("A trainer broke the protocol: %s", error)
        except grpc.RpcError:
            logger.debug("A trainer closed its stream.")
        except Exception:  # grpc raises a bare Exception when the call was cancelled
            logger.debug("A trainer is gone.", exc_info=True)
        stream.close()

    def _request(self, stream: _Stream, request_id: int, kind: int, payload: bytes) -> None:
        if kind != FrameKind.FETCH:
            raise WireError(f"a frame of kind {kind}")
        spec = BatchSpec.decode(payload)
        loaders = self._opened.get(spec.opening, {}).get("loaders", [])
        if not 0 <= spec.loader < len(loaders):
            what = f"loader {spec.loader} of {spec.opening} is not open on data host {self._settings.name}"
            stream.put(request_id, Failed("NotOpen", what))
            return
        # A virtual shard stays with the worker that has its iterator.
        is_shard = loaders[spec.loader]["order"] == "shards"
        affinity = (spec.opening, spec.loader, _shard(spec)) if is_shard else None
        stream.submit(request_id, spec.opening, payload, affinity)

    def _beat(self, request: bytes, context: Any) -> bytes:
        facts = _facts(calls.BEAT, request, context)
        self._leases.beat(facts["client"], facts["world_size"], time.monotonic())
        state = {
            "name": self._settings.name,
            "up_s": time.monotonic() - self._started,
            **self._pool.state(),
            # Those that are meant to be there: the first beat comes before any is forked, and decides on credits.
            "workers": self._settings.workers,
        }
        return json.dumps(state).encode()

    def _finish(self, request: bytes, context: Any) -> bytes:
        facts = _facts(calls.FINISH, request, context)
        # Before the answer, after which the trainer may leave, and SIGTERM may come to this host.
        self._tell("trainer_finished", is_success=is_success(facts["outcome"]))
        self._leases.finish(facts["client"], facts["outcome"], time.monotonic())
        return b"{}"


_NOTHING_YET: tuple[int, Produced | Failed] = (-1, Failed("", ""))


class _Stream:
    """What one trainer rank asked of this host, and the answers on their way."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._answers: queue.SimpleQueue[tuple[int, Produced | Failed] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._tasks: dict[int, Task] = {}
        self._is_closed = False

    def submit(self, request_id: int, opening: str, payload: bytes, affinity: Affinity | None) -> None:
        task = Task(self, opening, payload, lambda answer: self.put(request_id, answer), affinity)
        with self._lock:
            if self._is_closed:
                return
            self._tasks[request_id] = task
        self._pool.submit(task)

    def cancel(self, request_id: int) -> None:
        with self._lock:
            task = self._tasks.pop(request_id, None)
        if task is not None:
            self._pool.cancel(task)

    def put(self, request_id: int, answer: Produced | Failed) -> None:
        with self._lock:
            if not self._is_closed:
                self._answers.put((request_id, answer))
                return
        if isinstance(answer, Produced):
            answer.release()

    def close(self) -> None:
        """Forget everything; the trainer is gone, or asks anew on another stream."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            tasks = list(self._tasks.values())
            self._tasks.clear()
        for task in tasks:
            self._pool.cancel(task)
        self._answers.put(None)

    def messages(self) -> Iterator[bytes]:
        """Yield answers as they are finished; small ones together, large ones in pieces."""
        waiting: list[bytes] = []
        try:
            while (answer := self._next(wait=not waiting)) is not None:
                for message in () if answer is _NOTHING_YET else self._message(*answer):
                    waiting.append(message)
                    if sum(map(len, waiting)) >= _TOGETHER_BYTES:
                        yield b"".join(waiting)
                        waiting.clear()
                if waiting and answer is _NOTHING_YET:
                    yield b"".join(waiting)
                    waiting.clear()
        finally:
            self._drain()

    def _next(self, *, wait: bool) -> tuple[int, Produced | Failed] | None:
        try:
            return self._answers.get(wait)
        except queue.Empty:
            return _NOTHING_YET

    def _message(self, request_id: int, answer: Produced | Failed) -> Iterator[bytes]:
        with self._lock:
            is_wanted = self._tasks.pop(request_id, None) is not None or isinstance(answer, Failed)
        if isinstance(answer, Produced) and len(answer.header) > grpc_transport.MAX_STRUCTURE_BYTES:
            answer.release()
            what = f"The strings and lists of a batch have {len(answer.header)} bytes"
            allowed = f"{grpc_transport.MAX_STRUCTURE_BYTES} are allowed"
            answer = Failed("BatchTooLargeError", f"{what}, {allowed}. Send long texts as bytes or uint8 tensors.")
        if isinstance(answer, Failed):
            text = json.dumps({"error": answer.error, "text": answer.text[-_MAX_TEXT:], "where": answer.where}).encode()
            yield b"".join((grpc_transport.frame(request_id, FrameKind.FAILURE, len(text)), text))
            return
        try:
            if is_wanted:
                yield from _pieces(request_id, answer)
        finally:
            answer.release()

    def _drain(self) -> None:
        while True:
            try:
                answer = self._answers.get_nowait()
            except queue.Empty:
                return
            if answer is not None and isinstance(answer[1], Produced):
                answer[1].release()


def _shard(spec: BatchSpec) -> int:
    values = spec.keys.tolist()
    if len(values) != _NUM_SHARD_KEYS or not 0 <= values[1] < values[0] or values[2] < 0:
        raise WireError(f"a request for shards with the keys {values[:8]}")
    return int(values[1])


def _pieces(request_id: int, batch: Produced) -> Iterator[bytes]:
    data = batch.data.data
    head = grpc_transport.batch_head(batch.num_bytes, batch.queue_s, batch.produce_s)
    size = len(head) + len(batch.header)
    parts: list[Any] = [grpc_transport.frame(request_id, FrameKind.HEADER, size), head, batch.header]
    kind = FrameKind.COMPRESSED if batch.pieces else FrameKind.DATA
    offsets = range(0, batch.num_bytes, CHUNK_BYTES)
    places = batch.pieces or [(offset, min(CHUNK_BYTES, batch.num_bytes - offset)) for offset in offsets]
    for offset, (start, size) in zip(offsets, places, strict=True):
        parts += [grpc_transport.frame(request_id, kind, size, offset), data[start : start + size]]
        yield b"".join(parts)
        parts.clear()
    if parts:
        yield b"".join(parts)


def _facts(call: Call, request: bytes, context: Any) -> dict[str, Any]:
    try:
        return call.parse(request)
    except WireError as error:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        raise  # never reached: abort raises


def main() -> None:
    """Run the network process; the argument is the descriptor of the connection to the main process."""
    # Ctrl-C and SIGTERM go to the whole process group; this process ends with the main process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # The end of the connection tells it, too, but not to a process that is stopped.
    end_with_parent()
    end_with_any_thread()
    show_log_lines()
    main_process = MessageSocket(socket.socket(fileno=int(sys.argv[1])))
    message = main_process.receive()
    if message is None:
        return
    NetworkProcess(main_process, HostSettings.from_json(message.facts["settings"])).run()


if __name__ == "__main__":
    run_and_leave(main)
