"""The lines of a run's record, which the processes of a job write while it runs, and how they are read again.

Each process appends lines of JSON to a file of its own, ``<record folder>/<attempt>/<host>-<who>.jsonl``: launchers
(``launcher``), and training processes (``rank-3``). The folder lies in the checkpoint folder if the job has one,
because only that survives a killed attempt; else in the output data, which one archive collects from all hosts.

A file begins with a ``FileHead``; another one follows wherever a restarted process continues the file. Each kind of
line has a class below, whose tag names it in JSON (``kind``). ``t`` is the time in seconds since the Unix epoch; all
other times are in seconds, too.
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
from lightning_sm.job.redaction import HIDDEN, shown
from lightning_sm.job.variables import RECORD_DIR

logger = logging.getLogger(__name__)

FOLDER = "lightning-sm-record"
LAUNCHER = "launcher"
# How a job, a host, or the run of a rank's Trainer ends; see ``End``.
SUCCEEDED, FAILED, INTERRUPTED, STOPPED = "succeeded", "failed", "interrupted", "stopped"
# The parts of a training step, in order, and what people read for them. "backward" includes the exchange of gradients,
# with which DistributedDataParallel overlaps it; "other" is the time that no hook of Lightning tells apart.
PARTS = {
    "data_wait": "waiting for data",
    "to_device": "to the device",
    "forward": "forward",
    "backward": "backward, with gradient exchange",
    "optimizer": "optimizer",
    "other": "other",
}
# What people read for the spans outside the steps, by their names in the record; see ``Span``.
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
# What a line may say: any other value is that of a damaged one, which readers leave out.
Natural: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, lt=1e10)]
Share: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1)]
_ENDING = ".jsonl"
# Such as "1/algo-1-launcher.jsonl"; names of hosts contain dashes, too.
_FILE = re.compile(rf"(?:.*/)?([1-9][0-9]*)/[^/]+-(?:{LAUNCHER}|rank-[0-9]+)\.jsonl", re.DOTALL)


class Line(msgspec.Struct, frozen=True, tag_field="kind", omit_defaults=True):
    """A line of a record.

    Attributes:
        t: A time, in seconds since the Unix epoch.
    """

    t: Seconds


class FileHead(Line, frozen=True, tag="file"):
    """The writer of a file: its first line, and another one whenever a restarted process continues it.

    Attributes:
        t: When the process began to write.
        host: Its host.
        who: ``launcher`` or ``rank-<global rank>``.
        job: Name of the job, if it is known.
        group: Instance group of the host.
        role: ``trainer`` or ``data``.
        rank: Global rank; None for a launcher.
        world_size: Number of ranks; None for a launcher.
        hosts: Instance group of each host of the job, by its name.
        instance_types: Instance type of each group, by its name; None if unknown.
        cpus: Number of CPUs that the process may use.
        gpus: Number of GPUs of the host.
        command: The command line of the script, secrets hidden; empty for ranks.
        hyperparameters: Those of the job, secrets hidden; empty for ranks.
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
        use: Share of the time in which any kernel ran, 0 to 1. It does not say how much of the GPU was busy.
        memory_bytes: Memory in use.
        memory_total_bytes: All memory of the GPU.
    """

    use: Share
    memory_bytes: Natural
    memory_total_bytes: Natural


class HostUse(Line, frozen=True, tag="use"):
    """The use of a host since the previous line; a launcher writes one every few seconds.

    Attributes:
        t: When it was measured.
        cpu: Share of all its CPUs in use, 0 to 1.
        memory_bytes: Memory in use.
        memory_total_bytes: Memory that the job may use.
        gpus: Use of its GPUs; empty if there are none, or if NVML is not installed.
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
        """Share of the time in which any kernel ran, the mean of the GPUs."""
        return fmean(gpu.use for gpu in self.gpus) if self.gpus else None

    @property
    def gpu_memory(self) -> float | None:
        """Share of the GPUs' memory in use, 0 to 1."""
        total = sum(gpu.memory_total_bytes for gpu in self.gpus)
        return sum(gpu.memory_bytes for gpu in self.gpus) / total if total else None


class Loader(Line, frozen=True, tag="loader"):
    """The source of a rank's training batches; written when its training begins.

    Attributes:
        t: When it was written.
        workers: Worker processes that this rank's loader asks for; 0 if the training process itself builds the batches.
            Those of data hosts, which take their place, are in ``DataService``.
        cpus: Number of CPUs that this rank's process may use, together with the other ranks of the host.
        ranks_of_host: Number of ranks on the host.
        batch: Training batches that are done when the training begins or resumes.
    """

    workers: Natural = 0
    cpus: Natural = 0
    ranks_of_host: Natural = 1
    batch: Natural = 0


class Steps(Line, frozen=True, tag="steps"):
    """Consecutive training steps of a rank. A step is one training batch.

    Spans between the steps are not part of them. Nor is the first step of a process, which may compile: it is in the
    span ``first_batch``.

    Attributes:
        t: When the last one ended.
        step: ``trainer.global_step`` after it, which counts optimizer steps.
        n: Number of steps.
        samples: Number of samples in this rank's batches; 0 if it is unknown.
        parts: Seconds by part (``PARTS``), of all of them together.
        gpu_parts: Whether forward, backward and optimizer were measured on the GPU, every few steps. Else they are the
            time of the host, which only launches the work of a GPU.
        untimed: Number of steps since the line before that are in no other field: the first one of a process.
    """

    step: Natural
    n: Natural
    samples: Natural = 0
    parts: Mapping[str, Seconds] = msgspec.field(default_factory=dict)
    gpu_parts: bool = False
    untimed: Natural = 0

    @property
    def wall_s(self) -> float:
        """The seconds of all of them together."""
        return sum(self.parts.values())


