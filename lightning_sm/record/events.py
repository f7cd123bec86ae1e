"""The lines of a run's record: their types, and the code that writes and reads them.

While a job runs, each launcher and each training process appends lines of JSON to a separate file,
``<record folder>/<attempt>/<host>-<who>.jsonl``, where ``<who>`` is ``launcher`` or a rank such as ``rank-3``. The
record folder is in the checkpoint folder if the job has one, because nothing else survives a killed attempt. Otherwise,
it is in the output data, which the service collects from all hosts in one archive.

A file begins with a ``FileHead``. A restarted process that continues the file writes another ``FileHead``. Each kind of
line has a class below, whose tag is the line's ``kind`` in JSON. All times are in seconds; ``t`` counts from the Unix
epoch.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePath
from statistics import fmean
from typing import Annotated, Any, TypeAlias, Union

import msgspec

from lightning_sm._structs import encode
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.redaction import shown, shown_beginning
from lightning_sm.job.variables import RECORD_DIR

logger = logging.getLogger(__name__)

FOLDER = "lightning-sm-record"
LAUNCHER = "launcher"
# Outcomes of a job, a host, or a rank's Trainer; see ``End``.
SUCCEEDED, FAILED, INTERRUPTED, STOPPED = "succeeded", "failed", "interrupted", "stopped"
# The parts of a training step, in order, and their display names. "backward" includes the exchange of gradients, which
# DistributedDataParallel overlaps with it. "other" is the time that Lightning's hooks cannot attribute.
PARTS = {
    "data_wait": "waiting for data",
    "to_device": "to the device",
    "forward": "forward",
    "backward": "backward, with gradient exchange",
    "optimizer": "optimizer",
    "other": "other",
}
# Display names of the spans outside the steps, by their names in the record; see ``Span``.
SPANS = {
    "preparation": "start-up",
    "startup": "start-up",
    "first_batch": "first step",
    "validation": "validation",
    "between": "between epochs",
    "checkpoint": "checkpoints",
    "export": "model export",
    "test": "test and prediction",
    "predict": "test and prediction",
}
# Types that accept only valid values: a line with any other value counts as damaged, and readers skip it.
Natural: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, lt=1e10)]
Share: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1)]
_ENDING = ".jsonl"
# Matches paths such as "1/algo-1-launcher.jsonl". Host names may contain dashes.
_FILE = re.compile(rf"(?:.*/)?([1-9][0-9]*)/[^/]+-(?:{LAUNCHER}|rank-[0-9]+)\.jsonl", re.DOTALL)


class Line(msgspec.Struct, frozen=True, tag_field="kind", omit_defaults=True):
    """A line of a record.

    Attributes:
        t: A time, in seconds since the Unix epoch.
    """

    t: Seconds


class FileHead(Line, frozen=True, tag="file"):
    """The first line of a file, which describes its writer; a restarted process that continues the file adds another.

    Attributes:
        t: When the process began to write.
        host: Name of the process's host.
        who: ``launcher`` or ``rank-<global rank>``.
        job: Name of the job, if known.
        group: Instance group of the host.
        role: ``trainer`` or ``data``.
        rank: Global rank; None for a launcher.
        world_size: Number of ranks; None for a launcher.
        hosts: Instance group of each of the job's hosts, by host name.
        instance_types: Instance type of each group, by group name; None if unknown.
        cpus: Number of CPUs that the process may use.
        gpus: Number of GPUs on the host.
        command: The command line of the script, with secrets hidden; empty for ranks.
        hyperparameters: The job's hyperparameters, with secrets hidden; empty for ranks.
    """

    host: str
    who: str
    job: str | None = None
    group: str = ""
    role: str = "trainer"
    rank: Natural | None = None
    world_size: Natural | None = None
    hosts: Mapping[str, str] = msgspec.field(default_factory=dict)
    instance_types: Mapping[str, str | None] = msgspec.field(default_factory=dict)
    cpus: Natural = 0
    gpus: Natural = 0
    command: Sequence[str] = msgspec.field(default_factory=list)
    hyperparameters: Mapping[str, str] = msgspec.field(default_factory=dict)


class GpuUse(msgspec.Struct, frozen=True):
    """The use of one GPU.

    Attributes:
        use: Share of the time in which any kernel ran, 0 to 1, however little of the GPU the kernel used.
        memory_bytes: Memory in use.
        memory_total_bytes: Total memory.
    """

    use: Share
    memory_bytes: Natural
    memory_total_bytes: Natural


class HostUse(Line, frozen=True, tag="use"):
    """The use of a host since the previous line; a launcher writes one every few seconds.

    Attributes:
        t: When the use was measured.
        cpu: Share of the host's CPUs in use, 0 to 1.
        memory_bytes: Memory in use.
        memory_total_bytes: Memory that the job may use.
        gpus: Use of each GPU; empty without GPUs or NVML.
    """

    cpu: Share
    memory_bytes: Natural
    memory_total_bytes: Natural
    gpus: Sequence[GpuUse] = msgspec.field(default_factory=list)

    @property
    def memory(self) -> float | None:
        """Share of the memory in use, 0 to 1."""
        return self.memory_bytes / self.memory_total_bytes if self.memory_total_bytes else None

    @property
    def gpu(self) -> float | None:
        """Share of the time in which any kernel ran, 0 to 1; the mean over the GPUs."""
        return fmean(gpu.use for gpu in self.gpus) if self.gpus else None

    @property
    def gpu_memory(self) -> float | None:
        """Share of the GPUs' memory in use, 0 to 1."""
        total = sum(gpu.memory_total_bytes for gpu in self.gpus)
        return sum(gpu.memory_bytes for gpu in self.gpus) / total if total else None


