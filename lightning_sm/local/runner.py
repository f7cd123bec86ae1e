"""The processes of an emulated job: start every host, show what they write, and leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import BinaryIO

import psutil
from tabulate import tabulate

from lightning_sm.local.cluster import LocalCluster, LocalHost
from lightning_sm.local.output import Output
from lightning_sm.prctl import EMULATOR_VARIABLE, adopt_orphans

# Between SIGTERM and SIGKILL. The service leaves 120 s; who waits at a terminal has decided already.
_GRACE_S = 5.0
# timeout(1) sends its signal twice, and so do wrappers that pass on what the terminal sent to all.
_ONE_SIGNAL_S = 0.5
_POLL_S = 0.1
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(cluster: LocalCluster, command: Sequence[str], *, keep: bool = False, stream: BinaryIO | None = None) -> int:
    """Run a training script on every host of an emulated job and wait for all of them.

    When a host fails, the others are stopped, as the service does. When this process is stopped, so are the hosts.

    Args:
        cluster: The hosts. Their folders are kept after a failure.
        command: Training script and its arguments.
        keep: Whether to keep the folders after success, too.
        stream: Where the output of the hosts goes. Default: stdout.

    Returns:
        0 if all hosts succeeded; else the exit code of the host that failed first; 128 + n if signal n stopped it.
    """
    output = Output(stream if stream is not None else sys.stdout.buffer, [host.name for host in cluster.hosts])
    job = _Job(cluster, command, output)
    restore = job.handle_signals()  # until the last line: a late Ctrl-C must not remove what is to be kept
    try:
        exit_code = job.run()
        cluster.keep = keep or exit_code != 0
        output.say(job.table())
        if job.first_failed is not None:
            output.say(_reason(job.first_failed))
        for line in _whereabouts(cluster, exit_code):
            output.say(line)
    finally:
        restore()
    return exit_code


class _HostProcess:
    """One running host: its launcher and the threads that read what it writes and wait for its end."""

    def __init__(self, host: LocalHost, command: Sequence[str], output: Output, changed: threading.Event) -> None:
        self.host = host
        self.ended_at: float | None = None
        self._changed = changed
        self._started_at = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lightning_sm", "train", *command],
            env={**host.env, EMULATOR_VARIABLE: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches the emulator only, which decides the order
        )
        self.reader = threading.Thread(target=output.copy, args=(host, self.process.stdout), daemon=True)
        self.reader.start()
        self.waiter = threading.Thread(target=self._wait, daemon=True)
        self.waiter.start()

    @property
    def exit_code(self) -> int | None:
        """128 + n if signal n killed it; None while the host runs."""
        code = self.process.returncode if self.ended_at is not None else None
        return 128 - code if code is not None and code < 0 else code

    @property
    def seconds(self) -> float:
        """How long the host ran."""
        return (self.ended_at or time.monotonic()) - self._started_at

    def _wait(self) -> None:
        # One thread per host: when several fail at nearly the same time, the first one has the reason.
        self.process.wait()
        self.ended_at = time.monotonic()
        self._changed.set()


class _Job:
    def __init__(self, cluster: LocalCluster, command: Sequence[str], output: Output) -> None:
        self._cluster = cluster
        self._command = command
        self._output = output
        self._hosts: list[_HostProcess] = []
        self._changed = threading.Event()
        self._signals: list[tuple[int, float]] = []
        self.first_failed: LocalHost | None = None

    def run(self) -> int:
        """Start all hosts and wait for them; whatever happens, no process is left."""
        spared = {process.pid for process in psutil.Process().children(recursive=True)}
        adopt_orphans(True)
        try:
            for host in self._cluster.hosts:
                self._hosts.append(_HostProcess(host, self._command, self._output, self._changed))
            return self._wait()
        finally:
            self._kill_descendants(spared)
            for running in self._hosts:
                running.waiter.join(timeout=_GRACE_S)
                running.reader.join(timeout=_GRACE_S)
            adopt_orphans(False)

    def table(self) -> str:
        """One line for each host: what it was and how it ended."""
        rows = [
            [
                running.host.name,
                running.host.group,
                running.host.role.value,
                running.exit_code,
                f"{running.seconds:.1f}",
            ]
            for running in self._hosts
        ]
        headers = ["host", "group", "role", "exit code", "seconds"]
        return tabulate(
            rows, headers=headers, disable_numparse=True, colalign=("left", "left", "left", "right", "right")
        )

    def _wait(self) -> int:
        """Wait until every host ended, or one failed, or this process is told to stop."""
        while True:
            signum = self._signals[0][0] if self._signals else self._output.broken_by
            if signum:
                self._output.say(f"Stopping all hosts: {signal.Signals(signum).name}.")
                self._stop()
                return 128 + signum
            codes = {running: running.exit_code for running in self._hosts}
            failed = [running for running, code in codes.items() if code]
            if failed:
                first = min(failed, key=lambda running: running.ended_at or 0.0)
                self.first_failed, code = first.host, codes[first] or 0
                self._output.say(f"Host {first.host.name} (group {first.host.group}) failed with exit code {code}.")
                self._stop()
                return code
            if all(code == 0 for code in codes.values()):
                return 0
            self._pause()

    def _pause(self) -> None:
        self._changed.wait(_POLL_S)
        self._changed.clear()

    def _stop(self) -> None:
        """SIGTERM and a few seconds to end, fewer if asked a second time; what is left is killed by ``run``."""
        running = [host for host in self._hosts if host.exit_code is None]
        for host in running:
            host.process.terminate()
        asked_at = time.monotonic()
        while any(host.exit_code is None for host in running) and time.monotonic() < asked_at + _GRACE_S:
            if any(at > asked_at + _ONE_SIGNAL_S for _, at in self._signals):
                return
            self._pause()

    def _kill_descendants(self, spared: set[int]) -> None:
        """Kill every process that the hosts left, also those that daemonised, until none is left."""
        launchers = {running.process.pid for running in self._hosts}  # their own threads reap them
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline:
            left = [process for process in psutil.Process().children(recursive=True) if process.pid not in spared]
            if not left:
                return
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs([process for process in left if process.pid not in launchers], timeout=_POLL_S)
            self._pause()

    def handle_signals(self) -> Callable[[], None]:
        """Note every signal that asks to stop; the result puts the old handlers back."""
        if threading.current_thread() is not threading.main_thread():
            return lambda: None

        # It only takes a note, as it may interrupt the very wait that it would have to end.
        def note(signum: int, _frame: FrameType | None) -> None:
            self._signals.append((signum, time.monotonic()))

        old = {signum: signal.signal(signum, note) for signum in _STOP_SIGNALS}

        def restore() -> None:
            for signum, handler in old.items():
                signal.signal(signum, handler)

        return restore


def _reason(host: LocalHost) -> str:
    """What SageMaker would show as the reason of the failure."""
    try:
        reason = (host.base_dir / "output" / "failure").read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return f"{host.name} left no reason ({error})."
    return f"Reason ({host.name}):\n{textwrap.indent(reason[:1024], '  ')}"


def _whereabouts(cluster: LocalCluster, exit_code: int) -> Iterable[str]:
    """Where everything lies, the model first."""
    if not cluster.keep:
        yield "The folders of the hosts, the model included, are removed; --keep keeps them."
        return
    if exit_code != 0:
        yield f"The folders of all hosts are kept in {cluster.job_dir} (each with its output/log.txt)."
        return
    for title, folder in (("model", "model"), ("output", "output/data")):
        for host in cluster.hosts:
            files = sorted(path for path in (host.base_dir / folder).rglob("*") if path.is_file())
            if files:
                yield f"{title} of {host.name}: {host.base_dir / folder}"
                yield from (f"  {path.relative_to(host.base_dir / folder)}" for path in files)
    yield f"everything else: {cluster.job_dir} (each host's output/log.txt)"
