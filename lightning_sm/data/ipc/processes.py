"""Helpers for starting, forking and exiting the data service's Python processes."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing.process
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.reduction import DupFd
from operator import methodcaller
from typing import Any, NoReturn

from lightning_sm._linux import require_linux
from lightning_sm._log import show_log_lines
from lightning_sm.data.ipc.messages import MessageSocket
from lightning_sm.errors import DataServiceError
from lightning_sm.job.hash_seed import hash_seed

# malloc.h: M_MMAP_THRESHOLD (glibc accepts at most 32 MiB), M_TRIM_THRESHOLD, M_TOP_PAD.
_MALLOPT = ((-3, 32 << 20), (-1, 128 << 20), (-2, 16 << 20))


def start_module(module: str, *fds: int) -> tuple[subprocess.Popen[bytes], MessageSocket]:
    """Run a module in a new process, and return the process and the connection to it.

    The module's arguments are the numbers of the descriptors that it inherits: its end of the connection, then ``fds``.

    Raises:
        NeedsLinuxError: This system is not Linux.
        DataServiceError: A process that multiprocessing has spawned is importing the user's script.
    """
    # multiprocessing refuses to start processes if this flag is set.
    if getattr(multiprocessing.process.current_process(), "_inheriting", False):
        raise DataServiceError(
            "Your script starts training or a data host while a spawned worker imports it. Put that code under "
            '`if __name__ == "__main__":`, as multiprocessing_context="spawn" always requires.'
        )
    # Only Linux has anonymous memory files and process handles (memfd, pidfd).
    require_linux("The data service", "Pass the DataModule directly to the Trainer, or run in a Linux container.")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    # The new interpreter must find the same modules as this one.
    python_path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    env = {**os.environ, **hash_seed(os.environ), "PYTHONPATH": python_path}
    with theirs:
        inherited = (theirs.fileno(), *fds)
        process = subprocess.Popen([sys.executable, "-m", module, *map(str, inherited)], pass_fds=inherited, env=env)
    return process, MessageSocket(ours)


def connection_to_parent() -> MessageSocket:
    """Prepare a process that ``start_module`` has started, and return its end of the connection.

    Ctrl-C and SIGTERM go to the whole process group. The parent decides what they mean; this process exits when the
    parent closes the connection.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    exit_when_a_thread_fails()
    show_log_lines()
    return MessageSocket(socket.socket(fileno=int(sys.argv[1])))


def keep_freed_memory() -> None:
    """Make the allocator keep freed memory, if the C library has ``mallopt``.

    glibc returns large blocks to the system as soon as they are freed. The next batch then needs new blocks, whose page
    faults cost more than the copy: receiving takes 1.6 times as long, and collating 3 times as long.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in _MALLOPT:
            mallopt(parameter, value)


class InheritedDescriptor(int):
    """A descriptor that a process spawned by multiprocessing inherits, and unpickles as an int."""

    def __reduce__(self) -> tuple[Any, ...]:
        return methodcaller("detach"), (DupFd(int(self)),)


def describe_exit(status: int) -> str:
    """Return how a process exited, as a predicate such as "was killed by SIGSEGV".

    Args:
        status: Exit code, or the negated signal number.
    """
    if status >= 0:
        return f"exited with code {status}"
    name = signal.Signals(-status).name
    return f"was killed by {name}" + (" (out of memory?)" if status == -signal.SIGKILL else "")


def exit_when_a_thread_fails() -> None:
    """Exit when any thread raises: the parent notices when a process exits, but not when a thread does."""

    def exit_process(failed: Any) -> None:
        if failed.exc_type is not SystemExit:
            traceback.print_exception(failed.exc_value)
            sys.stderr.flush()
            os._exit(1)

    threading.excepthook = exit_process


def run_and_exit(main: Callable[[], None]) -> NoReturn:
    """Run a process's main function, and exit without waiting for threads or the interpreter's cleanup.

    gRPC calls whose peer has disconnected may still have threads, and freeing everything that torch allocated takes a
    second.
    """
    code = 1
    keep_freed_memory()
    try:
        main()
        code = 0
    except BaseException:  # noqa: BLE001  # it is printed, and the exit code is 1
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        _flush()
        os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