class Loader(Line, frozen=True, tag="loader"):
    """The source of a rank's training batches; written when training begins.

    Attributes:
        t: When it was written.
        workers: Number of worker processes that this rank's loader asks for; 0 if the training process builds the
            batches. With data hosts, their workers (see ``DataService``) replace these.
        cpus: Number of CPUs that this rank shares with the other ranks on the host.
        ranks_of_host: Number of ranks on the host.
        batch: Number of training batches completed before training begins or resumes.
    """

    workers: Natural = 0
    cpus: Natural = 0
    ranks_of_host: Natural = 1
    batch: Natural = 0


class Steps(Line, frozen=True, tag="steps"):
    """Consecutive training steps of a rank. A step is one training batch.

    Spans between the steps are excluded. So is the first step of a process, which may compile and therefore counts as
    the span ``first_batch``.

    Attributes:
        t: When the last step ended.
        step: ``trainer.global_step``, which counts optimizer steps, after the last step.
        n: Number of steps.
        samples: Number of samples in this rank's batches; 0 if unknown.
        parts: Seconds by part (``PARTS``), summed over the steps.
        gpu_parts: Whether forward, backward and optimizer were measured on the GPU, once every few steps. If not, they
            were measured on the host, which only launches the GPU's work.
        untimed: Number of steps since the previous line that no other field counts: the first step of a process.
    """

    step: Natural
    n: Natural
    samples: Natural = 0
    parts: Mapping[str, Seconds] = msgspec.field(default_factory=dict)
    gpu_parts: bool = False
    untimed: Natural = 0

    @property
    def wall_s(self) -> float:
        """Total seconds of the steps."""
        return sum(self.parts.values())


class Span(Line, frozen=True, tag="span"):
    """A span of time outside the steps.

    Attributes:
        t: When it ended.
        name: ``startup`` (from the start of the process until training begins), ``first_batch`` (until the first step
            has ended, which may start workers and compile), ``between`` (from the last step of an epoch until the first
            batch of the next one), ``validation``, ``checkpoint``, ``export``, ``test``, ``predict`` and, from
            launchers only, ``preparation`` (code and requirements).
        begin: When it began, in seconds since the Unix epoch.
        seconds: Duration of the span, without the spans nested in it.
    """

    name: str
    begin: Seconds
    seconds: Seconds


class Metrics(Line, frozen=True, tag="metrics"):
    """The metrics that the model logged; rank 0 writes them.

    Attributes:
        t: When they were written.
        step: ``trainer.global_step``.
        epoch: The epoch, counted from 0.
        values: The metrics by name; None for NaN and infinity.
    """

    step: Natural
    epoch: Natural
    values: Mapping[str, float | None] = msgspec.field(default_factory=dict)


class DataService(Line, frozen=True, tag="data"):
    """The work of data hosts and ranks, as sums since the start; rank 0 of a job with data hosts writes it.

    Attributes:
        t: When it was written.
        hosts: The fields of ``HostFigures`` (lightning_sm.record.data_figures) for each data host.
        ranks: The fields of ``RankFigures`` (lightning_sm.record.data_figures) for each rank, by rank name.
    """

    hosts: Sequence[Mapping[str, Any]] = msgspec.field(default_factory=list)
    ranks: Mapping[str, Mapping[str, Any]] = msgspec.field(default_factory=dict)


class Event(Line, frozen=True, tag="event"):
    """An event during the run.

    Attributes:
        t: When it happened.
        what: ``signal``, ``interruption``, ``restart``, ``host_lost``, ``host_back``, ``hang``, ``failure``,
            ``checkpoint_saved`` or ``resumed``.
        text: The event in words.
    """

    what: str
    text: str = ""

    def __post_init__(self) -> None:
        """Hide secrets."""
        msgspec.structs.force_setattr(self, "text", shown_beginning(self.text))


