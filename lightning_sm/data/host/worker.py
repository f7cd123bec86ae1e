"""A worker of a data host: runs the user's dataset, transforms and collate function, one batch after the other.

Workers are forked from the data host's main process, which never loads gRPC and has no threads: they share the
dataset's memory, need no pickling, and one that dies is replaced in milliseconds. This is what ``DataLoader`` does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
import traceback
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from lightning_sm._linux import kill_with_parent
from lightning_sm.data.batch.arena import Arena
from lightning_sm.data.batch.compression import codec_of
from lightning_sm.data.batch.encode import encode
from lightning_sm.data.host.iterable import ShardAnswer, ShardError
from lightning_sm.data.host.loader import SampleError, ServedLoader
from lightning_sm.data.ipc.messages import Message, MessageSocket
from lightning_sm.data.ipc.processes import keep_freed_memory
from lightning_sm.data.ipc.ring import Ring
from lightning_sm.data.protocol.spec import CHUNK_BYTES, BatchSpec
from lightning_sm.errors import BatchTooLargeError, BatchTypeError, DataSettingsError


def run_worker(
    sock: socket.socket,
    ring: Ring,
    openings: Mapping[str, Sequence[ServedLoader]],
    worker_id: int,
    num_workers: int,
) -> None:
    """Serve requests until the other end of the socket is closed.

    Args:
        sock: Connection to the network process.
        ring: Where finished batches are put.
        openings: The loaders that were opened so far, by the name of the opening.
        worker_id: Number of the worker on its host.
        num_workers: Workers on the host.
    """
    kill_with_parent()
    # The terminal's Ctrl-C and the launcher's SIGTERM go to the whole group; workers end when their socket closes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    keep_freed_memory()
    torch.set_num_threads(1)
    requests = MessageSocket(sock)
    problem = _enter(openings, worker_id, num_workers)
    with contextlib.suppress(BrokenPipeError):  # the network process died while a batch was in the making
        requests.send("ready", pid=os.getpid())
        while (message := requests.receive()) is not None:
            if problem is not None:
                _fail(requests, message.facts["slot"], problem, "worker_init_fn")
            else:
                _serve(requests, message, ring, openings)


def _enter(openings: Mapping[str, Sequence[ServedLoader]], worker_id: int, num_workers: int) -> Exception | None:
    """Run the user's worker_init_fn; what it raises is the answer to every request."""
    try:
        for loaders in openings.values():
            for loader in loaders:
                loader.enter_worker(worker_id, num_workers)
    except Exception as error:  # noqa: BLE001  # whatever the user's code raises belongs to the trainer
        return error
    return None


def _serve(
    requests: MessageSocket, message: Message, ring: Ring, openings: Mapping[str, Sequence[ServedLoader]]
) -> None:
    began = time.perf_counter()
    slot = message.facts["slot"]
    spec = BatchSpec.decode(message.payload)
    arena = Arena(ring.slot(slot))
    try:
        batch = openings[spec.opening][spec.loader].batch(spec, arena)
        if isinstance(batch, ShardAnswer):
            requests.send("ended", slot=slot, end=batch.end)
            return
        header = encode(batch, arena)
        num_bytes = arena.used
        pieces = _compressed(ring.slot(slot)[:num_bytes], arena, spec.compression)
    except SampleError as error:
        _fail(requests, slot, error.__cause__ or error, f"index {error.key!r}")
    except ShardError as error:
        _fail(requests, slot, error.__cause__ or error, error.where)
    except (BatchTypeError, BatchTooLargeError, DataSettingsError) as error:
        requests.send("failed", slot=slot, error=type(error).__name__, text=str(error))
    except Exception as error:  # noqa: BLE001  # whatever the user's code raises belongs to the trainer
        _fail(requests, slot, error, f"step {spec.step}")
    else:
        seconds = time.perf_counter() - began
        requests.send("done", header, slot=slot, num_bytes=num_bytes, pieces=pieces, produce_s=seconds)


def _compressed(data: np.ndarray, arena: Arena, compression: str) -> list[tuple[int, int]]:
    """Compress a batch into the rest of its slot, piece by piece, and return where the pieces lie.

    Empty if it is not wanted, does not pay, or finds no room.
    """
    if not compression:
        return []
    codec, pieces, total = codec_of(compression), [], 0
    for start in range(0, len(data), CHUNK_BYTES):
        packed = codec.compress(data[start : start + CHUNK_BYTES].data)
        total += len(packed)
        if total >= len(data):
            return []
        try:
            place = arena.allocate(len(packed))
        except BatchTooLargeError:
            return []
        place[:] = np.frombuffer(packed, np.uint8)
        pieces.append((arena.used - len(packed), len(packed)))
    return pieces


def _fail(requests: MessageSocket, slot: int, error: BaseException, where: str) -> None:
    text = "".join(traceback.format_exception(error))
    requests.send("failed", slot=slot, error="RemoteTransformError", text=text, where=where)
