"""Python processes that the data service starts, and how they end."""

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

from lightning_sm._linux import end_with_parent

# malloc.h: M_MMAP_THRESHOLD, of which glibc takes no more than 32 MiB; M_TRIM_THRESHOLD; M_TOP_PAD.
_MALLOPT = ((-3, 32 << 20), (-1, 128 << 20), (-2, 16 << 20))


def with_import_path() -> dict[str, str]:
    """Return an environment in which a new interpreter finds the same modules as this one."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


def keep_freed_memory() -> None:
    """Let the allocator keep what was freed; without effect where the C library has no ``mallopt``.

    glibc returns large blocks to the system as soon as they are freed, and the next batch pays for new ones with page
    faults, which cost more than the copy: without this, receiving takes 1.6 times as long, collating 3 times.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in _MALLOPT:
            mallopt(parameter, value)


def ending(status: int) -> str:
    """Tell how a process ended.

    Args:
        status: Exit code, or minus the number of the signal.
    """
    if status >= 0:
        return f"ended with exit code {status}"
    name = signal.Signals(-status).name
    return f"was killed by {name}" + (" (out of memory?)" if status == -signal.SIGKILL else "")


def in_fork(function: Callable[[], Any]) -> Any:
    """Return what a function returns, called in a fork of this process: objects that it changes stay as they are here.

    Args:
        function: What to call; its result is pickled.

    Raises:
        Exception: What the function raised.
        ChildProcessError: The fork was killed.
    """
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            end_with_parent()
            outcome: tuple[Any, Exception | None]
            try:
                outcome = function(), None
            except Exception as error:  # noqa: BLE001  # it is raised in the parent
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
        raise ChildProcessError(f"a fork of this process {ending(status)} before it had a result")
    result, problem = pickle.loads(data)  # noqa: S301  # from a copy of this very process
    if problem is not None:
        raise problem
    return result


def end_with_any_thread() -> None:
    """Let an exception in any thread end the process: its starter notices that, but never a thread that is missing."""

    def leave(failed: Any) -> None:
        if failed.exc_type is not SystemExit:
            traceback.print_exception(failed.exc_value)
            sys.stderr.flush()
            os._exit(1)

    threading.excepthook = leave


def run_and_leave(main: Callable[[], None]) -> NoReturn:
    """Run a process, and leave without waiting for threads or for the interpreter to tidy up.

    Calls of gRPC whose other side is gone may still have threads; freeing all that torch made takes a second.

    Args:
        main: What the main thread does.
    """
    code = 1
    keep_freed_memory()
    try:
        main()
        code = 0
    except BaseException:  # noqa: BLE001  # it is printed, and the exit code tells
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
    raise AssertionError  # os._exit never returns
