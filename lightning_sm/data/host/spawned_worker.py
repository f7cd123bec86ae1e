"""Workers that are no forks, for loaders with ``multiprocessing_context="spawn"`` or ``"forkserver"``.

Each is a new interpreter: ``python -m lightning_sm.data.host.spawned_worker``. As in multiprocessing, it imports the
user's script under the name ``__mp_main__`` and gets the source by pickle, so a library that starts threads in
``setup()`` or on import is intact there.
"""

from __future__ import annotations

import multiprocessing.process
import multiprocessing.spawn
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from functools import partial
from typing import Any

from lightning_sm._linux import kill_with_parent
from lightning_sm._log import show_log_lines
from lightning_sm.data.host.pickler import pickle_object
from lightning_sm.data.host.snapshot import load_object
from lightning_sm.data.host.source import WorkerSource
from lightning_sm.data.host.source_builder import builder_of
from lightning_sm.data.host.worker import Builder, WorkerPlace, run_worker
from lightning_sm.data.host.worker_notes import WorkerNotes
from lightning_sm.data.host.world import world_of_one
from lightning_sm.data.ipc.host_messages import StartWorker
from lightning_sm.data.ipc.messages import MessageSocket
from lightning_sm.data.ipc.processes import run_and_exit, start_module
from lightning_sm.data.ipc.ring import Ring
from lightning_sm.data.protocol.openings import StreamWorker

_MODULE = "lightning_sm.data.host.spawned_worker"
# What multiprocessing tells a process that it spawns, as far as it applies here.
_PREPARATION = ("sys_path", "sys_argv", "dir", "init_main_from_name", "init_main_from_path")


class SpawnedSource:
    """A source for workers that are no forks.

    Args:
        source: The source.
        fd: The source, as trainers have pickled it.
        stream: The worker of a stream that they are; None: the dataset is indexed.
        host: Name of the data host.
        num_workers: Workers on the host.

    Raises:
        DataSettingsError: It has been made on this data host, and cannot be pickled.
    """

    def __init__(self, source: WorkerSource, fd: int, stream: StreamWorker | None, host: str, num_workers: int) -> None:
        self._stream, self._host, self._num_workers = stream, host, num_workers
        if not source.has_parts:
            self._fd = os.dup(fd)
            return
        method = source.start_method
        pickled = pickle_object(
            replace(source, has_parts=False),
            by_name=_imports_script(_preparation()),
            named={f"{source.name}.{name}": part for name, part in source.parts().items()},
            advice=f"With multiprocessing_context={method!r}, each worker of a data host is a new process that gets "
            "the dataset by pickle. Create this object in the worker (in __getitem__, or in worker_init_fn), leave it "
            "out in __getstate__, or remove multiprocessing_context from the DataLoader.",
        )
        self._fd = pickled.write()

    def start_worker(
        self, number: int, ring: Ring, notes: WorkerNotes
    ) -> tuple[subprocess.Popen[bytes], MessageSocket]:
        """Start a worker, and return it and the connection to it.

        Args:
            number: Number of the worker on the host.
            ring: Its ring.
            notes: Its notes.
        """
        process, sock = start_module(_MODULE)
        sock.send(
            StartWorker(
                host=self._host,
                number=number,
                num_workers=self._num_workers,
                num_slots=ring.num_slots,
                slot_bytes=ring.slot_bytes,
                preparation=_preparation(),
                stream=self._stream,
                fds=(ring.fd, notes.fd, self._fd),
            )
        )
        return process, sock

    def close(self) -> None:
        """Release the memory."""
        os.close(self._fd)


def _preparation() -> dict[str, Any]:
    everything = multiprocessing.spawn.get_preparation_data("worker")
    return {name: everything[name] for name in _PREPARATION if name in everything}


def _imports_script(preparation: dict[str, Any]) -> bool:
    """Return whether multiprocessing imports the script in a new process."""
    name = preparation.get("init_main_from_name", "")
    return "init_main_from_path" in preparation or bool(name and not name.endswith("__main__"))


def _load(start: StartWorker, fd: int) -> Builder:
    """Import the user's script, and return what builds the batches."""
    # As in multiprocessing: a script that starts anything without a guard gets an error.
    current: Any = multiprocessing.process.current_process()
    current._inheriting = True
    try:
        multiprocessing.spawn.prepare(start.preparation)
    finally:
        del current._inheriting
    source: WorkerSource = load_object(fd)
    os.close(fd)
    return builder_of(source, start.stream, WorkerPlace(start.host, start.number, start.num_workers))


def main() -> None:
    """Run a worker; the argument is the descriptor of the connection, on which the main process describes the work."""
    kill_with_parent()
    # Ctrl-C and the launcher's SIGTERM go to the whole process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    show_log_lines()
    requests = MessageSocket(socket.socket(fileno=int(sys.argv[1])))
    start = requests.receive()
    if not isinstance(start, StartWorker):
        return
    ring, notes, pickled = start.fds
    with world_of_one():
        run_worker(
            requests,
            Ring(ring, start.num_slots, start.slot_bytes),
            partial(_load, start, pickled),
            WorkerNotes(notes),
        )


if __name__ == "__main__":
    run_and_exit(main)
