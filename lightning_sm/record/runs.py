"""The reader of run records, which finds the files in a job's folders and archives and merges those of all hosts."""

from __future__ import annotations

import logging
import math
import tarfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path, PurePath, PurePosixPath

from lightning_sm._text import count, duration, listed
from lightning_sm.errors import JobConfigError
from lightning_sm.record import events
from lightning_sm.record.events import LAUNCHER, End, FileHead, Line, Span, Steps

logger = logging.getLogger(__name__)

# Limits on gaps between two lines (beyond the time that the second line measures) and on lines out of order. If either
# is exceeded, the clock was set, or the host was suspended.
_SILENCE_S, _DISORDER_S = 600.0, 60.0


@dataclass(frozen=True)
class ProcessRecord:
    """The lines of one process. A restarted process has a separate record.

    Attributes:
        attempt: The job's attempt, counted from 1.
        head: The head, which identifies the process.
        lines: The lines after the head, in the order of writing.
        num_left_out: Number of lines skipped because they are damaged or of an unknown kind.
        jump_s: The largest jump of the process's clock, in seconds; 0 without jumps.
    """

    attempt: int
    head: FileHead
    lines: tuple[Line, ...]
    num_left_out: int = 0
    jump_s: float = 0.0


@dataclass(frozen=True)
class RunRecord:
    """The records of all processes of a job.

    Attributes:
        name: Name of the job, or of the folder if the job has no name.
        source: The folders or archives with the records.
        records: The records, ordered by attempt, host and process.
    """

    name: str
    source: str
    records: tuple[ProcessRecord, ...]

    @property
    def flaws(self) -> str:
        """Problems with the record, in a sentence or two; empty if there are none."""
        num_left_out = sum(record.num_left_out for record in self.records)
        jump_s, host = max(((record.jump_s, record.head.host) for record in self.records), default=(0.0, ""))
        lines, jump = count(num_left_out, "line"), duration(jump_s)
        flaws = [f"Skipped {lines} of the record: damaged, or from another version."] if num_left_out else []
        flaws += [f"The clock of {host} jumped by {jump}: durations and costs may be off by as much."] if jump_s else []
        present = {record.attempt for record in self.records}
        missing = [str(number) for number in range(1, max(present, default=0)) if number not in present]
        flaws += [f"No record of attempt {listed(missing)}."] if missing else []
        flaws += [f"{what}: clocks differ, so times and costs may be off by as much." for what in self._impossible()]
        return " ".join(flaws)

    def _impossible(self) -> Iterator[str]:
        """Yield gaps between the hosts of an attempt, and overlaps of attempts, that cannot be if all clocks agree."""
        before = -math.inf
        for attempt, records in groupby(self.records, key=lambda record: record.attempt):
            times: dict[str, list[float]] = defaultdict(list)
            for record in records:
                times[record.head.host] += [record.head.t, *(line.t for line in record.lines)]
            (first, own), *others = sorted(times.items(), key=lambda item: min(item[1]))
            if before - min(own) > _DISORDER_S:
                yield f"Attempt {attempt} began {duration(before - min(own))} before the end of the previous one"
            ended = max(own), first
            for host, own in others:
                apart_s = min(own) - ended[0]
                if apart_s > _DISORDER_S:
                    yield f"In attempt {attempt}, {host} began {duration(apart_s)} after the end of {ended[1]}"
                ended = max(ended, (max(own), host))
            before = ended[0]


def read_runs(sources: Sequence[Path], job: str | None = None) -> list[RunRecord]:
    """Read the records of runs.

    Args:
        sources: Folders with records in or below them, or tar archives of such folders. A source may contain several
            jobs, such as a checkpoint folder from which another job has resumed. The files of a job may be spread over
            several sources.
        job: Name of the only job to read. If None, read all jobs.

    Returns:
        One run per job, in the order in which they began.

    Raises:
        JobConfigError: A source cannot be read, or has no record.
    """
    records: dict[str, list[tuple[str, ProcessRecord]]] = defaultdict(list)
    for source in sources:
        for record in _records(source):
            records[record.head.job or source.absolute().name].append((str(source), record))
    if job is not None and job not in records:
        where, known = ", ".join(map(str, sources)), ", ".join(sorted(records))
        raise JobConfigError(f"There is no record of the job {job} in {where}, only of: {known}.")
    runs = [_run(name, of_job) for name, of_job in records.items() if job in (None, name)]
    return sorted(runs, key=lambda run: min(record.head.t for record in run.records))


