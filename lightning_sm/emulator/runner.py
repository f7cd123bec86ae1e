"""An emulated job, from its first attempt to the table at the end."""

from __future__ import annotations

import signal
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from tabulate import tabulate

from lightning_sm.emulator.attempt import Attempt, Outcome
from lightning_sm.emulator.cluster import LocalCluster, LocalHost
from lightning_sm.emulator.faults import FaultSettings, Plan
from lightning_sm.emulator.output import Output

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(cluster: LocalCluster, command: Sequence[str], settings: FaultSettings, *, keep: bool) -> int:
    """Run a training script on every host of an emulated job, and wait until all hosts end.

    When a host fails, the others are stopped, as on the service. When this process is stopped, so are the hosts. After
    an interruption the job resumes in another attempt.

    Args:
        cluster: The hosts. Their folders are kept after a failure.
        command: Training script and its arguments.
        settings: The faults to inject.
        keep: Whether to keep the folders even after success.

    Returns:
        The exit code of the last attempt: 0 if all hosts succeeded; else that of the first host that failed; 128 + n if
        signal n stopped the job.

    Raises:
        OutputDirectoryError: The folders of another attempt cannot be created.
    """
    output = Output(sys.stdout.buffer, [host.name for host in cluster.hosts])
    # Until the last line: a late Ctrl-C must not remove folders that are to be kept.
    with _noted_signals() as signals:
        attempts, outcome = _run_attempts(cluster, command, output, settings, signals)
        cluster.keep = keep or outcome.exit_code != 0
        output.say(_table(attempts))
        if outcome.failed is not None:
            output.say(_reason(outcome.failed))
        output.say("\n".join(_whereabouts(cluster, outcome.exit_code)))
    return outcome.exit_code


def _run_attempts(
    cluster: LocalCluster,
    command: Sequence[str],
    output: Output,
    settings: FaultSettings,
    signals: Sequence[tuple[int, float]],
) -> tuple[list[Attempt], Outcome]:
    """Run attempts until one is not interrupted, or until there have been enough."""
    plan = Plan(settings)
    attempts: list[Attempt] = []
    if settings.needs_checkpoints:
        output.say(f"Checkpoint folder of all attempts: {cluster.checkpoint_dir}")
    while True:
        if settings.num_attempts > 1:
            output.say(f"Attempt {len(attempts) + 1} of {settings.num_attempts}")
        attempts.append(Attempt(cluster, command, output, signals, plan))
        outcome = attempts[-1].run()
        if not outcome.resumes or len(attempts) == settings.num_attempts:
            break
        cluster.next_attempt()
    for fault in plan.pending:
        output.say(f"Fault {fault.text} did not happen.")
    return attempts, outcome


@contextmanager
def _noted_signals() -> Iterator[list[tuple[int, float]]]:
    """Note the number and time of every signal that asks this process to stop."""
    signals: list[tuple[int, float]] = []

    # Only takes a note, because it may interrupt the very wait that it would have to end.
    def note(signum: int, _frame: FrameType | None) -> None:
        signals.append((signum, time.monotonic()))

    old = {}
    if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
        for signum in _STOP_SIGNALS:
            # Signals that nohup, or a shell for its background jobs, has ignored stay ignored.
            if signal.getsignal(signum) is not signal.SIG_IGN:
                old[signum] = signal.signal(signum, note)
    try:
        yield signals
    finally:
        for signum, handler in old.items():
            signal.signal(signum, handler)


def _table(attempts: Sequence[Attempt]) -> str:
    """One line per host and attempt: its role and how it ended."""
    rows = [(number, host) for number, attempt in enumerate(attempts, 1) for host in attempt.hosts]
    to_exit = [host.seconds_to_exit for _, host in rows]
    columns: dict[str, list[str]] = {}
    if len(attempts) > 1:
        columns["attempt"] = [str(number) for number, _ in rows]
    columns["host"] = [host.host.name for _, host in rows]
    columns["group"] = [host.host.group for _, host in rows]
    columns["role"] = [host.host.role.value for _, host in rows]
    columns["exit code"] = ["" if host.exit_code is None else str(host.exit_code) for _, host in rows]
    columns["seconds"] = [f"{host.seconds:.1f}" for _, host in rows]
    if any(seconds is not None for seconds in to_exit):
        columns["SIGTERM to exit (s)"] = ["" if seconds is None else f"{seconds:.2f}" for seconds in to_exit]
    alignment = ["left" if name in {"host", "group", "role"} else "right" for name in columns]
    return tabulate(columns, headers="keys", disable_numparse=True, colalign=alignment)


def _reason(host: LocalHost) -> str:
    """The reason for the failure, as SageMaker would show it."""
    try:
        reason = (host.base_dir / "output" / "failure").read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return f"{host.name} wrote no reason ({error})."
    return f"Reason ({host.name}):\n{textwrap.indent(reason[:1024], '  ')}"


def _whereabouts(cluster: LocalCluster, exit_code: int) -> Iterator[str]:
    """Where to find everything, the model first."""
    if not cluster.keep:
        yield "The folders of the hosts, including the model, were removed; --keep keeps them."
        return
    if cluster.attempt > 1:
        yield f"The folders of earlier attempts are kept in {cluster.job_dir / 'attempt-*'}."
    if exit_code != 0:
        yield f"The folders of all hosts are kept in {cluster.job_dir} (logs: output/log.txt)."
        return
    for title, folder in (("model", "model"), ("output", "output/data")):
        for host in cluster.hosts:
            files = sorted(path for path in (host.base_dir / folder).rglob("*") if path.is_file())
            if files:
                yield f"{title} of {host.name}: {host.base_dir / folder}"
                yield from (f"  {path.relative_to(host.base_dir / folder)}" for path in files)
    yield f"everything else: {cluster.job_dir} (logs: output/log.txt)"
