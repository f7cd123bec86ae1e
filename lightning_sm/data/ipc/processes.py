"""Helpers for the Python processes of the data service: how they start, fork and exit."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import multiprocessing.process
import os
import pickle
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from lightning_sm._linux import kill_with_parent, require_linux
from lightning_sm._log import show_log_lines
from lightning_sm.data.ipc.messages import MessageSocket
from lightning_sm.errors import DataServiceError
from lightning_sm.job.hash_seed import hash_seed

_MAX_STACK_BYTES = 1 << 16
# A fork that was told to abort gets this long to write its stacks.
_ABORT_S = 5.0

# malloc.h: M_MMAP_THRESHOLD, of which glibc takes no more than 32 MiB; M_TRIM_THRESHOLD; M_TOP_PAD.
_MALLOPT = ((-3, 32 << 20), (-1, 128 << 20), (-2, 16 << 20))


def start_module(module: str, *fds: int) -> tuple[subprocess.Popen[bytes], MessageSocket]:
    """Run a module in a new process, and return the process and the connection to it.

    The arguments of the module are numbers of descriptors that it inherits: its end of the connection, and ``fds``.

    Raises:
        NeedsLinuxError: This system is not Linux.
        DataServiceError: A process that multiprocessing or a data host has spawned is importing the user's script.
    """
    # The flag by which multiprocessing refuses to start processes itself.
    if getattr(multiprocessing.process.current_process(), "_inheriting", False):
        raise DataServiceError(
            "The script starts a training or a data host while a spawned worker imports it. Put what starts "
            'anything under `if __name__ == "__main__":`, as multiprocessing_context="spawn" needs it everywhere.'
        )
    # For memory without a name, and for handles of processes (memfd, pidfd).
    require_linux("The data service", "Pass the DataModule to the Trainer itself, or run in a Linux container.")
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


def fork(target: Callable[[], None]) -> int:
    """Run a function in a fork, and return the process id. The fork exits with code 1 if the function raises."""
    _flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        target()
        code = 0
    except BaseException:  # noqa: BLE001  # a fork must never return into its parent's code
        traceback.print_exc()
    finally:
        _flush()
        os._exit(code)


def prepare_to_abort(stacks: int) -> None:
    """Let SIGABRT write the stacks of all threads of this process to a file, even if it hangs, and dump no core.

    Args:
        stacks: Descriptor of the file.
    """
    # Where it is enabled already, enable() changes the file only, although a Trainer that has ended has reset handlers.
    faulthandler.disable()
    faulthandler.enable(stacks)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def stacks_in(stacks: int) -> str:
    """Return the stacks that a process has written to a file, given by its descriptor."""
    text = os.pread(stacks, _MAX_STACK_BYTES, 0).decode(errors="replace").rstrip()
    return f"It stood at:\n{text}" if text else "It did not say where it stood."


def in_fork(function: Callable[[], Any], timeout_s: float | None = None) -> Any:
    """Call a function in a fork, so that it changes no object of this process, and return its pickled result.

    Args:
        function: The function.
        timeout_s: Seconds that it may take; None: any time.

    Raises:
        Exception: The function raised it.
        TimeoutError: It took longer; the error says at which lines it stood.
        ChildProcessError: The fork was killed, or could not pickle the result.
    """
    # Not a pipe: a process that the function starts may hold its other end open.
    with _memory() as result, _memory() as stacks:
        return _in_fork(function, timeout_s, result, stacks)


def _in_fork(function: Callable[[], Any], timeout_s: float | None, result: int, stacks: int) -> Any:
    def run() -> None:
        kill_with_parent()
        prepare_to_abort(stacks)
        outcome: tuple[Any, Exception | None]
        try:
            outcome = function(), None
        except Exception as error:  # noqa: BLE001  # the parent raises it
            outcome = None, error
        with os.fdopen(os.dup(result), "wb") as file:
            pickle.dump(outcome, file)

    pid = fork(run)
    is_late = not _exits_within(pid, timeout_s)
    for signum in (signal.SIGABRT, signal.SIGKILL) if is_late else ():
        os.kill(pid, signum)
        if _exits_within(pid, _ABORT_S):
            break
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if is_late:
        raise TimeoutError(stacks_in(stacks))
    if status:
        raise ChildProcessError(f"a fork of this process {describe_exit(status)} before it returned a result")
    os.lseek(result, 0, os.SEEK_SET)
    with os.fdopen(os.dup(result), "rb") as file:
        value, problem = pickle.load(file)  # noqa: S301  # from a fork of this process
    if problem is not None:
        raise problem
    return value


def _exits_within(pid: int, timeout_s: float | None) -> bool:
    pidfd = os.pidfd_open(pid)
    try:
        exits = select.poll()
        exits.register(pidfd, select.POLLIN)
        return bool(exits.poll(None if timeout_s is None else 1000 * timeout_s))
    finally:
        os.close(pidfd)


@contextlib.contextmanager
def _memory() -> Iterator[int]:
    fd = os.memfd_create("lightning_sm_fork", os.MFD_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


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
        _flush()
        os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