def read_run(source: Path, job: str | None = None) -> RunRecord:
    """Read the record of one run; see ``read_runs``.

    Raises:
        JobConfigError: The source has no record, or it has records of several jobs and ``job`` is None.
    """
    runs = read_runs([source], job)
    if len(runs) > 1:
        names = ", ".join(run.name for run in runs)
        raise JobConfigError(f"{source} contains records of {len(runs)} jobs: {names}. Name one with --job.")
    return runs[0]


def _run(name: str, records: Sequence[tuple[str, ProcessRecord]]) -> RunRecord:
    # The sources may contain a file twice: the host's own copy, and an uploaded copy that may lack the end. Keep the
    # longer copy.
    by_length = sorted((record for _, record in records), key=lambda record: len(record.lines))
    longest = {(record.attempt, record.head.host, record.head.who, record.head.t): record for record in by_length}
    sources = ", ".join(dict.fromkeys(source for source, _ in records))
    return RunRecord(name, sources, tuple(longest[key] for key in sorted(longest)))


def archived_files(archive: tarfile.TarFile) -> Iterator[tuple[PurePosixPath, bytes]]:
    """Yield the paths and contents of the record files in an archive, which may be a stream."""
    for member in archive:
        path = PurePosixPath(member.name)
        content = archive.extractfile(member) if events.file_attempt(path) else None
        if content is not None:
            yield path, content.read()


def _records(source: Path) -> list[ProcessRecord]:
    """Read the files of a source.

    Raises:
        JobConfigError: The source cannot be read, or has no record.
    """
    files: list[tuple[PurePath, bytes]]
    try:
        if source.is_dir():
            files = [(path, path.read_bytes()) for path in events.find_files(source)]
        else:
            with tarfile.open(source) as archive:
                files = list(archived_files(archive))
    except (OSError, tarfile.TarError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise JobConfigError(f"{source} cannot be read: {reason}. Expected a folder or a tar archive.") from error
    records = [record for path, content in files for record in _lives(path, content)]
    if not records:
        found = "no lines after the header in the files" if files else "no files"
        raise JobConfigError(
            f"{source} has no record of a run: {found} {events.FOLDER}/ATTEMPT/HOST-*.jsonl. A job writes them "
            "to its checkpoint folder if it has one, else to its output data (output.tar.gz on SageMaker)."
        )
    # Without a checkpoint folder, a job does not see earlier attempts and numbers each attempt 1. Count the launcher's
    # starts instead.
    starts: dict[tuple[str | None, int, str], set[float]] = defaultdict(set)
    for record in records:
        if record.head.who == LAUNCHER:
            starts[_launcher(record)].add(record.head.t)
    return [
        replace(record, attempt=record.attempt + max(0, sum(t <= record.head.t for t in starts[_launcher(record)]) - 1))
        for record in records
    ]


def _launcher(record: ProcessRecord) -> tuple[str | None, int, str]:
    return record.head.job, record.attempt, record.head.host


def _lives(path: PurePath, content: bytes) -> list[ProcessRecord]:
    """Split a file into the records of the processes that wrote to it, one after another."""
    records: list[ProcessRecord] = []
    head: FileHead | None = None
    lines = events.read_lines(content)
    num_left_out = sum(map(bool, content.split(b"\n"))) - len(lines)
    for is_head, own in groupby(lines, key=lambda line: isinstance(line, FileHead)):
        if is_head:
            *_, head = (line for line in own if isinstance(line, FileHead))
        elif head is None:
            num_left_out += len(list(own))
        else:
            written = tuple(own)
            jump_s = _jump_s((head, *written))
            records.append(ProcessRecord(events.file_attempt(path), head, written, num_left_out, jump_s))
            num_left_out = 0
    if num_left_out and not records:
        logger.warning(
            "%s: its %s cannot be read, because the first one is damaged.", path, count(num_left_out, "line")
        )
    return records


def _jump_s(lines: Sequence[Line]) -> float:
    """Return the largest jump of a process's clock in seconds, forward or backward."""
    jumps = [0.0]
    for before, line in pairwise(lines):
        elapsed_s = line.t - before.t
        # After training, the script may run other code for any length of time, so a gap there is not a jump.
        is_silent = elapsed_s > _lasted_s(line) + _SILENCE_S and not isinstance(before, End)
        if is_silent or elapsed_s < -_DISORDER_S:
            jumps.append(abs(elapsed_s))
    return max(jumps)


def _lasted_s(line: Line) -> float:
    return line.wall_s if isinstance(line, Steps) else line.seconds if isinstance(line, Span) else 0.0
