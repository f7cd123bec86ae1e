"""The reader that follows the files of a run's record while the run writes them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from lightning_sm.record import events

# The window of rates. Lines become rarer the longer a job runs, so the newest one always counts.
_WINDOW_S = 15.0
_MAX_LINES = 64
_MAX_EVENTS = 50


@dataclass
class Writer:
    """The latest lines of one process of a job.

    Attributes:
        head: The newest head of its file.
        steps: Its newest steps.
        use: The last use of its host.
        metrics: The last metrics of the model.
        data: The last sums of data hosts and ranks.
        span: The last span besides its steps.
        recent_events: Its newest events.
        end: Its end.
    """

    head: events.FileHead
    steps: deque[events.Steps] = field(default_factory=lambda: deque(maxlen=_MAX_LINES))
    use: events.HostUse | None = None
    metrics: events.Metrics | None = None
    data: events.DataService | None = None
    span: events.Span | None = None
    recent_events: deque[events.Event] = field(default_factory=lambda: deque(maxlen=_MAX_EVENTS))
    end: events.End | None = None

    def recent_steps(self) -> list[events.Steps]:
        """Return the lines of the last seconds before the newest one."""
        if not self.steps:
            return []
        newest = self.steps[-1].t
        return [line for line in self.steps if newest - line.t <= _WINDOW_S]

    def take(self, line: events.Line) -> None:
        """Add a line."""
        match line:
            case events.FileHead():  # a restarted process continues the file
                self.head, self.end = line, None
                self.steps.clear()
            case events.Steps():
                self.steps.append(line)
            case events.HostUse():
                self.use = line
            case events.Metrics():
                self.metrics = line
            case events.DataService():
                self.data = line
            case events.Span():
                self.span = line
            case events.Event():
                self.recent_events.append(line)
            case events.End():
                self.end = line


class RecordTail:
    """The files of the newest attempt in some folders.

    Attributes:
        attempt: The attempt; 0 while there is no file.
    """

    def __init__(self) -> None:
        self.attempt = 0
        self._offsets: dict[Path, int] = {}
        self._writers: dict[Path, Writer] = {}

    def read(self, folders: set[Path]) -> list[Writer]:
        """Read what was added since the last call, and return all writers of the newest attempt.

        Args:
            folders: Folders of the record; they need not exist.
        """
        files = [path for folder in sorted(folders) if folder.is_dir() for path in events.find_files(folder)]
        self.attempt = max(map(events.file_attempt, files), default=0)
        current = {path for path in files if events.file_attempt(path) == self.attempt}
        self._writers = {path: writer for path, writer in self._writers.items() if path in current}
        for path in sorted(current):
            self._read_on(path)
        return list(self._writers.values())

    def _read_on(self, path: Path) -> None:
        offset = self._offsets.get(path, 0) if path in self._writers else 0
        try:
            with path.open("rb") as file:
                if file.seek(0, 2) < offset:  # a new file with this name
                    offset = 0
                    self._writers.pop(path, None)
                file.seek(offset)
                data = file.read()
        except OSError:  # the emulator has moved it away
            self._writers.pop(path, None)
            return
        end = data.rfind(b"\n") + 1  # the rest is still being written
        self._offsets[path] = offset + end
        for text in data[:end].decode(errors="replace").splitlines():
            line = events.from_json(text)
            if line is None:
                continue
            writer = self._writers.get(path)
            if writer is not None:
                writer.take(line)
            elif isinstance(line, events.FileHead):
                self._writers[path] = Writer(line)
