"""A pipe whose end does not depend on who keeps it open: once its writers have exited, it ends when it is empty."""

from __future__ import annotations

import io
import os
import select
import threading
from typing import IO

# How soon a reader of an empty pipe notices that it is to end.
_LOOK_MS = 100


class DrainedPipe(io.RawIOBase):
    """The read end of a pipe. It ends when all writers have closed it, or after ``end_when_empty`` when it is empty.

    A daemon of a script may keep the script's pipe open for ever. A reader that therefore stops after some seconds
    loses lines on a machine that is busy: this one reads them all, however long it takes.

    Args:
        pipe: The read end, which this object owns from now on.
    """

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self._poll = select.poll()
        self._poll.register(pipe, select.POLLIN)
        self._is_ending = threading.Event()

    def readable(self) -> bool:
        """Return that this can be read."""
        return True

    def end_when_empty(self) -> None:
        """Let the pipe end when it is empty: the writers that count have exited. Any thread may call this."""
        self._is_ending.set()

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]  # any buffer
        """Read up to as many bytes as the buffer holds, and return their number; 0 at the end."""
        is_ending = self._is_ending.is_set()  # before the look: what the writers had left is there
        while not self._poll.poll(_LOOK_MS):
            if is_ending:
                return 0
            is_ending = self._is_ending.is_set()
        chunk = os.read(self._pipe.fileno(), len(buffer))
        buffer[: len(chunk)] = chunk
        return len(chunk)

    def close(self) -> None:
        """Close the pipe."""
        if not self.closed:
            self._pipe.close()
        super().close()
