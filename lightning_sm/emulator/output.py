"""What all hosts write, line by line in one stream, each line with the name of its host."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from typing import BinaryIO

from lightning_sm.emulator.cluster import LocalHost

# ANSI colours that are readable on dark and on light terminals.
_COLOURS = (36, 33, 35, 32, 34, 31)
# A line without an end must not grow in memory; longer ones are shown in parts.
_MAX_LINE_BYTES = 64 * 1024


class Output:
    """The stream and the log files. Bytes pass through as they are, whatever their encoding.

    Args:
        stream: Where the lines go, for example ``sys.stdout.buffer``.
        names: Names of all hosts.

    Attributes:
        broken_by: The signal that a process gets which writes where nobody reads (as in ``| head``), once it happened.
    """

    def __init__(self, stream: BinaryIO, names: Sequence[str]) -> None:
        self.broken_by: int | None = None
        self._stream = stream
        self._lock = threading.Lock()
        width = max(len(name) for name in names)
        self._prefix = {name: f"{name:<{width}} | ".encode() for name in names}
        if stream.isatty() and not os.environ.get("NO_COLOR"):
            for index, (name, prefix) in enumerate(self._prefix.items()):
                colour = _COLOURS[index % len(_COLOURS)]
                self._prefix[name] = b"\x1b[%dm%s\x1b[0m" % (colour, prefix)

    def copy(self, host: LocalHost, pipe: BinaryIO) -> None:
        """Copy all that a host writes, until its last process closes the pipe.

        Args:
            host: The host.
            pipe: Its stdout and stderr.
        """
        with pipe, (host.base_dir / "output" / "log.txt").open("wb", buffering=0) as log:
            while line := pipe.readline(_MAX_LINE_BYTES):
                log.write(line)
                # A progress bar draws over itself; what it showed last is what a line can show.
                shown = line.rstrip(b"\r\n").rpartition(b"\r")[2]
                self._write(self._prefix[host.name] + shown + b"\n")

    def say(self, text: str) -> None:
        """Write lines of the emulator's own.

        Args:
            text: One or more lines.
        """
        self._write(text.encode("utf-8", errors="replace") + b"\n")

    def _write(self, data: bytes) -> None:
        if self.broken_by is not None:
            return
        try:
            with self._lock:
                self._stream.write(data)
                self._stream.flush()
        except (OSError, ValueError):  # ValueError: the stream was closed
            self.broken_by = signal.SIGPIPE
