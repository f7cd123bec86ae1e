"""The ``Fetch`` method, which receives trainer ranks' requests and sends finished batches."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import grpc
from msgspec.structs import replace

from lightning_sm.data.protocol.failures import Failure
from lightning_sm.data.protocol.fetch import FetchSpec
from lightning_sm.data.protocol.frames import FrameKind, frame, frames
from lightning_sm.data.protocol.spec import CHUNK_BYTES, StreamEnd
from lightning_sm.data.server.worker_pool import Answer, ServedRange, Task, WorkerPool
from lightning_sm.errors import WireError

logger = logging.getLogger(__name__)

# Truncate messages and tracebacks, which may contain a dataset's repr. Keep a traceback's end, which has the error.
_MAX_TEXT = 1 << 20

# Answers that are ready at the same time share a message of up to this size: a message costs more than a small batch.
_MAX_SHARED_MESSAGE_BYTES = 256 << 10


def fetch(pool: WorkerPool, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
    """Answer a rank's requests until it cancels the call or loses its connection.

    Args:
        pool: The workers that answer the requests.
        requests: Messages from the rank.
        context: The context of the call.
    """
    stream = _RankStream(pool)
    context.add_callback(stream.close)
    threading.Thread(target=_read, args=(requests, stream), name="requests", daemon=True).start()
    try:
        yield from stream.messages()
    finally:
        stream.close()


def _read(requests: Iterator[bytes], stream: _RankStream) -> None:
    try:
        for message in requests:
            for request_id, kind, _, payload in frames(message):
                stream.receive(request_id, kind, payload)
    except WireError as error:
        logger.warning("A trainer violated the protocol: %s", error)
    except grpc.RpcError:
        logger.debug("A trainer closed its stream.")
    except Exception:  # grpc raises a bare Exception if the call was cancelled
        logger.debug("Lost connection to a trainer.", exc_info=True)
    stream.close()


class _RankStream:
    """One trainer rank's requests to this host, and the answers that have not been sent."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._answers: queue.SimpleQueue[tuple[int, Answer] | None] = queue.SimpleQueue()
        self._lock = threading.RLock()  # a request may be answered while it is being started, in the same thread
        self._tasks: dict[int, Task] = {}
        self._is_closed = False

    def receive(self, request_id: int, kind: int, payload: memoryview) -> None:
        if kind == FrameKind.FETCH:
            self._submit(request_id, bytes(payload))
        elif kind == FrameKind.CANCEL:
            with self._lock:
                task = self._tasks.pop(request_id, None)
            if task is not None:
                self._pool.cancel(task)
        else:
            raise WireError(f"a frame of kind {kind}")

    def _submit(self, request_id: int, encoded_spec: bytes) -> None:
        spec = FetchSpec.decode(encoded_spec)
        task = Task(self, spec.opening, encoded_spec, partial(self._put, request_id), is_stream=not spec.indices)
        with self._lock:  # so that ``close`` cancels the task
            if not self._is_closed:
                self._tasks[request_id] = task
                self._pool.submit(task)

    def _put(self, request_id: int, answer: Answer) -> None:
        with self._lock:
            if not self._is_closed:
                self._answers.put((request_id, answer))
                return
        if isinstance(answer, ServedRange):
            answer.release()

    def close(self) -> None:
        """Cancel everything: the trainer has exited, or will repeat its requests on another stream."""
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
        """Yield the answers in the order in which they finish, combining small ones and splitting large ones."""
        parts: list[bytes] = []
        try:
            while True:
                try:
                    answer = self._answers.get(block=not parts)
                except queue.Empty:
                    yield b"".join(parts)
                    parts.clear()
                    continue
                if answer is None:
                    return
                for part in self._encode(*answer):
                    parts.append(part)
                    if sum(map(len, parts)) >= _MAX_SHARED_MESSAGE_BYTES:
                        yield b"".join(parts)
                        parts.clear()
        finally:
            while not self._answers.empty():
                answer = self._answers.get()
                if answer is not None and isinstance(answer[1], ServedRange):
                    answer[1].release()

    def _encode(self, request_id: int, answer: Answer) -> Iterator[bytes]:
        with self._lock:
            is_wanted = self._tasks.pop(request_id, None) is not None
        if isinstance(answer, StreamEnd):
            yield frame(request_id, FrameKind.ENDED, value=answer.num_batches)
            return
        if isinstance(answer, Failure):
            short = replace(answer, text=answer.text[:_MAX_TEXT], traceback=answer.traceback[-_MAX_TEXT:])
            text = short.encode()
            yield frame(request_id, FrameKind.FAILURE, len(text)) + text
            return
        try:
            if is_wanted:
                yield from _batch_frames(request_id, answer)
        finally:
            answer.release()


def _batch_frames(request_id: int, served: ServedRange) -> Iterator[bytes]:
    data, num_bytes, header = served.data, served.header.num_bytes, served.header.encode()
    # Send the header together with the first piece.
    parts: list[Any] = [frame(request_id, FrameKind.HEADER, len(header)), header]
    for start in range(0, num_bytes, CHUNK_BYTES):
        size = min(CHUNK_BYTES, num_bytes - start)
        parts += [frame(request_id, FrameKind.DATA, size, start), data[start : start + size]]
        yield b"".join(parts)
        parts.clear()
    if parts:
        yield b"".join(parts)
