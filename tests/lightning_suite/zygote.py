"""A process that has loaded everything and forks the processes of data hosts and feeders.

Starting their interpreters would take most of the time of a thousand small tests.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from lightning_sm.data.ipc.messages import Message, MessageSocket
from lightning_sm.data.ipc.processes import fork, run_and_exit

_FORK_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class _Fork(Message):
    module: str
    path: list[str]
    cwd: str
    fds: tuple[int, ...]


@dataclass(frozen=True)
class _Child(Message):
    pid: int


class Forked:
    """A process that was forked, with what its user needs of ``subprocess.Popen``.

    Args:
        pid: Process id.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._pidfd = os.pidfd_open(pid)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has exited; the exit code is its parent's to know."""
        if not select.select([self._pidfd], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("fork", timeout or 0.0)
        return 0

    def kill(self) -> None:
        """End it."""
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


class Zygote:
    """Starts processes by forking."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.lightning_suite.zygote", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            )
        self._socket = MessageSocket(ours)

    def start_module(self, module: str, *fds: int) -> tuple[Forked, MessageSocket]:
        """Run a module, like ``lightning_sm.data.ipc.processes.start_module``."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            self._socket.send(_Fork(module, sys.path, os.getcwd(), (theirs.fileno(), *fds)))
            message = self._socket.receive(_FORK_TIMEOUT_S)
        if isinstance(message, _Child):
            return Forked(message.pid), MessageSocket(ours)
        raise RuntimeError(f"the zygote exited with code {self._process.wait()}")

    def close(self) -> None:
        """Stop forking."""
        self._socket.close()
        self._process.wait(30.0)


def _start_child(module: str, *fds: int) -> tuple[Forked, MessageSocket]:
    """Run a module in a fork of this process, in place of ``start_module``."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)

    def run() -> None:
        ours.close()
        # As after an exec.
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        _run_module(module, theirs.fileno(), *fds)

    with theirs:
        return Forked(fork(run)), MessageSocket(ours)


def _run_module(module: str, *fds: int) -> None:
    sys.argv = [module, *map(str, fds)]
    run_and_exit(importlib.import_module(module).main)


def main() -> None:
    """Fork a process for each message, until the other end is closed."""
    import pytorch_lightning  # noqa: F401  # what DataModules need

    # gRPC does not survive a fork once it has been used; here it only is loaded.
    from lightning_sm.data.feeder import process  # noqa: F401
    from lightning_sm.data.host import main_process
    from lightning_sm.data.server import process as server_process  # noqa: F401

    main_process.start_module = _start_child  # type: ignore[assignment]  # what it uses of Popen
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.collect()
    gc.freeze()  # else the first collection in each fork copies what they share
    requests = MessageSocket(socket.socket(fileno=int(sys.argv[1])))
    while isinstance(message := requests.receive(), _Fork):
        pid = fork(_task(requests, message))
        for descriptor in message.fds:
            os.close(descriptor)
        requests.send(_Child(pid))


def _task(requests: MessageSocket, wanted: _Fork) -> Callable[[], None]:
    def run() -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        requests.close()
        os.chdir(wanted.cwd)
        sys.path[:] = wanted.path
        _run_module(wanted.module, *wanted.fds)

    return run


if __name__ == "__main__":
    main()
