"""Workers that are no forks, for loaders with ``multiprocessing_context="spawn"`` or ``"forkserver"``.

Each is a new interpreter: ``python -m lightning_sm.data.host.spawned_worker``. As in multiprocessing, it imports the
user's script under the name ``__mp_main__`` and gets the loaders by pickle, so a library that starts threads in
``setup()`` or on import is intact there.
"""

from __future__ import annotations

import mmap
import multiprocessing.process
import multiprocessing.spawn
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import cloudpickle

from lightning_sm._linux import kill_with_parent
from lightning_sm._log import show_log_lines
from lightning_sm.data.batch.types import register_batch_type, registered_types
from lightning_sm.data.host.loader import ServedLoader
from lightning_sm.data.host.sample_mark import SampleMark
from lightning_sm.data.host.trainer_stand_in import stand_in
from lightning_sm.data.host.worker import run_worker
from lightning_sm.data.host.worker_stack import WorkerStack
from lightning_sm.data.host.world import world_of_one
from lightning_sm.data.ipc.host_messages import StartWorker
from lightning_sm.data.ipc.messages import MessageSocket
from lightning_sm.data.ipc.processes import run_and_exit, start_module
from lightning_sm.data.ipc.ring import Ring
from lightning_sm.errors import DataSettingsError

# What multiprocessing tells a process that it spawns, as far as it applies here.
_PREPARATION = ("sys_path", "sys_argv", "dir", "init_main_from_name", "init_main_from_path")
_MODULE = "lightning_sm.data.host.spawned_worker"
# Of attributes within attributes, in the search for what cannot be pickled.
_MAX_DEPTH = 12


class PickledLoaders:
    """The loaders of one request, pickled once, in memory that all their workers read.

    Args:
        loaders: The loaders.

    Raises:
        DataSettingsError: They cannot be pickled.
    """

    def __init__(self, loaders: Sequence[ServedLoader]) -> None:
        self.fd = os.memfd_create("lightning_sm_loaders", os.MFD_CLOEXEC)
        everything = multiprocessing.spawn.get_preparation_data("worker")
        preparation = {name: everything[name] for name in _PREPARATION if name in everything}
        with os.fdopen(os.dup(self.fd), "wb") as file:
            pickle.dump(preparation, file)
            pickler = _LoaderPickler(file, imports_script=_imports_script(preparation))
            try:
                pickler.dump((registered_types(), stand_in().values(), list(loaders)))
            except Exception as error:
                self.close()
                raise _explain(loaders, error) from error

    def start_worker(
        self, start: StartWorker, ring: Ring, mark: SampleMark, stack: WorkerStack
    ) -> tuple[subprocess.Popen[bytes], MessageSocket]:
        """Start a worker, and return it and the connection to it."""
        process, sock = start_module(_MODULE)
        fds = (ring.fd, mark.fd, stack.fd, self.fd)
        sock.send(StartWorker(**{**vars(start), "fds": fds}))
        return process, sock

    def close(self) -> None:
        """Release the memory."""
        os.close(self.fd)


class _LoaderPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickles classes and functions of the user's script by name if the worker imports it, else by value."""

    def __init__(self, file: Any, *, imports_script: bool) -> None:
        super().__init__(file)
        self._imports_script = imports_script

    def reducer_override(self, obj: Any) -> Any:
        if self._imports_script and isinstance(obj, (type, FunctionType)) and _is_in_script(obj):
            return NotImplemented
        return super().reducer_override(obj)


def _imports_script(preparation: dict[str, Any]) -> bool:
    """Return whether multiprocessing imports the script in a new process."""
    name = preparation.get("init_main_from_name", "")
    return "init_main_from_path" in preparation or bool(name and not name.endswith("__main__"))


def _is_in_script(obj: Any) -> bool:
    if obj.__module__ != "__main__":
        return False
    found: Any = sys.modules["__main__"]
    for part in obj.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is obj


def _explain(loaders: Sequence[ServedLoader], error: Exception) -> DataSettingsError:
    """Return the error of loaders that cannot be pickled, which names the part of them that cannot."""
    methods = {loader.start_method for loader in loaders} - {"fork"}
    for loader in loaders:
        for name, part in loader.worker_parts().items():
            if not _can_pickle(part):
                return DataSettingsError(
                    f"{_culprit(part, f'{loader.description.name}.{name}')} cannot be pickled "
                    f"({type(error).__name__}: {error}). With multiprocessing_context={min(methods)!r}, each worker of "
                    "a data host is a new process that gets all loaders of the hook by pickle. Create this object in "
                    "the worker (in __getitem__, or in worker_init_fn), leave it out in __getstate__, or remove "
                    "multiprocessing_context from the DataLoader."
                )
    return DataSettingsError(f"The loaders cannot be pickled for their workers ({type(error).__name__}: {error}).")


def _can_pickle(value: Any) -> bool:
    try:
        with open(os.devnull, "wb") as file:
            _LoaderPickler(file, imports_script=False).dump(value)
    except Exception:  # noqa: BLE001  # whatever the user's __reduce__ raises
        return False
    return True


def _culprit(value: Any, path: str, depth: int = 0) -> str:
    """Return the path of the innermost part of an object that cannot be pickled, and its class."""
    for name, part in _parts(value):
        if depth < _MAX_DEPTH and not _can_pickle(part):
            return _culprit(part, f"{path}{name}", depth + 1)
    return f"{path} (a {type(value).__name__})"


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif isinstance(value, MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        yield from ((f"'s {name}", cell.cell_contents) for name, cell in cells)
    else:
        try:
            state = value.__reduce_ex__(4)[2]
        except Exception:  # noqa: BLE001  # it has no parts, and is the culprit itself
            return
        if isinstance(state, dict):
            yield from ((f".{name}", part) for name, part in state.items())


def _load(fd: int, opening: str) -> dict[str, list[ServedLoader]]:
    """Import the user's script, and return the loaders."""
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as memory:
        preparation = pickle.load(memory)  # noqa: S301  # of the main process
        # As in multiprocessing: a script that starts anything without a guard gets an error.
        current: Any = multiprocessing.process.current_process()
        current._inheriting = True
        try:
            multiprocessing.spawn.prepare(preparation)
        finally:
            del current._inheriting
        types, trainer, loaders = pickle.load(memory)  # noqa: S301
    os.close(fd)
    for cls, batch_type in types.items():
        register_batch_type(cls, batch_type.to_parts, batch_type.from_parts, name=batch_type.name)
    stand_in().update(trainer)
    return {opening: loaders}


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
    ring, mark, stack, pickled = start.fds
    with world_of_one():
        run_worker(
            requests,
            Ring(ring, start.num_slots, start.slot_bytes),
            partial(_load, pickled, start.opening),
            SampleMark(mark),
            WorkerStack(stack),
            host=start.host,
            worker_id=start.number,
            num_workers=start.num_workers,
        )


if __name__ == "__main__":
    run_and_exit(main)