class End(Line, frozen=True, tag="end"):
    """The end of a launcher or of a rank's Trainer run. A killed process writes no such line.

    Attributes:
        t: When it ended.
        outcome: ``succeeded``, ``failed``, ``interrupted`` (it can resume from a checkpoint) or ``stopped``.
        exit_code: Exit code of the host; only launchers set it.
        reason: One line on why the job did not succeed or, without ``job_outcome``, why this host did not.
        job_outcome: Outcome of the job, as one of the same values; None if the launcher was not told. On a host
            that is stopped because another host failed, ``outcome`` is ``stopped``, but ``job_outcome`` is ``failed``.
    """

    outcome: str
    exit_code: int | None = None
    reason: str = ""
    job_outcome: str | None = None

    def __post_init__(self) -> None:
        """Hide secrets."""
        msgspec.structs.force_setattr(self, "reason", shown_beginning(self.reason))


_DECODER = msgspec.json.Decoder(Union[tuple(Line.__subclasses__())])  # noqa: UP007 - a computed union


def record_folder(job: SageMakerJob) -> Path:
    """Return the folder of a job's record on this host."""
    return (job.checkpoint_dir or job.output_dir / "data") / FOLDER


def file_attempt(path: PurePath) -> int:
    """Return the attempt number in the path of a record's file (ATTEMPT/HOST-PROCESS.jsonl); 0 for any other path."""
    match = _FILE.fullmatch(path.as_posix())
    return 0 if match is None else int(match[1])


def find_files(folder: Path) -> list[Path]:
    """Return the record files in and below a folder.

    Args:
        folder: A record folder, or a folder above it, such as the unpacked output data of a job.
    """
    return sorted(filter(file_attempt, folder.rglob(f"*{_ENDING}")))


def read_lines(content: bytes) -> list[Line]:
    """Read the lines of a file.

    Malformed lines, such as one that is incomplete or still being written, and lines of unknown kinds are skipped.
    """
    lines: list[Line] = []
    for text in content.split(b"\n"):
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            lines.append(_DECODER.decode(text))
    return lines


class Recorder:
    """The writer of this process's record file.

    Each line is written immediately, so it survives even if the process is killed. A job must not fail because of its
    record, so errors such as a full disk are logged once and never raised.

    Args:
        path: The file. Its folder is created if necessary.

    Attributes:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None
        self._has_failed = False

    def append(self, line: Line) -> None:
        """Write a line."""
        if self._has_failed:
            return
        try:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            # Start with the line break: an earlier process may have been killed in the middle of a line.
            os.write(self._file, b"\n" + encode(line))
        except (OSError, ValueError, TypeError) as error:
            self._has_failed = True
            logger.warning("Recording of this run has stopped, because %s cannot be written: %s", self.path, error)

    def close(self) -> None:
        """Close the file; a later line reopens it."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def open_record(job: SageMakerJob, who: str, env: Mapping[str, str] = os.environ) -> Recorder:
    """Return the recorder for a process, without writing anything.

    Its file is in the attempt's folder. The launcher passes this folder to its children in the environment. If none is
    passed, the attempt gets the next number.

    Args:
        job: The job.
        who: As in ``FileHead``. Only files of this process determine the next number, because other hosts may not have
            created theirs yet.
        env: Environment variables.
    """
    name = f"{job.current_host}-{who}{_ENDING}"
    folder = RECORD_DIR.read(env)
    if folder is None:
        earlier = map(file_attempt, record_folder(job).glob(f"*/{name}"))
        folder = record_folder(job) / str(1 + max(earlier, default=0))
    return Recorder(folder / name)


def head_of(
    job: SageMakerJob,
    who: str,
    *,
    role: str = "trainer",
    rank: int | None = None,
    world_size: int | None = None,
    cpus: int = 0,
    command: Sequence[str] = (),
) -> FileHead:
    """Return the first line of a process's file.

    Args:
        job: The job.
        who: As in ``FileHead``.
        role: The host's role.
        rank: Global rank.
        world_size: Number of ranks.
        cpus: Number of CPUs that the process may use.
        command: The command line, with secrets hidden.
    """
    return FileHead(
        t=time.time(),
        host=job.current_host,
        who=who,
        job=job.name,
        group=job.current_group.name,
        role=role,
        rank=rank,
        world_size=world_size,
        hosts={host: group.name for group in job.groups for host in group.hosts},
        instance_types={group.name: group.instance_type for group in job.groups},
        cpus=cpus,
        gpus=job.num_gpus,
        command=list(command),
        hyperparameters=shown("", job.hyperparameters) if rank is None else {},
    )


def gap_s(elapsed_s: float, least_s: float) -> float:
    """Return the seconds to wait before the next line of a series; the longer the series, the longer the wait.

    The increasing waits keep the file small: whenever a file in the checkpoint folder changes, the service uploads the
    whole file.

    Args:
        elapsed_s: Seconds since the series began.
        least_s: Minimum seconds between two lines.
    """
    return min(30.0, max(least_s, elapsed_s / 600))
