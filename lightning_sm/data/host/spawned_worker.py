"""Workers that are not forks, for loaders with ``multiprocessing_context="spawn"`` or ``"forkserver"``.

multiprocessing starts them: each is a new interpreter, imports the user's script as ``__mp_main__`` and unpickles the
source itself. What a library has started in the script or in the dataset of the main process is not missing there.
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
from lightning_sm.data.ipc.processes import run_and_exit
from lightning_sm.data.ipc.ring import InheritedDescriptor, Ring
from lightning_sm.data.protocol.openings import StreamWorker


def spawn_worker(
    snapshot: int, stream: StreamWorker | None, place: WorkerPlace, ring: Ring, notes: WorkerNotes
) -> tuple[int, Callable[[], int], MessageSocket]:
    """Start a worker; return its process id, what waits for it and returns its exit status, and the connection to it.

    Args:
        snapshot: The descriptor of the source's memory.
        stream: The worker of a stream that it is; None: the dataset is indexed.
        place: The worker.
        ring: Its ring.
        notes: Its notes.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs:
        load = partial(_load, InheritedDescriptor(snapshot), stream, place)
        # A daemon, as a worker of DataLoader: multiprocessing starts no processes in it.
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=_run, args=(theirs, ring, load, notes), daemon=True)
        process.start()

    def wait_for() -> int:
        process.join()  # not waitpid: multiprocessing may have reaped it, as it started another
        return cast(int, process.exitcode)

    return cast(int, process.pid), wait_for, MessageSocket(ours)


def _load(snapshot: int, stream: StreamWorker | None, place: WorkerPlace) -> Builder:
    return builder_of(load_from_trainers(snapshot, "a dataset of the trainers"), stream, place)


def _run(sock: socket.socket, ring: Ring, load: Callable[[], Builder], notes: WorkerNotes) -> None:
    show_log_lines()
    show_world_of_one()
    run_and_exit(partial(run_worker, MessageSocket(sock), ring, load, notes))
