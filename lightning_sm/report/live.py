"""The view of ``lightning-sm report --live``: the last seconds of a running job, read from its record."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_sm._log import command_logger
from lightning_sm._table import draw_table
from lightning_sm._text import duration, percent, plain, rate, size
from lightning_sm.errors import JobConfigError
from lightning_sm.record.events import INTERRUPTED, LAUNCHER, End, HostUse, Metrics, Steps
from lightning_sm.record.runs import ProcessRecord, RunRecord, read_runs
from lightning_sm.record.totals import Totals, pace_of, samples_per_step
from lightning_sm.report import verdict
from lightning_sm.report.figures import RUNNING, Figures, Happening, HostSummary, lines_of

_LOG = command_logger(__name__)

# Compute rates over this time. In a long job, lines may be farther apart, so always include the newest one.
_WINDOW_S = 15.0
# Time between two reads of the record.
_EVERY_S = 2.0
# Silence for this long means a problem: a running host writes a line at least every 30 s.
SILENCE_S = 300.0
SILENT_EXIT_CODE = 3
_MAX_EVENTS = 6
_MAX_METRICS = 5
_CLEAR_SCREEN = "\x1b[H\x1b[2J"
_WHOLE = "{:,}".format
# Each column's header, its field of ``LiveHost``, and the format of its values.
_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("host", "host", str),
    ("role", "role", str),
    ("state", "state", str),
    ("step", "step", _WHOLE),
    ("waits", "waiting", percent),
    ("batches built", "num_built", _WHOLE),
    ("CPU", "cpu", percent),
    ("GPU", "gpu", percent),
    ("memory", "memory_bytes", size),
)


@dataclass(frozen=True)
class LiveHost:
    """A host of a running job. Values that its record lacks are None.

    Attributes:
        host: Name of the host.
        role: ``trainer`` or ``data``.
        state: State in a few words.
        step: Number of completed optimizer steps of the rank that is furthest behind.
        waiting: Share of the time in which the host's ranks wait for data, 0 to 1.
        num_built: Number of batches that a data host has built.
        cpu: Share of CPUs in use, 0 to 1.
        gpu: Share of the time in which a GPU worked, 0 to 1; the mean over the host's GPUs.
        memory_bytes: Memory in use.
    """

    host: str
    role: str
    state: str
    step: int | None = None
    waiting: float | None = None
    num_built: int | None = None
    cpu: float | None = None
    gpu: float | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True)
class LiveJob:
    """A running job.

    Attributes:
        job: Name of the job.
        attempt: The current attempt, counted from 1.
        seconds: Total seconds of the attempts so far.
        until: When the last line was written, in seconds since the Unix epoch. All other values refer to this time.
        ending: Outcome of the job, in a sentence; empty while it runs.
        step: Number of completed optimizer steps.
        steps_per_s: Training steps per second.
        samples_per_s: Samples per second of all ranks.
        waiting: Share of the time in which training waits for data, 0 to 1.
        metrics: The last logged values of the model's metrics, by name.
        hosts: The job's hosts, trainers first.
        events: The latest events, newest last.
    """

    job: str
    attempt: int
    seconds: float
    until: float
    ending: str
    step: int | None
    steps_per_s: float | None
    samples_per_s: float | None
    waiting: float | None
    metrics: Mapping[str, float | None]
    hosts: list[LiveHost]
    events: list[Happening]


def watch(sources: Sequence[Path], job: str | None, *, is_once: bool, is_json: bool) -> int:
    """Show a job until it ends or has been silent for ``SILENCE_S``; return the exit code.

    Args:
        sources: Folders that contain the job's record, directly or in subfolders.
        job: Name of the job. If None, show the newest one.
        is_once: Whether to show the job only once.
        is_json: Whether to write lines of JSON.

    Raises:
        JobConfigError: The job has no record.
    """
    clear = _CLEAR_SCREEN if sys.stdout.isatty() and not (is_json or is_once) else ""
    known: RunRecord | None = None
    known_at = time.monotonic()
    while True:
        try:
            run = max(map(Figures, read_runs(sources, job)), key=lambda run: run.begin)
        except JobConfigError:
            if known is None:
                raise  # otherwise, retry: the emulator may be moving an attempt's folders
        else:
            if run.run != known:
                known, known_at = run.run, time.monotonic()
            text = json.dumps(asdict(live(run))) if is_json else as_text(live(run))
            sys.stdout.write(f"{clear}{text}\n")
            sys.stdout.flush()
            if is_once or (run.outcome not in (RUNNING, INTERRUPTED) and not run.hosts_without_end):
                return 0
        if time.monotonic() - known_at >= SILENCE_S:
            _LOG.error(
                "no host has written a line for %s: the job was killed, or its record has no end.", duration(SILENCE_S)
            )
            return SILENT_EXIT_CODE
        time.sleep(_EVERY_S)


def live(run: Figures) -> LiveJob:
    """Return the state of a job in the last seconds of its record."""
    ranks = {record.head.rank: _recent(record) for record in run.newest_records if record.head.rank is not None}
    _, pace = pace_of(ranks)
    samples = samples_per_step([steps for steps in ranks.values() if steps.num_steps], run.world_size)
    metrics = [line.values for line in lines_of(run.main_records, Metrics)]
    hosts = [_host(run, host) for host in run.hosts]
    has_ended = bool(lines_of(run.newest_records, End)) and not run.hosts_without_end
    return LiveJob(
        job=run.run.name,
        attempt=run.attempts[-1].number,
        seconds=run.seconds,
        until=run.attempts[-1].end,
        ending=verdict.ending(run) if has_ended else "",
        step=min((host.step for host in hosts if host.step is not None), default=None),
        steps_per_s=1 / pace.step_s if pace.num_steps else None,
        samples_per_s=samples / pace.step_s if samples else None,
        waiting=pace.waiting if pace.num_steps else None,
        metrics=metrics[-1] if metrics else {},
        hosts=hosts,
        events=run.events[-_MAX_EVENTS:],
    )


def as_text(shown: LiveJob) -> str:
    """Format a job as text. If it has ended, add its outcome, and a note that other values are from before the end."""
    attempt = f", attempt {shown.attempt}" if shown.attempt > 1 else ""
    facts = [] if shown.step is None else [f"step {shown.step:,}"]
    facts += [] if shown.steps_per_s is None else [f"{rate(shown.steps_per_s)} steps/s"]
    facts += [] if shown.samples_per_s is None else [f"{rate(shown.samples_per_s)} samples/s"]
    facts += [] if shown.waiting is None else [f"waiting for data {percent(shown.waiting)} of the time"]
    known = [(name, value) for name, value in shown.metrics.items() if value is not None]
    metrics = [f"{name} {value:.4g}" for name, value in known[:_MAX_METRICS]]
    events = [
        " ".join([duration(max(0.0, one.seconds)), one.host, one.what.replace("_", " "), *one.text.split()])
        for one in shown.events
    ]
    until = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(shown.until))
    lines = [
        f"job {shown.job}{attempt}, recorded for {duration(shown.seconds)} until {until}",
        *([f"{shown.ending} The values below are from just before the end."] if shown.ending else []),
        "   ".join(facts) or "no training step so far",
        *(["   ".join(metrics)] if metrics else []),
        "",
        draw_table(map(_row, shown.hosts), [header for header, _, _ in _COLUMNS]),
        *(["", "events, by time since the start", *events] if events else []),
    ]
    return plain("\n".join(lines))


def _host(run: Figures, host: HostSummary) -> LiveHost:
    own = [record for record in run.newest_records if record.head.host == host.name]
    ranks = {record.head.rank: record for record in own if record.head.rank is not None}
    _, pace = pace_of({rank: _recent(record) for rank, record in ranks.items()})
    last = [line.step for record in ranks.values() for line in lines_of([record], Steps)[-1:]]
    ends = lines_of([record for record in own if record.head.who == LAUNCHER], End)
    use = max(lines_of(own, HostUse), key=lambda line: line.t, default=None)
    served = next((one for one in run.data_hosts if one.name == host.name), None)
    state = served.state if served else "training" if last else "starting" if own else "no record here"
    return LiveHost(
        host=host.name,
        role=host.role,
        state=ends[-1].outcome if ends else state,
        step=min(last, default=None),
        waiting=pace.waiting if pace.num_steps else None,
        num_built=None if served is None else served.num_built,
        cpu=None if use is None else use.cpu,
        gpu=None if use is None else use.gpu,
        memory_bytes=None if use is None else use.memory_bytes,
    )


def _row(host: LiveHost) -> list[str]:
    return ["" if (value := getattr(host, name)) is None else text(value) for _, name, text in _COLUMNS]


def _recent(record: ProcessRecord) -> Totals:
    steps = [line for line in lines_of([record], Steps) if line.n]
    return Totals.of(line for line in steps if steps[-1].t - line.t <= _WINDOW_S)
