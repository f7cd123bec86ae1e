"""Helpers for the Python processes of the data service: how they start, fork and exit."""

from __future__ import annotations

import atexit
import ctypes
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from lightning_sm._linux import kill_with_parent

# malloc.h: M_MMAP_THRESHOLD, of which glibc takes no more than 32 MiB; M_TRIM_THRESHOLD; M_TOP_PAD.
_MALLOPT = ((-3, 32 << 20), (-1, 128 << 20), (-2, 16 << 20))


def with_import_path() -> dict[str, str]:
    """Return an environment in which a new interpreter finds the same modules as this one."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


def keep_freed_memory() -> None:
    """Make the allocator keep freed memory; no effect where the C library has no ``mallopt``.

    glibc returns large blocks to the system as soon as they are freed. The next batch then needs new ones, whose page
    faults cost more than the copy: without this, receiving takes 1.6 times as long and collating 3 times.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in _MALLOPT:
            mallopt(parameter, value)


def describe_exit(status: int) -> str:
    """Return how a process exited, as a predicate: "was killed by SIGSEGV".

    Args:
        status: Exit code, or minus the number of the signal.
    """
    if status >= 0:
        return f"exited with code {status}"
    name = signal.Signals(-status).name
    return f"was killed by {name}" + (" (out of memory?)" if status == -signal.SIGKILL else "")


def in_fork(function: Callable[[], Any]) -> Any:
    """Call a function in a fork, so that it changes no object of this process, and return its pickled result.

    Raises:
        Exception: The function raised it.
        ChildProcessError: The fork was killed.
    """
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            kill_with_parent()
            outcome: tuple[Any, Exception | None]
            try:
                outcome = function(), None
            except Exception as error:  # noqa: BLE001  # the parent raises it
                outcome = None, error
            with os.fdopen(writable, "wb") as pipe:
                pickle.dump(outcome, pipe)
        finally:
            os._exit(0)
    os.close(writable)
    with os.fdopen(readable, "rb") as pipe:
        data = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status or not data:
        raise ChildProcessError(f"a fork of this process {describe_exit(status)} before it returned a result")
    result, problem = pickle.loads(data)  # noqa: S301  # from a fork of this process
    if problem is not None:
        raise problem
    return result


def exit_when_a_thread_fails() -> None:
    """Exit when any thread raises: the parent notices a process that has exited, but not one that lacks a thread."""

    def exit_process(failed: Any) -> None:
        if failed.exc_type is not SystemExit:
            traceback.print_exception(failed.exc_value)
            sys.stderr.flush()
            os._exit(1)

    threading.excepthook = exit_process


def run_and_exit(main: Callable[[], None]) -> NoReturn:
    """Run the main function of a process, and exit without waiting for threads or the interpreter's cleanup.

    gRPC calls whose other side is gone may still have threads, and freeing everything that torch allocated takes a
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
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
    raise AssertionError  # os._exit never returns
