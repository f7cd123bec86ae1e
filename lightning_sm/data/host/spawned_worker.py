"""Spawned workers, for loaders with ``multiprocessing_context="spawn"`` or ``"forkserver"``.

multiprocessing starts each one as a new interpreter, which imports the user's script as ``__mp_main__`` and unpickles
the source. Threads that libraries start in the process therefore run in the worker; a forked worker would have none.
"""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable
from functools import partial
from typing import cast

from lightning_sm._log import show_log_lines
from lightning_sm.data.host.snapshot import load_from_trainers
from lightning_sm.data.host.source_builder import Builder, WorkerPlace, builder_of
from lightning_sm.data.host.worker import run_worker
from lightning_sm.data.host.worker_notes import WorkerNotes
from lightning_sm.data.host.world import show_world_of_one
from lightning_sm.data.ipc.messages import MessageSocket
from lightning_sm.data.ipc.processes import InheritedDescriptor, run_and_exit
from lightning_sm.data.ipc.ring import Ring
from lightning_sm.data.protocol.openings import StreamWorker


def spawn_worker(
    snapshot: int, stream: StreamWorker | None, place: WorkerPlace, ring: Ring, notes: WorkerNotes
) -> tuple[int, Callable[[], int], MessageSocket]:
    """Start a worker, and return its process id, a function that waits for its exit status, and the connection to it.

    Args:
        snapshot: Descriptor of the source's memory.
        stream: The ``DataLoader`` worker that this worker acts as; None if the dataset is indexed.
        place: Place of the worker.
        ring: The worker's ring.
        notes: The worker's notes.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs:
        load = partial(_load, InheritedDescriptor(snapshot), stream, place)
        # A daemon, like a DataLoader worker: multiprocessing lets it start no processes of its own.
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=_run, args=(theirs, ring, load, notes), daemon=True)
        process.start()

    def wait_for() -> int:
        process.join()  # not waitpid: multiprocessing may have reaped it while starting another process
        return cast(int, process.exitcode)

    return cast(int, process.pid), wait_for, MessageSocket(ours)


def _load(snapshot: int, stream: StreamWorker | None, place: WorkerPlace) -> Builder:
    return builder_of(load_from_trainers(snapshot, "a dataset from the trainers"), stream, place)


def _run(sock: socket.socket, ring: Ring, load: Callable[[], Builder], notes: WorkerNotes) -> None:
    show_log_lines()
    show_world_of_one()
    run_and_exit(partial(run_worker, MessageSocket(sock), ring, load, notes))
