"""Spawned workers, for loaders with ``multiprocessing_context="spawn"`` or ``"forkserver"``.

multiprocessing starts each one as a new interpreter, which imports the user's script as ``__mp_main__`` and unpickles
the source. Threads that libraries start in the process therefore run in the worker; a forked worker would have none.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial

from lightning_sm._log import show_log_lines
from lightning_sm.data.host.snapshot import load_from_trainers
from lightning_sm.data.host.source_builder import Builder, WorkerPlace, builder_of
from lightning_sm.data.host.worker import run_worker
from lightning_sm.data.host.worker_notes import WorkerNotes
from lightning_sm.data.host.world import show_world_of_one
from lightning_sm.data.ipc.messages import MessageSocket
from lightning_sm.data.ipc.processes import run_and_exit
from lightning_sm.data.ipc.ring import Ring
from lightning_sm.data.protocol.openings import StreamWorker


def load_builder(snapshot: int, stream: StreamWorker | None, place: WorkerPlace, notes: WorkerNotes) -> Builder:
    """Unpickle a source, and return the batch builder for a worker.

    Args:
        snapshot: Descriptor of the source's memory.
        stream: The ``DataLoader`` worker that this worker acts as; None if the dataset is indexed.
        place: Place of the worker.
        notes: The worker's notes.
    """
    return builder_of(load_from_trainers(snapshot, "a dataset from the trainers"), stream, place, notes)


def run_spawned_worker(
    requests: socket.socket, ring: Ring, load: Callable[[WorkerNotes], Builder], notes: WorkerNotes
) -> None:
    """Run ``run_worker`` in a process that multiprocessing has spawned, with the same arguments."""
    show_log_lines()
    show_world_of_one()
    run_and_exit(partial(run_worker, MessageSocket(requests), ring, load, notes))
