"""Workers that are no forks, for loaders with ``multiprocessing_context="spawn"`` or ``"forkserver"``.

Each is a new interpreter: ``python -m lightning_sm.data.host.spawned_worker``. As in multiprocessing, it imports the
user's script under the name ``__mp_main__`` and gets the loaders by pickle, so a library that starts threads in
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
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

from lightning_sm._linux import kill_with_parent
from lightning_sm._log import show_log_lines
from lightning_sm.data.batch.types import register_batch_type, registered_types
from lightning_sm.data.host.loader import ServedLoader
from lightning_sm.data.host.pickler import pickle_object
from lightning_sm.data.host.snapshot import load_object
from lightning_sm.data.host.trainer_stand_in import stand_in
from lightning_sm.data.host.worker import run_worker
from lightning_sm.data.host.worker_notes import WorkerNotes
from lightning_sm.data.host.world import world_of_one
from lightning_sm.data.ipc.host_messages import StartWorker
from lightning_sm.data.ipc.messages import MessageSocket
from lightning_sm.data.ipc.processes import run_and_exit, start_module
from lightning_sm.data.ipc.ring import Ring

_MODULE = "lightning_sm.data.host.spawned_worker"
# What multiprocessing tells a process that it spawns, as far as it applies here.
_PREPARATION = ("sys_path", "sys_argv", "dir", "init_main_from_name", "init_main_from_path")


class PickledLoaders:
    """The loaders of one request, pickled once, in memory that all their workers share until they write to it.

    Args:
        opening: Name of the request.
        loaders: The loaders.
        host: Name of the data host.
        num_workers: Workers on the host.

    Raises:
        DataSettingsError: They cannot be pickled.
    """

    def __init__(self, opening: str, loaders: Sequence[ServedLoader], host: str, num_workers: int) -> None:
        everything = multiprocessing.spawn.get_preparation_data("worker")
        self._preparation = {name: everything[name] for name in _PREPARATION if name in everything}
        methods = {loader.start_method for loader in loaders} - {"fork"}
        pickled = pickle_object(
            (registered_types(), stand_in().values(), {opening: list(loaders)}),
            by_name=_imports_script(self._preparation),
            named={
                f"{loader.description.name}.{name}": part
                for loader in loaders
                for name, part in loader.worker_parts().items()
            },
            advice=f"With multiprocessing_context={min(methods)!r}, each worker of a data host is a new process that "
            "gets all loaders of the hook by pickle. Create this object in the worker (in __getitem__, or in "
            "worker_init_fn), leave it out in __getstate__, or remove multiprocessing_context from the DataLoader.",
        )
        self._opening, self._host, self._num_workers = opening, host, num_workers
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
                opening=self._opening,
                host=self._host,
                number=number,
                num_workers=self._num_workers,
                num_slots=ring.num_slots,
                slot_bytes=ring.slot_bytes,
                preparation=self._preparation,
                fds=(ring.fd, notes.fd, self._fd),
            )
        )
        return process, sock

    def close(self) -> None:
        """Release the memory."""
        os.close(self._fd)


def _imports_script(preparation: dict[str, Any]) -> bool:
    """Return whether multiprocessing imports the script in a new process."""
    name = preparation.get("init_main_from_name", "")
    return "init_main_from_path" in preparation or bool(name and not name.endswith("__main__"))


def _load(preparation: dict[str, Any], fd: int) -> dict[str, list[ServedLoader]]:
    """Import the user's script, and return the loaders."""
    # As in multiprocessing: a script that starts anything without a guard gets an error.
    current: Any = multiprocessing.process.current_process()
    current._inheriting = True
    try:
        multiprocessing.spawn.prepare(preparation)
    finally:
        del current._inheriting
    types, trainer, loaders = load_object(fd)
    os.close(fd)
    for cls, batch_type in types.items():
        register_batch_type(cls, batch_type.to_parts, batch_type.from_parts, name=batch_type.name)
    stand_in().update(trainer)
    return cast("dict[str, list[ServedLoader]]", loaders)


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
            partial(_load, start.preparation, pickled),
            WorkerNotes(notes),
            host=start.host,
            worker_id=start.number,
            num_workers=start.num_workers,
        )


if __name__ == "__main__":
    run_and_exit(main)
