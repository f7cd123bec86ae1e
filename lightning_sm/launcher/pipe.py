"""A pipe whose end does not depend on who keeps it open: once its writers have exited, what it holds is the rest."""

from __future__ import annotations

import fcntl
import io
import os
import select
import sys
import termios
from typing import IO


class DrainedPipe(io.RawIOBase):
    """The read end of a pipe. It ends when all writers have closed it, or when ``end_when_empty`` was called.

    A daemon of a script may keep the script's pipe open for ever. A reader that therefore stops after some seconds
    loses lines on a machine that is busy: this one reads them all, however long it takes.

    Args:
        pipe: The read end, which this object owns from now on.
    """

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        readable, writable = os.pipe()
        self._is_ending = open(readable, "rb", buffering=0)  # noqa: SIM115 - closed by close()
        self._end = open(writable, "wb", buffering=0)  # noqa: SIM115 - closed by end_when_empty()
        self._poll = select.poll()
        self._poll.register(pipe, select.POLLIN)
        self._poll.register(self._is_ending, select.POLLIN)
        self._num_left: int | None = None

    def readable(self) -> bool:
        """Return that this can be read."""
        return True

    def end_when_empty(self) -> None:
        """Let the pipe end after what it holds now: the writers that count have exited. Any thread may call this."""
        self._end.close()

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]  # any buffer
        """Read up to as many bytes as the buffer holds, and return their number; 0 at the end."""
        if self._num_left is None:
            ready = {number for number, _ in self._poll.poll()}
            if self._is_ending.fileno() in ready:
                self._num_left = _num_bytes_in(self._pipe.fileno())
        size = len(buffer) if self._num_left is None else min(len(buffer), self._num_left)
        chunk = os.read(self._pipe.fileno(), size) if size else b""
        buffer[: len(chunk)] = chunk
        if self._num_left is not None:
            self._num_left -= len(chunk)
        return len(chunk)

    def close(self) -> None:
        """Close the pipe."""
        if not self.closed:
            self._pipe.close()
            self._is_ending.close()
            self._end.close()
        super().close()


def _num_bytes_in(pipe: int) -> int:
    """Return how many bytes can be read from a pipe without waiting for its writers."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)
