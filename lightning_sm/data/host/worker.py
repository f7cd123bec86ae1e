"""A worker of a data host: runs the user's dataset, transforms and collate function, one batch after the other.

Workers are forked from the data host's main process, as ``DataLoader`` forks its own, unless the loader wants others
(see ``spawned_worker``). The main process never loads gRPC and has no threads of its own, so forking it is safe. Forks
share the dataset's memory, need no pickling, and start within milliseconds.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from lightning_sm._linux import kill_with_parent
from lightning_sm.data.batch.arena import ALIGNMENT, Arena
from lightning_sm.data.batch.compression import codec_of
from lightning_sm.data.batch.encode import encode
from lightning_sm.data.host.iterable import UserCodeError
from lightning_sm.data.host.loader import ServedLoader
from lightning_sm.data.host.trainer_stand_in import stand_in
from lightning_sm.data.host.worker_notes import WorkerNotes
from lightning_sm.data.ipc.host_messages import Build, BuildAnswer, BuiltRange, Ready
from lightning_sm.data.ipc.messages import MessageSocket
from lightning_sm.data.ipc.processes import keep_freed_memory
from lightning_sm.data.ipc.ring import Ring
from lightning_sm.data.protocol.failures import Failure
from lightning_sm.data.protocol.frames import EncodedBatch, pack_batches
from lightning_sm.data.protocol.spec import CHUNK_BYTES, ShardEnd, StepRangeSpec
from lightning_sm.errors import BatchTooLargeError, BatchTypeError


def run_worker(
    requests: MessageSocket,
    ring: Ring,
    load: Callable[[], Mapping[str, Sequence[ServedLoader]]],
    notes: WorkerNotes,
    *,
    host: str,
    worker_id: int,
    num_workers: int,
) -> None:
    """Serve requests until the other end of the socket is closed.

    Args:
        requests: Connection to the server process.
        ring: The slots for finished batches.
        load: Returns the open loaders, by the name of the request that opened them.
        notes: Its notes for its parent.
        host: Name of the data host.
        worker_id: Number of the worker on its host.
        num_workers: Workers on the host.
    """
    kill_with_parent()
    # Ctrl-C and the launcher's SIGTERM go to the whole process group, but workers exit only when their socket closes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    keep_freed_memory()
    torch.set_num_threads(1)
    notes.write_stacks_on_signal()
    problem: Failure | None = None
    openings: Mapping[str, Sequence[ServedLoader]] = {}
    try:
        openings = load()
    except Exception as error:  # noqa: BLE001  # every request is answered with the error of the user's code
        problem = Failure.of(error, "the import of the script and the loaders in a new process")
    try:
        for loaders in openings.values():
            for loader in loaders:
                notes.set_text("worker_init_fn")
                loader.enter_worker(host, worker_id, num_workers)
    except Exception as error:  # noqa: BLE001  # as above
        problem = Failure.of(error, "worker_init_fn")
    notes.clear()
    with contextlib.suppress(BrokenPipeError):  # the server process died while this worker built a batch
        requests.send(Ready())
        notes.note_start()  # not before: one whose connection is lost is started again after a pause
        while (request := requests.receive()) is not None:
            if not isinstance(request, Build):
                raise TypeError(f"the server process sent {request}")
            if problem is not None:
                requests.send(BuildAnswer(request.slot, problem))
            else:
                outcome, batches = _build_range(request, ring, openings, notes, worker_id)
                requests.send(BuildAnswer(request.slot, outcome, pack_batches(batches)))
                notes.clear()


def _build_range(
    request: Build, ring: Ring, openings: Mapping[str, Sequence[ServedLoader]], notes: WorkerNotes, worker_id: int
) -> tuple[BuiltRange | Failure | ShardEnd, list[EncodedBatch]]:
    """Build the batches of a request in a slot.

    Args:
        request: The request.
        ring: The slots.
        openings: The open loaders, by the name of the request that opened them.
        notes: The notes of this process, which say at which sample it is.
        worker_id: Number of the worker on its host.

    Returns:
        The outcome, and the batches; none if it is a failure, or if the shard has ended before.
    """
    started = time.perf_counter()
    spec = StepRangeSpec.decode(request.encoded_spec)
    memory = ring.slot(request.slot)
    batches: list[EncodedBatch] = []
    used = 0
    try:
        loader = openings[spec.opening][spec.loader]
        stand_in().begin_batch(spec.batches[0].epoch)  # what the user's code reads as self.trainer.current_epoch
        for one in spec.batches:
            start = -(-used // ALIGNMENT) * ALIGNMENT
            arena = Arena(memory[start:])
            batch = loader.batch(one, arena, notes)
            if isinstance(batch, ShardEnd):
                if batches:  # fewer batches than requested mean that the shard ends with them
                    break
                return batch, []
            structure = encode(batch, arena)
            batches.append(EncodedBatch(start, arena.used, structure))
            used = start + arena.used
        loader.check_seeding()
        pieces = _compress(memory, used, spec.compression) if spec.compression else []
    except UserCodeError as error:
        return Failure.of(error.__cause__ or error, error.where), []
    except (BatchTypeError, BatchTooLargeError) as error:
        return Failure(type(error).__name__, str(error)), []
    except Exception as error:  # noqa: BLE001  # the error of the user's code is sent to the trainer
        return Failure.of(error), []
    return BuiltRange(used, pieces, time.perf_counter() - started, worker_id), batches


def _compress(memory: np.ndarray, used: int, compression: str) -> list[tuple[int, int]]:
    """Compress the first bytes of a slot into the rest of it, piece by piece; return the pieces as (start, size).

    Return no pieces if compression does not make the batches smaller, or the slot has no room.
    """
    codec = codec_of(compression)
    pieces: list[tuple[int, int]] = []
    end = used
    for start in range(0, used, CHUNK_BYTES):
        packed = codec.compress(memory[start : min(start + CHUNK_BYTES, used)].data)
        pieces.append((end, len(packed)))
        end += len(packed)
        if end >= min(2 * used, len(memory)):
            return []
        memory[end - len(packed) : end] = np.frombuffer(packed, np.uint8)
    return pieces
