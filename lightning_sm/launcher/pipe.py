"""A pipe whose reader can stop once the pipe is empty, even if some process keeps it open."""

from __future__ import annotations

import io
import os
import select
import threading
from typing import IO

# How soon a reader of an empty pipe notices ``end_when_empty``.
_LOOK_MS = 100


class DrainedPipe(io.RawIOBase):
    """The read end of a pipe. Reading stops once all writers have closed it or, after ``end_when_empty``, it is empty.

    A daemon started by a script may keep the script's pipe open forever. A reader with a timeout would lose lines on a
    busy machine; this one reads all lines, however long that takes.

    Args:
        pipe: The read end; this object closes it.
    """

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self._poll = select.poll()
        self._poll.register(pipe, select.POLLIN)
        self._is_ending = threading.Event()

    def readable(self) -> bool:
        """Return True."""
        return True

    def end_when_empty(self) -> None:
        """Stop reading once the pipe is empty, because all relevant writers have exited. Any thread may call this."""
        self._is_ending.set()

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]  # any buffer
        """Fill the buffer as far as possible, and return the number of bytes read; 0 at the end."""
        is_ending = self._is_ending.is_set()  # read before polling: if set, the pipe already contains everything
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
