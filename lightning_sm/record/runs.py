"""The reader of runs' records, which finds them in a job's folders and archives, and merges the files of all hosts."""

from __future__ import annotations

import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path, PurePosixPath

from lightning_sm.errors import JobConfigError
from lightning_sm.record.events import (
    FOLDER,
    LAUNCHER,
    FileHead,
    Line,
    file_attempt,
    find_files,
    is_record_file,
    read_file,
)

# A larger file is not a record: even a process that runs for a month writes less.
_MAX_FILE_BYTES = 2**30


@dataclass(frozen=True)
class ProcessRecord:
    """The lines of one process; if it was restarted, there are several records.

    Attributes:
        attempt: The attempt of the job, from 1.
        head: The head, which says who wrote it.
        lines: The lines after the head, in the order of writing.
    """

    attempt: int
    head: FileHead
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class RunRecord:
    """The records of all processes of a job.

    Attributes:
        name: Name of the job, or of the folder if the job has none.
        source: The folder or archive that it was read from.
        records: The records, in the order of attempts, hosts and processes.
    """

    name: str
    source: str
    records: tuple[ProcessRecord, ...]


def read_runs(sources: Sequence[Path], job: str | None = None) -> list[RunRecord]:
    """Read the records of runs.

    Args:
        sources: Folders with records in or below them, or tar archives of such folders. One source may hold several
            jobs, such as a checkpoint folder from which another job has resumed. One job's files may be in several
            sources.
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
        JobConfigError: The source has no record, or has those of several jobs and ``job`` names none.
    """
    runs = read_runs([source], job)
    if len(runs) > 1:
        names = ", ".join(run.name for run in runs)
        raise JobConfigError(f"{source} has the records of {len(runs)} jobs: {names}. Name one with --job.")
    return runs[0]


def _run(name: str, found: Iterable[tuple[str, ProcessRecord]]) -> RunRecord:
    found = list(found)
    # A file may exist twice: on the host, and where it was uploaded, perhaps without its end. Keep the longer one.
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
            extract_records(archive, Path(folder))
            return _of_folder(Path(folder))
    except (OSError, tarfile.TarError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise JobConfigError(f"{source} cannot be read: {reason}. Expected a folder or a tar archive.") from error


def extract_records(archive: tarfile.TarFile, folder: Path) -> int:
    """Copy the records of an archive under names of our own, because an archive may name any path.

    Args:
        archive: The archive, which may be a stream.
        folder: Receives them.

    Returns:
        How many there are.
    """
    found = 0
    for number, member in enumerate(archive):
        path = PurePosixPath(member.name)
        if not is_record_file(path) or not member.isfile() or member.size > _MAX_FILE_BYTES:
            continue
        content = archive.extractfile(member)
        if content is not None:
            copy = folder / str(number) / path.parent.name / path.name
            copy.parent.mkdir(parents=True)
            copy.write_bytes(content.read())
            found += 1
    return found


def _of_folder(folder: Path) -> list[ProcessRecord]:
    records = [record for path in find_files(folder) for record in _lives(path)]
    # Without a checkpoint folder, a job cannot know of earlier attempts and numbers each as the first one: count the
    # launcher's starts.
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
    """Return the records of all processes that have written to a file, one after another."""
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
