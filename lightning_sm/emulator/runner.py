"""The run of an emulated job, from its first attempt to the final table."""

from __future__ import annotations

import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from lightning_sm._table import draw_table
from lightning_sm._text import for_terminal, listed
from lightning_sm.emulator.attempt import Attempt, AttemptOutcome
from lightning_sm.emulator.cluster import LocalCluster
from lightning_sm.emulator.faults import FaultPlan, FaultSettings
from lightning_sm.emulator.output import Output
from lightning_sm.emulator.spec import LocalHost
from lightning_sm.job.outcomes import MAX_REASON_CHARS
from lightning_sm.launcher.failure import Place, ending_of

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(cluster: LocalCluster, command: Sequence[str], settings: FaultSettings, *, discard: bool = False) -> int:
    """Run a training script on every host of an emulated job, and wait until all hosts have exited.

    When a host fails, the others are stopped, as on the service. A signal that stops this process stops the hosts.
    After an interruption, the job resumes in another attempt.

    Args:
        cluster: The hosts.
        command: Training script and its arguments.
        settings: The faults to inject.
        discard: Whether to remove the hosts' folders if the job succeeds. Otherwise, they are kept.

    Returns:
        The exit code of the last attempt: 0 if all hosts succeeded, else the exit code of the first host that failed;
        128 + n if signal n stopped the job.

    Raises:
        OutputDirectoryError: The folders of another attempt cannot be created.
    """
    output = Output(sys.stdout.buffer, [host.name for host in cluster.hosts])
    # Handle signals until the last line is printed: a late Ctrl-C must not remove folders that are to be kept.
    with _noted_signals() as signals:
        with cluster.runtime.running(cluster.job_dir):
            attempts, outcome = _run_attempts(cluster, command, output, settings, signals)
        cluster.keep = not discard or outcome.exit_code != 0
        output.say(_table(attempts))
        if cluster.keep:
            folders = "algo-*, earlier attempts in attempt-*" if cluster.attempt > 1 else "algo-*"
            output.say(f"Folders of the hosts: {cluster.job_dir} ({folders}; logs: output/log.txt, data: output/data)")
        if outcome.exit_code == 0:
            output.say("\n".join(_models(cluster)))
        if outcome.failed is not None:
            output.say(f"The job failed:\n{_reason(outcome.failed, outcome.exit_code)}")
    return outcome.exit_code


def _run_attempts(
    cluster: LocalCluster,
    command: Sequence[str],
    output: Output,
    settings: FaultSettings,
    signals: Sequence[tuple[int, float]],
) -> tuple[list[Attempt], AttemptOutcome]:
    """Run an attempt, and further ones as long as the job resumes."""
    plan = FaultPlan(settings)
    attempts: list[Attempt] = []
    if sys.stdout.isatty():  # a log file needs no hint
        watch = f"lightning-sm report --live {shlex.quote(str(cluster.job_dir))}"
        output.say(f"Job {cluster.name}. To watch it in another terminal: {watch}")
    if cluster.bucket is not None:
        output.say(f"Folder that stands in for the checkpoints' location in S3: {cluster.bucket}")
    shared_disk_reason = cluster.runtime.shared_disk_reason() if len(cluster.hosts) > 1 else ""
    if shared_disk_reason:
        output.say(f"Hosts can read each other's folders here, so wrong paths may go unnoticed ({shared_disk_reason}).")
    while True:
        if settings.num_attempts > 1:
            output.say(f"Attempt {len(attempts) + 1} of {settings.num_attempts}")
        attempts.append(Attempt(cluster, command, output, signals, plan))
        outcome = attempts[-1].run()
        if not outcome.resumes:
            break
        cluster.next_attempt()
    for fault in plan.pending:
        output.say(f"Fault {fault.text} did not happen.")
    return attempts, outcome


@contextmanager
def _noted_signals() -> Iterator[list[tuple[int, float]]]:
    """Record the number and time of every signal that asks this process to stop."""
    signals: list[tuple[int, float]] = []

    # The handler only records the signal, because it may interrupt the very wait that it would have to end.
    def note(signum: int, _frame: FrameType | None) -> None:
        signals.append((signum, time.monotonic()))

    old = {}
    if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
        for signum in _STOP_SIGNALS:
            # A signal ignored by nohup, or by a shell for its background jobs, must stay ignored.
            if signal.getsignal(signum) is not signal.SIG_IGN:
                old[signum] = signal.signal(signum, note)
    try:
        yield signals
    finally:
        for signum, handler in old.items():
            signal.signal(signum, handler)


def _table(attempts: Sequence[Attempt]) -> str:
    """Draw a table with one row per host and attempt: role, exit code and duration."""
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
    numbers = columns.keys() - {"host", "group", "role"}
    return draw_table(zip(*columns.values(), strict=True), list(columns), right=numbers)


def _reason(host: LocalHost, exit_code: int) -> str:
    """Return the failure reason as SageMaker would show it."""
    try:
        text = (host.folder / "output" / "failure").read_text(encoding="utf-8", errors="replace")
        return for_terminal(text[:MAX_REASON_CHARS], sys.stdout)  # the text may come from a script
    except FileNotFoundError:  # the whole host was killed
        return f"{ending_of(exit_code)} on {Place(host.name, host.role)}, which gave no reason"


def _models(cluster: LocalCluster) -> Iterator[str]:
    """Yield the lines that tell the user where to find the model."""
    if not cluster.keep:
        yield "The folders of the hosts, including the model, were removed (--discard)."
        return
    folders = [(host, host.folder / "model") for host in cluster.hosts]
    models = [f"Model of {host.name}: {path} ({listed(files)})" for host, path in folders if (files := _files(path))]
    yield from models or ["No host wrote a model to its model folder (SageMaker's /opt/ml/model)."]


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
