"""A process that has loaded torch and forks data hosts, because a new interpreter takes seconds for each test."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys

from lightning_sm.data.ipc.messages import MessageSocket
from lightning_sm.data.ipc.processes import fork, run_and_exit


class Forked:
    """A child of the zygote, with what a ``DataHost`` uses of ``subprocess.Popen``.

    Args:
        pid: Process id.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has exited; the exit code is the zygote's to know."""
        if not select.select([self._pidfd], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("data host", timeout or 0.0)
        return 0

    def kill(self) -> None:
        """End it."""
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


class Zygote:
    """Starts data hosts by forking."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.lightning_suite.zygote", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            )
        self._socket = MessageSocket(ours)

    def start_module(self, module: str) -> tuple[Forked, MessageSocket]:
        """Run the main process of a data host, like ``lightning_sm.data.ipc.processes.start_module``."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            self._socket.send("fork", fds=(theirs.fileno(),), module=module, path=sys.path, cwd=os.getcwd())
            message = self._socket.receive(60.0)
        if message is None:
            raise RuntimeError(f"the zygote exited with code {self._process.wait()}")
        return Forked(message.facts["pid"]), MessageSocket(ours)

    def close(self) -> None:
        """Stop forking."""
        self._socket.close()
        self._process.wait(30.0)


def main() -> None:
    """Fork a data host for each message, until the other end is closed."""
    import pytorch_lightning  # noqa: F401  # what DataModules need

    from lightning_sm.data.host import main_process

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    requests = MessageSocket(socket.socket(fileno=int(sys.argv[1])))
    while (message := requests.receive()) is not None:
        descriptor = message.fds[0]

        def run(descriptor: int = descriptor, facts: dict[str, object] = message.facts) -> None:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            requests.close()
            os.chdir(str(facts["cwd"]))
            sys.path[:] = facts["path"]  # type: ignore[assignment]
            sys.argv = ["main_process", str(descriptor)]
            run_and_exit(main_process.main)

        pid = fork(run)
        os.close(descriptor)
        requests.send("forked", pid=pid)


if __name__ == "__main__":
    main()
