"""An emulated job from its first attempt to the table at the end."""

from __future__ import annotations

import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import BinaryIO

from tabulate import tabulate

from lightning_sm.emulator.attempt import Attempt, Outcome
from lightning_sm.emulator.cluster import LocalCluster, LocalHost
from lightning_sm.emulator.faults import FaultSettings, Plan
from lightning_sm.emulator.output import Output
from lightning_sm.emulator.running_host import HostProcess

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(
    cluster: LocalCluster,
    command: Sequence[str],
    *,
    keep: bool = False,
    settings: FaultSettings | None = None,
    stream: BinaryIO | None = None,
) -> int:
    """Run a training script on every host of an emulated job and wait for all of them.

    When a host fails, the others are stopped, as the service does; when this process is stopped, so are the hosts.
    After an interruption the job goes on with another attempt.

    Args:
        cluster: The hosts. Their folders are kept after a failure.
        command: Training script and its arguments.
        keep: Whether to keep the folders after success, too.
        settings: The faults to bring about. Default: none.
        stream: Where the output of the hosts goes. Default: stdout.

    Returns:
        Of the last attempt: 0 if all hosts succeeded; else the exit code of the first that failed; 128 + n if signal n
        stopped it.

    Raises:
        OutputDirectoryError: The folders of another attempt cannot be made.
    """
    output = Output(stream or sys.stdout.buffer, [host.name for host in cluster.hosts])
    job = _Job(cluster, command, output, settings or FaultSettings())
    restore = job.handle_signals()  # until the last line: a late Ctrl-C must not remove what is to be kept
    try:
        outcome = job.run()
        cluster.keep = keep or outcome.exit_code != 0
        output.say(job.table())
        if outcome.failed is not None:
            output.say(_reason(outcome.failed))
        output.say("\n".join(_whereabouts(cluster, outcome.exit_code)))
    finally:
        restore()
    return outcome.exit_code


class _Job:
    """All attempts of a job."""

    def __init__(self, cluster: LocalCluster, command: Sequence[str], output: Output, settings: FaultSettings) -> None:
        self._cluster = cluster
        self._command = command
        self._output = output
        self._settings = settings
        self._signals: list[tuple[int, float]] = []
        self._attempts: list[Attempt] = []

    def run(self) -> Outcome:
        """Run one attempt after the other, until one ends by itself or none is left."""
        num_attempts, plan = self._settings.num_attempts, Plan(self._settings)
        if self._settings.needs_checkpoints:
            self._output.say(f"Checkpoint folder of all attempts: {self._cluster.checkpoint_dir}")
        while True:
            if num_attempts > 1:
                self._output.say(f"Attempt {len(self._attempts) + 1} of {num_attempts}")
            attempt = Attempt(self._cluster, self._command, self._output, self._signals, plan)
            self._attempts.append(attempt)
            outcome = attempt.run()
            if not outcome.goes_on or len(self._attempts) == num_attempts:
                break
            self._cluster.next_attempt()
        for fault in plan.pending:
            self._output.say(f"Fault {fault.text} did not happen.")
        return outcome

    def table(self) -> str:
        """One line for each host and attempt: what it was and how it ended."""
        attempts = [(number, running) for number, attempt in enumerate(self._attempts, 1) for running in attempt.hosts]
        columns: dict[str, list[str]] = {"attempt": [str(number) for number, _ in attempts]}
        columns |= _columns([running for _, running in attempts])
        if len(self._attempts) == 1:
            del columns["attempt"]
        if not any(columns[_TO_EXIT]):
            del columns[_TO_EXIT]
        numbers = {"attempt", "exit code", "seconds", _TO_EXIT}
        alignment = ["right" if name in numbers else "left" for name in columns]
        return tabulate(columns, headers="keys", disable_numparse=True, colalign=alignment)

    def handle_signals(self) -> Callable[[], None]:
        """Note every signal that asks to stop; the result puts the old handlers back."""
        if threading.current_thread() is not threading.main_thread():
            return lambda: None

        # It only takes a note, as it may interrupt the very wait that it would have to end.
        def note(signum: int, _frame: FrameType | None) -> None:
            self._signals.append((signum, time.monotonic()))

        # What nohup, or a shell for what it starts in the background, had ignored stays so.
        heeded = [signum for signum in _STOP_SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN]
        old = {signum: signal.signal(signum, note) for signum in heeded}

        def restore() -> None:
            for signum, handler in old.items():
                signal.signal(signum, handler)

        return restore


_TO_EXIT = "signal to exit s"


def _columns(hosts: Sequence[HostProcess]) -> dict[str, list[str]]:
    to_exit = [running.seconds_to_exit for running in hosts]
    return {
        "host": [running.host.name for running in hosts],
        "group": [running.host.group for running in hosts],
        "role": [running.host.role.value for running in hosts],
        "exit code": ["" if running.exit_code is None else str(running.exit_code) for running in hosts],
        "seconds": [f"{running.seconds:.1f}" for running in hosts],
        _TO_EXIT: ["" if seconds is None else f"{seconds:.2f}" for seconds in to_exit],
    }


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
    if cluster.attempt > 1:
        yield f"The folders of the attempts before are kept in {cluster.job_dir / 'attempt-*'}."
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
