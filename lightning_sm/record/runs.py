"""Finds the records of runs in the folders and archives that a job leaves, and puts the files of all hosts together."""

from __future__ import annotations

import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path, PurePosixPath

from lightning_sm.errors import JobConfigError
from lightning_sm.record.events import FOLDER, LAUNCHER, FileHead, Line, file_attempt, find_files, read_file

# Larger ones are not records: that of a process that runs for a month has less.
_MAX_FILE_BYTES = 2**30


@dataclass(frozen=True)
class ProcessRecord:
    """What one process has written; a restarted one has several.

    Attributes:
        attempt: The attempt of the job, from 1.
        head: Who wrote it.
        lines: What follows the head, in the order of writing.
    """

    attempt: int
    head: FileHead
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class RunRecord:
    """What the processes of a job have written.

    Attributes:
        name: Name of the job, or of the folder if the job has none.
        source: The folder or archive that it was read from.
        records: In the order of attempts, hosts and processes.
    """

    name: str
    source: str
    records: tuple[ProcessRecord, ...]


def read_runs(sources: Sequence[Path], job: str | None = None) -> list[RunRecord]:
    """Read the records of runs.

    Args:
        sources: Folders in or below which records are, or tar archives of such folders. One may hold several jobs: a
            checkpoint folder that another job has resumed from. The files of one job may be in several of them.
        job: Name of the only job to read. Default: all.

    Returns:
        One run for each job, in the order in which they began.

    Raises:
        JobConfigError: A source cannot be read, or has no record.
    """
    records: dict[str, list[tuple[str, ProcessRecord]]] = defaultdict(list)
    for source in sources:
        found = _records(source)
        if not found:
            raise JobConfigError(
                f"{source} has no record of a run: no files {FOLDER}/ATTEMPT/HOST-*.jsonl. A job writes them into its "
                "checkpoint folder if it has one, else into its output data (output.tar.gz on SageMaker)."
            )
        for record in found:
            records[record.head.job or source.absolute().name].append((str(source), record))
    if job is not None and job not in records:
        known = ", ".join(sorted(records))
        raise JobConfigError(f"There is no record of the job {job} in {_names(sources)}, only of: {known}.")
    runs = [_run(name, found) for name, found in records.items() if job in (None, name)]
    return sorted(runs, key=lambda run: min(record.head.t for record in run.records))


def read_run(source: Path, job: str | None = None) -> RunRecord:
    """Read the record of one run; see ``read_runs``.

    Raises:
        JobConfigError: The source has no record, or those of several jobs of which none is named.
    """
    runs = read_runs([source], job)
    if len(runs) > 1:
        names = ", ".join(run.name for run in runs)
        raise JobConfigError(
            f"{source} has the records of {len(runs)} jobs: {names}. Name one with --job (compare: --jobs)."
        )
    return runs[0]


def _run(name: str, found: Iterable[tuple[str, ProcessRecord]]) -> RunRecord:
    found = list(found)
    # A file may be there twice: on the host, and where it was uploaded to, which may lack its end.
    longest: dict[tuple[int, str, str, float], ProcessRecord] = {}
    for _, record in found:
        key = (record.attempt, record.head.host, record.head.who, record.head.t)
        if key not in longest or len(longest[key].lines) < len(record.lines):
            longest[key] = record
    records = sorted(
        longest.values(), key=lambda record: (record.attempt, record.head.host, record.head.who, record.head.t)
    )
    return RunRecord(name, ", ".join(dict.fromkeys(source for source, _ in found)), tuple(records))


def _records(source: Path) -> list[ProcessRecord]:
    try:
        if source.is_dir():
            return _of_folder(source)
        with tempfile.TemporaryDirectory(prefix="lightning_sm-") as folder, tarfile.open(source) as archive:
            _extract(archive, Path(folder))
            return _of_folder(Path(folder))
    except (OSError, tarfile.TarError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise JobConfigError(f"{source} cannot be read: {reason}. Expected a folder or a tar archive.") from error


def _extract(archive: tarfile.TarFile, folder: Path) -> None:
    """Copy the records of an archive, under names of our own: an archive may name any path."""
    for number, member in enumerate(archive):
        path = PurePosixPath(member.name)
        is_record = path.suffix == ".jsonl" and path.parent.name.isdecimal()
        if not is_record or not member.isfile() or member.size > _MAX_FILE_BYTES:
            continue
        content = archive.extractfile(member)
        if content is not None:
            copy = folder / str(number) / path.parent.name / path.name
            copy.parent.mkdir(parents=True)
            copy.write_bytes(content.read())


def _of_folder(folder: Path) -> list[ProcessRecord]:
    records = [record for path in find_files(folder) for record in _lives(path)]
    # Without a checkpoint folder a job calls each attempt the first one, because it cannot know of those before.
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


def _lives(path: Path) -> list[ProcessRecord]:
    """What each process has written that has gone on with this file."""
    records: list[ProcessRecord] = []
    head: FileHead | None = None
    for is_head, lines in groupby(read_file(path), key=lambda line: isinstance(line, FileHead)):
        if is_head:
            *_, head = (line for line in lines if isinstance(line, FileHead))
        elif head is not None:
            records.append(ProcessRecord(file_attempt(path), head, tuple(lines)))
    return records


def _names(sources: Iterable[Path]) -> str:
    return ", ".join(map(str, sources))
