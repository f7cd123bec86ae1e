"""The output of all hosts, merged into one stream in which each line starts with its host's name."""

from __future__ import annotations

import io
import os
import signal
import threading
from collections.abc import Sequence
from typing import BinaryIO

from lightning_sm.emulator.spec import LocalHost

# ANSI colours that are readable on dark and light terminals.
_COLOURS = (36, 33, 35, 32, 34, 31)
# Split longer lines, because an endless line would fill the memory.
_MAX_LINE_BYTES = 64 * 1024


class Output:
    """Writes the hosts' output to the stream and to log files, as bytes in whatever encoding the hosts use.

    Args:
        stream: Receives the lines, such as ``sys.stdout.buffer``.
        names: Names of all hosts.

    Attributes:
        broken_by: SIGPIPE once the reader of the stream has exited (as in ``| head``), else None.
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

    def copy(self, host: LocalHost, pipe: io.RawIOBase) -> None:
        """Copy a host's stdout and stderr, until the end of the pipe."""
        log_file = host.folder / "output" / "log.txt"
        with io.BufferedReader(pipe) as lines, log_file.open("wb", buffering=0) as log:
            is_written = True
            while line := lines.readline(_MAX_LINE_BYTES):
                try:
                    if is_written:
                        log.write(line)
                except OSError as error:  # keep reading: the host must not block, and its last lines must be shown
                    is_written = False
                    self.say(f"The rest of {host.name}'s output is not in {log.name}: {error.strerror}.")
                # Show only the last state of a progress bar, which overwrites itself.
                shown = line.rstrip(b"\r\n").rpartition(b"\r")[2]
                self._write(self._prefix[host.name] + shown + b"\n")

    def say(self, text: str) -> None:
        """Write one or more lines from the emulator."""
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
