"""A worker of a data host, which runs the user's dataset, transforms and collate function, one batch at a time.

Workers are forked from the data host's main process, as ``DataLoader`` forks its workers. The main process never loads
gRPC and has no threads, so forking it is safe. Forks share the dataset's memory and start within milliseconds. For
spawned workers, see ``spawned_worker``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import time
from collections.abc import Callable

import torch

from lightning_sm._linux import kill_with_parent
from lightning_sm.data.host.source_builder import Builder
from lightning_sm.data.host.worker_notes import WorkerNotes
from lightning_sm.data.ipc.host_messages import Build, BuildAnswer, Ready
from lightning_sm.data.ipc.messages import MessageSocket
from lightning_sm.data.ipc.ring import Ring
from lightning_sm.data.protocol.failures import Failure
from lightning_sm.data.protocol.frames import StepRangeHeader
from lightning_sm.data.protocol.spec import StreamEnd
from lightning_sm.errors import BatchTooLargeError, BatchTypeError

# A worker logs the stacks of its threads when a request takes at least this many seconds, and at least this many times
# as long as every earlier request. faulthandler does so even if native code hangs.
_LONG_S = 30.0
_LONG_FACTOR = 2.0


def run_worker(requests: MessageSocket, ring: Ring, load: Callable[[WorkerNotes], Builder], notes: WorkerNotes) -> None:
    """Serve requests until the other end of the socket is closed.

    Args:
        requests: Connection to the server process.
        ring: The slots for finished batches.
        load: Returns the batch builder, which keeps these notes.
        notes: The worker's notes for its parent.
    """
    kill_with_parent()
    # Ctrl-C and the launcher's SIGTERM go to the whole process group, but workers exit only when their socket closes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)
    builder: Builder | Failure
    longest_s = 0.0
    notes.set_text("unpickling the dataset")
    try:
        builder = load(notes)
    except BaseException as error:  # noqa: BLE001  # every request is answered with this error from the user's code
        builder = Failure.of(error, notes.place())
    notes.clear()
    with contextlib.suppress(BrokenPipeError):  # the server process died while this worker built a batch
        requests.send(Ready())
        while (request := requests.receive()) is not None:
            if not isinstance(request, Build):
                raise TypeError(f"the server process sent {request}")
            if isinstance(builder, Failure):
                requests.send(BuildAnswer(request.slot, builder))
            else:
                started = time.perf_counter()
                faulthandler.dump_traceback_later(max(_LONG_S, _LONG_FACTOR * longest_s), file=2)
                outcome = _build_range(request, ring, builder, notes)
                faulthandler.cancel_dump_traceback_later()
                longest_s = max(longest_s, time.perf_counter() - started)
                requests.send(BuildAnswer(request.slot, outcome))
                notes.clear()


def _build_range(
    request: Build, ring: Ring, builder: Builder, notes: WorkerNotes
) -> StepRangeHeader | Failure | StreamEnd:
    """Build the batches of a request, and return the outcome."""
    started = time.perf_counter()
    memory = ring.slot(request.slot)
    try:
        built = builder.build(request.encoded_spec, memory)
        if isinstance(built, StreamEnd):
            return built
    except (BatchTypeError, BatchTooLargeError) as error:
        return Failure(type(error).__name__, str(error))
    except BaseException as error:  # noqa: BLE001  # errors in the user's code, even sys.exit(), are sent to the trainer
        return Failure.of(error, notes.place())
    used = max((batch.start + batch.num_bytes for batch in built), default=0)
    return StepRangeHeader(used, 0.0, time.perf_counter() - started, built)
