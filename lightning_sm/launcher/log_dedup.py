"""The condensed log of several processes: each traceback, usage text and warning once."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import TypeAlias

from lightning_sm._text import times
from lightning_sm.job import traceback_text
from lightning_sm.launcher.failure import USAGE, USAGE_ERROR

_HEADER = b"Traceback (most recent call last):"
# Hold back a partial line that may become one of these.
_BEGINNINGS = (_HEADER, b"usage: ", b"[rank")
# A traceback has a header and a frame before its exception.
_MIN_LINES = 2
# More lines than any traceback or usage text has: longer blocks are something else, and are released.
_MAX_LINES = 1000
# How many lines after a block (the rest of a message) are compared with those after its first occurrence.
_MAX_FOLLOWING = 60
# How many blocks are remembered: a script may log, for days, exceptions that it survives.
_MAX_SHOWN = 100

_Key: TypeAlias = tuple[str, ...]


@dataclass
class _Shown:
    """A block that was shown: who wrote it, and the lines after it."""

    source: str
    is_warning: bool = False
    following: list[str] = field(default_factory=list)


@dataclass
class _LogStream:
    """The lines of one process, or of one rank that marks its lines."""

    held: list[bytes] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    # After a block that was shown, ``behind`` is that block. After a repeated block, ``expected`` holds the lines that
    # need not be shown either.
    behind: _Shown | None = None
    expected: list[str] = field(default_factory=list)


class Condensed:
    """The rule for what to show of the lines that several processes write. It has no clock and does no I/O.

    Args:
        only_across_sources: Whether each source is condensed already, so that only repeats of other sources are left
            out.
    """

    def __init__(self, *, only_across_sources: bool = False) -> None:
        self._only_across_sources = only_across_sources
        self._streams: dict[tuple[str, str], _LogStream] = {}
        self._shown: OrderedDict[_Key, _Shown] = OrderedDict()
        self._repeats: dict[_Key, Counter[str]] = {}

    @property
    def holds(self) -> bool:
        """Whether there are lines that ``flush`` would return."""
        return any(stream.held for stream in self._streams.values())

    @property
    def has_repeats(self) -> bool:
        """Whether ``take_repeats`` would return lines."""
        return bool(self._repeats)

    def feed(self, line: bytes, source: str = "") -> list[bytes]:
        """Take a line, and return the lines to show now: none while a block is incomplete, or if it is left out.

        Args:
            line: The line, with its line break.
            source: The process that wrote it.
        """
        text = traceback_text.ANSI.sub("", line.decode("utf-8", "replace")).rstrip()
        rank = traceback_text.RANK.match(text)
        mark = rank.group().rstrip() if rank is not None else ""
        text = text.removeprefix(mark).removeprefix(" ") if mark else text
        stream = self._streams.setdefault((source, mark), _LogStream())
        writer = f"{source} {mark.strip('[]: ')}".strip()
        if stream.held:
            return self._continue(stream, line, text, source, writer)
        if traceback_text.WARNING.match(text):
            stream.behind, stream.expected = None, []
            return self._shown_once(stream, (text,), [line], source, writer, is_warning=True)
        start = traceback_text.START.search(text)
        # A traceback whose rank stands in mid-line follows a progress bar; its other lines belong to the rank's stream.
        if USAGE.match(text) or (start is not None and start["rank"] is None):
            stream.held, stream.texts = [line], [text]
            return []
        return [] if self._is_left_out(stream, text) else [line]

    def flush(self, source: str = "") -> list[bytes]:
        """Return the held lines of a process that has paused or exited."""
        lines = []
        for (owner, _), stream in self._streams.items():
            if owner == source:
                lines += stream.held
                stream.held = []
        return lines

    def take_repeats(self) -> list[str]:
        """Return a line for each block that was repeated since the last call, with the number of repeats."""
        lines = []
        for key, writers in self._repeats.items():
            number = writers.total()
            by = ", ".join(filter(None, writers))
            lines.append(f"{key[-1]} (repeated {times(number)}{f', by {by}' if by else ''}; not shown again)")
        self._repeats.clear()
        return lines

    def _continue(self, stream: _LogStream, line: bytes, text: str, source: str, writer: str) -> list[bytes]:
        stream.held.append(line)
        stream.texts.append(text)
        is_usage = USAGE.match(stream.texts[0]) is not None
        last = USAGE_ERROR if is_usage else traceback_text.EXCEPTION
        if last.match(text) and (is_usage or len(stream.held) > _MIN_LINES):
            return self._complete(stream, source, writer)
        belongs = text.startswith((" ", "tip: ")) if is_usage else text.startswith("  ")
        if belongs and len(stream.held) < _MAX_LINES:
            return []
        lines, stream.held = stream.held, []
        return lines

    def _complete(self, stream: _LogStream, source: str, writer: str) -> list[bytes]:
        """Show a block, or count it."""
        lines, texts = stream.held, stream.texts
        stream.held, stream.behind, stream.expected = [], None, []
        return self._shown_once(stream, tuple(texts[1:]), lines, source, writer)

    def _shown_once(
        self, stream: _LogStream, key: _Key, lines: list[bytes], source: str, writer: str, *, is_warning: bool = False
    ) -> list[bytes]:
        shown = self._shown.get(key)
        if shown is not None and not (self._only_across_sources and shown.source == source):
            self._repeats.setdefault(key, Counter())[writer] += 1
            stream.expected = list(shown.following)
            return []
        stream.behind = self._shown[key] = _Shown(source, is_warning)
        if len(self._shown) > _MAX_SHOWN:
            self._shown.popitem(last=False)
        return lines

    def _is_left_out(self, stream: _LogStream, text: str) -> bool:
        if stream.behind is not None and stream.behind.is_warning and not text.startswith("  "):
            stream.behind = None
        if stream.behind is not None:
            stream.behind.following.append(text)
            if len(stream.behind.following) == _MAX_FOLLOWING:
                stream.behind = None
        if stream.expected and stream.expected[0] == text:
            del stream.expected[0]
            return True
        stream.expected = []
        return False


class CondensedBytes:
    """``Condensed`` for the output of one process in pieces, which may end in mid-line, as a progress bar's do."""

    def __init__(self) -> None:
        self.condensed = Condensed()
        self._pending = b""

    def feed(self, chunk: bytes) -> bytes:
        """Take a piece, and return what to show now."""
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        shown = b"".join(piece for line in lines for piece in self.condensed.feed(line + b"\n"))
        tail = self._pending
        if not self.condensed.holds and not any(start[: len(tail)] == tail[: len(start)] for start in _BEGINNINGS):
            shown += tail
            self._pending = b""
        return shown

    @property
    def has_more(self) -> bool:
        """Whether ``flush`` would return something."""
        return bool(self._pending) or self.condensed.holds or self.condensed.has_repeats

    def flush(self) -> bytes:
        """Return what is held back, when the process has paused or exited."""
        tail, self._pending = self._pending, b""
        notes = "".join(f"{line}\n" for line in self.condensed.take_repeats())
        return b"".join(self.condensed.flush()) + tail + notes.encode()
