"""One run of the user's command by the emulator, in processes of its own, and what it ended with."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_sm._linux import kill_with_parent
from lightning_sm.chaos.draws import MAX_RETRIES, Course
from lightning_sm.emulator.faults import HAPPENED, Moment, read_happened
from lightning_sm.errors import JobConfigError
from lightning_sm.job.variables import REPORT_S
from lightning_sm.record.events import APPROXIMATE, LAUNCHER, Event, Metrics, Span, Steps
from lightning_sm.record.runs import RunRecord, read_run

# The emulator kills its hosts 25 s after it has told them to end.
_STOP_S = 60.0
LOG, MODEL = "log.txt", "model"


@dataclass(frozen=True)
class RunEnding:
    """What a run ended with.

    Attributes:
        folder: Its folder, with the folder of its job, the checkpoints, and the log.
        exit_code: Exit code of its last job; None if it did not end in time.
        seconds: How long it took.
        reason: Why it failed, in one line; empty if that is not known.
        happened: When each of its faults happened; those that did not are missing.
        steps: Global steps; 0 if the script does not report them.
        epochs: Epochs that began.
        world_size: Number of ranks; 0 if the script does not report them.
        metrics: The last value of each metric.
        was_served: Whether data hosts served training loaders.
        problems: What ``lightning-sm verify`` says against it.
        is_approximate: Whether a restart within the job lacked random numbers, buffers or values of the epoch.
        model: Folder with the files that it saved as its model, perhaps none.
        data_groups: The instance groups whose hosts serve data.
    """

    folder: Path
    exit_code: int | None
    seconds: float
    reason: str
    happened: Mapping[str, Moment]
    steps: int
    epochs: int
    world_size: int
    metrics: dict[str, float | None]
    was_served: bool
    problems: tuple[str, ...]
    is_approximate: bool
    model: Path
    data_groups: frozenset[str]


@dataclass(frozen=True)
class RunCommand:
    """The command of a run.

    Attributes:
        words: Arguments of ``lightning-sm local``, without faults and without the folders.
        script: The script and its arguments.
    """

    words: Sequence[str]
    script: Sequence[str]

    def arguments(self, folder: Path, seed: int, faults: Sequence[str]) -> list[str]:
        """Return the arguments of ``lightning-sm`` that repeat a run in a folder."""
        return [
            *("local", *self.words, "--seed", str(seed), "--base-dir", str(folder), "--retries", str(MAX_RETRIES)),
            *(word for fault in faults for word in ("--fault", fault)),
            *("--", *self.script),
        ]

    def run(self, folder: Path, seed: int, faults: Sequence[str], timeout_s: float | None = None) -> RunEnding:
        """Run the command to its end.

        Args:
            folder: The run's folder, which must not exist.
            seed: Seed of the assignment of hosts to groups.
            faults: Values of ``--fault``.
            timeout_s: Seconds after which it is stopped; None for no limit.

        Returns:
            What it ended with.
        """
        folder.mkdir(parents=True)
        began_at = time.monotonic()
        exit_code = _run(self.arguments(folder, seed, faults), folder / LOG, timeout_s)
        return _ending(folder, exit_code, time.monotonic() - began_at)


def _run(arguments: Sequence[str], log: Path, timeout_s: float | None) -> int | None:
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "lightning_sm", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, REPORT_S.name: "0"},
            preexec_fn=kill_with_parent,  # noqa: PLW1509 - this process has one thread
        )
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()
        return None
    finally:
        # After Ctrl-C, too, which the terminal has sent to the emulator as well.
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def course_of(ending: RunEnding) -> Course:
    """Return the course of an undisturbed run."""
    records = _record(ending.folder).records
    begin = min((record.head.t for record in records if record.head.who == LAUNCHER), default=0.0)
    lines = [line for record in records if record.head.rank in (0, None) for line in record.lines]
    spans = [(line.begin - begin, line.t - begin) for line in lines if isinstance(line, Span)]
    # Not until the command has ended: what comes after the training has nothing to disturb.
    end = max((line.t for line in lines if isinstance(line, (Span, Steps))), default=begin + ending.seconds)
    return Course(ending.steps, ending.epochs, end - begin, tuple(spans))


def _ending(folder: Path, exit_code: int | None, seconds: float) -> RunEnding:
    from lightning_sm.report.coverage import cover  # noqa: PLC0415 - loads NumPy, which other commands do without

    run = _record(folder)
    ranks = [record for record in run.records if record.head.rank is not None]
    main = sorted((record for record in ranks if record.head.rank == 0), key=lambda record: record.head.t)
    lines = [line for record in main for line in record.lines]
    metrics = [line for line in lines if isinstance(line, Metrics)]
    covered = cover(run)
    return RunEnding(
        folder,
        exit_code,
        seconds,
        reason=_reason(folder),
        happened=_happened(folder),
        steps=max((line.step for line in lines if isinstance(line, Steps)), default=0),
        epochs=max((line.epoch + 1 for line in metrics), default=0),
        world_size=max((record.head.world_size or 0 for record in ranks), default=0),
        metrics={name: value for line in metrics for name, value in line.values.items()},
        was_served=bool(covered),
        problems=tuple(problem for one in covered for problem in one.problems),
        is_approximate=any(
            isinstance(line, Event) and line.what == APPROXIMATE for record in ranks for line in record.lines
        ),
        model=_collected_model(folder),
        data_groups=frozenset(record.head.group for record in run.records if record.head.role == "data"),
    )


def _reason(folder: Path) -> str:
    """Return the first line of a host's reason for a failure."""
    texts = [
        path.read_text(encoding="utf-8", errors="replace") for path in folder.glob("local-*/algo-*/output/failure")
    ]
    return next((text.splitlines()[0] for text in sorted(texts) if text.strip()), "")


def _happened(folder: Path) -> dict[str, Moment]:
    found = [path.read_text(encoding="utf-8") for path in folder.glob(f"local-*/{HAPPENED}")]
    return read_happened(found[0]) if found else {}


def _record(folder: Path) -> RunRecord:
    """Return the record of a run, which is empty if its hosts did not come as far as that."""
    try:
        return read_run(folder, next(path.name for path in folder.glob("local-*")))
    except (JobConfigError, StopIteration):
        return RunRecord(folder.name, str(folder), ())


def _collected_model(folder: Path) -> Path:
    """Move the models of the hosts into one folder, whichever host was the main one, and return it."""
    collected = folder / MODEL
    collected.mkdir()
    for host in sorted(folder.glob("local-*/algo-*/model")):
        for path in host.iterdir():
            if not (collected / path.name).exists():
                path.rename(collected / path.name)
    return collected
