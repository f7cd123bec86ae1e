"""The reader that follows the files of a run's record while the run writes them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from lightning_sm.record import events

# The window of rates. Lines become rarer the longer a job runs, so the newest one always counts.
_WINDOW_S = 15.0
_MAX_LINES = 64

_L = TypeVar("_L", bound=events.Line)


@dataclass
class Writer:
    """The latest lines of one process of a job.

    Attributes:
        head: The newest head of its file.
        offset: How many bytes of the file have been read.
        lines: Its newest lines by their class.
    """

    head: events.FileHead
    offset: int = 0
    lines: dict[type, deque[events.Line]] = field(default_factory=dict)

    def newest(self, kind: type[_L]) -> list[_L]:
        """Return its newest lines of a class, the newest one last."""
        return [line for line in self.lines.get(kind, ()) if isinstance(line, kind)]

    def recent_steps(self) -> list[events.Steps]:
        """Return the lines of the last seconds before the newest one."""
        lines = self.newest(events.Steps)
        return [line for line in lines if lines[-1].t - line.t <= _WINDOW_S]

    def take(self, line: events.Line) -> None:
        """Add a line."""
        if isinstance(line, events.FileHead):  # a restarted process continues the file
            self.head = line
            self.lines.pop(events.End, None)
            self.lines.pop(events.Steps, None)
        self.lines.setdefault(type(line), deque(maxlen=_MAX_LINES)).append(line)


class RecordTail:
    """The files of the newest attempt in some folders.

    Attributes:
        attempt: The attempt; 0 while there is no file.
    """

    def __init__(self) -> None:
        self.attempt = 0
        self._writers: dict[Path, Writer] = {}

    def read(self, folders: set[Path]) -> list[Writer]:
        """Read what was added since the last call, and return all writers of the newest attempt.

        Args:
            folders: Folders of the record; they need not exist.
        """
        files = [path for folder in sorted(folders) if folder.is_dir() for path in events.find_files(folder)]
        self.attempt = max(map(events.file_attempt, files), default=0)
        current = sorted(path for path in files if events.file_attempt(path) == self.attempt)
        found = {path: _read_on(path, self._writers.get(path)) for path in current}
        self._writers = {path: writer for path, writer in found.items() if writer is not None}
        return list(self._writers.values())


def _read_on(path: Path, writer: Writer | None) -> Writer | None:
    """Add to a writer what its file has now; return a new one where there was none, None where there is no head."""
    try:
        if writer is not None and path.stat().st_size < writer.offset:  # a new file with this name
            writer = None
        lines, offset = events.read_on(path, 0 if writer is None else writer.offset)
    except OSError:  # the emulator has moved it away
        return None
    for line in lines:
        if writer is not None:
            writer.take(line)
        elif isinstance(line, events.FileHead):
            writer = Writer(line)
    if writer is not None:
        writer.offset = offset
    return writer