class Span(Line, frozen=True, tag="span"):
    """A span of time outside the steps.

    Attributes:
        t: When it ended.
        name: ``startup`` (from the start of the process until the training begins), ``first_batch`` (until the first
            step has ended, which may start workers and compile), ``between`` (from the last step of an epoch until the
            first batch of the next one), ``validation``, ``checkpoint``, ``export``, ``test``, ``predict``; from
            launchers, ``preparation`` (code and requirements).
        begin: When it began, in the same seconds as ``t``.
        seconds: How long it took, without other spans inside it.
    """

    name: str
    begin: Seconds
    seconds: Seconds


class Metrics(Line, frozen=True, tag="metrics"):
    """The metrics that the model logged; rank 0 writes them.

    Attributes:
        t: When they were written.
        step: ``trainer.global_step``.
        epoch: The epoch, from 0.
        values: The metrics by name; None in place of NaN and infinity.
    """

    step: Natural
    epoch: Natural
    values: Mapping[str, float | None] = msgspec.field(default_factory=dict)


class DataService(Line, frozen=True, tag="data"):
    """The work of data hosts and trainer ranks, as sums since the start; rank 0 of a job with data hosts writes it.

    Attributes:
        t: When it was written.
        hosts: The fields of ``HostFigures`` (lightning_sm.data.protocol.figures) of each data host.
        ranks: The fields of ``RankFigures`` (lightning_sm.data.protocol.figures) by name of the rank.
    """

    hosts: Sequence[Mapping[str, Any]] = msgspec.field(default_factory=list)
    ranks: Mapping[str, Mapping[str, Any]] = msgspec.field(default_factory=dict)


class Event(Line, frozen=True, tag="event"):
    """An event.

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
        msgspec.structs.force_setattr(self, "text", _without_secrets(self.text))


class End(Line, frozen=True, tag="end"):
    """The end of a launcher, or of the run of a rank's Trainer. A killed process writes none.

    Attributes:
        t: When it ended.
        outcome: ``succeeded``, ``failed``, ``interrupted`` (it can resume from a checkpoint) or ``stopped``.
        exit_code: Exit code of the host, in the launcher's line.
        reason: Why the job did not succeed if ``job_outcome`` is known, else why this host did not, in one line.
        job_outcome: How the job ended, in the same words, in the line of a launcher that has learned it. A host that
            was ended because another one had failed is ``stopped``, but its job has ``failed``.
    """

    outcome: str
    exit_code: int | None = None
    reason: str = ""
    job_outcome: str | None = None

    def __post_init__(self) -> None:
        """Hide secrets."""
        msgspec.structs.force_setattr(self, "reason", _without_secrets(self.reason))


_DECODER = msgspec.json.Decoder(Union[tuple(Line.__subclasses__())])  # noqa: UP007 - of all of them


def record_folder(job: SageMakerJob) -> Path:
    """Return the folder of a job's record on this host."""
    return (job.checkpoint_dir or job.output_dir / "data") / FOLDER


def file_attempt(path: PurePath) -> int:
    """Return the attempt to which a record's file ATTEMPT/HOST-PROCESS.jsonl belongs; 0 if a path is another one."""
    found = _FILE.fullmatch(path.as_posix())
    return 0 if found is None else int(found[1])


def find_files(folder: Path) -> list[Path]:
    """Return the files of records in and below a folder.

    Args:
        folder: A record's folder, or one above it, such as the unpacked output data of a job.
    """
    return sorted(filter(file_attempt, folder.rglob(f"*{_ENDING}")))


def read_lines(content: bytes) -> list[Line]:
    """Read the lines of a file.

    Malformed ones are left out, such as one that is still being written or was cut short, and unknown kinds.
    """
    lines: list[Line] = []
    for text in content.split(b"\n"):
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            lines.append(_DECODER.decode(text))
    return lines


class Recorder:
    """The writer of this process's file.

    A line is written at once, so that it survives even a kill of the process. Nothing is raised, because a job must not
    fail because of its record; an obstacle, such as a full disk, is logged once.

    Args:
        path: The file; its folder is made.

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
            # The line break comes first: an earlier process may have been killed within a line.
            os.write(self._file, b"\n" + encode(line))
        except (OSError, ValueError, TypeError) as error:
            self._has_failed = True
            logger.warning("The record of this run ends here: %s cannot be written: %s", self.path, error)

    def close(self) -> None:
        """Close the file; a later line reopens it."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def open_record(job: SageMakerJob, who: str, env: Mapping[str, str] = os.environ) -> Recorder:
    """Return the recorder of a process; nothing is written yet.

    Its file is in the folder of this attempt: the one that the launcher named, else the next one.

    Args:
        job: The job.
        who: As in ``FileHead``. The next attempt follows from this process's own files, because those of other hosts
            may or may not be there yet.
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
        command: The command line, without secrets.
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


def _without_secrets(said: str) -> str:
    """Return what people may see of a text that another program wrote: the part before what it says of a secret."""
    words = said.split(" ")
    for number in range(len(words)):
        # argparse writes "argument --token/-t: " before the value.
        begin = " ".join(words[: number + 1]).replace("/", " ").replace(": ", "= ")
        if shown("", begin) == HIDDEN:
            return f"{shown('', ' '.join(words[:number]))} {HIDDEN}".lstrip()
    return str(shown("", said))


def gap_s(elapsed_s: float, least_s: float) -> float:
    """Return the seconds until the next line of a series: few at first, then more and more.

    So its file stays small: the service uploads a file of the checkpoint folder as a whole whenever it has changed.

    Args:
        elapsed_s: Seconds since the series began.
        least_s: Seconds between two lines at first.
    """
    return min(30.0, max(least_s, elapsed_s / 600))
