"""A worker's notes for its parent, which can read them even when the worker no longer runs Python code.

If the user's code raises an exception, the error names the sample. After a SIGSEGV in an image decoder or a SIGKILL for
lack of memory, only the notes do.
"""

from __future__ import annotations

import ctypes
import struct
from multiprocessing.sharedctypes import RawArray
from typing import Any

_MAX_TEXT_BYTES = 200
# The header starts with one of these, or with the size of the following text in bytes.
_NOTHING, _INDEX = 0xFFFE, 0xFFFF
_HEAD = struct.Struct("<Hq")


class WorkerNotes:
    """Memory that a worker shares with its parent, which allocates it before the worker starts."""

    def __init__(self) -> None:
        self._memory: Any = RawArray(ctypes.c_char, _HEAD.size + _MAX_TEXT_BYTES)
        self.clear()

    def set_index(self, index: int) -> None:
        """Record a sample by its index, an int64. This takes only 0.2 us; fetching a small sample takes a few us."""
        _HEAD.pack_into(self._memory, 0, _INDEX, index)

    def set_text(self, where: str) -> None:
        """Record another place in the user's code."""
        text = where.encode(errors="replace")[:_MAX_TEXT_BYTES]
        self._memory[_HEAD.size : _HEAD.size + len(text)] = text
        _HEAD.pack_into(self._memory, 0, len(text), 0)

    def clear(self) -> None:
        """Record that the worker is not in the user's code."""
        _HEAD.pack_into(self._memory, 0, _NOTHING, 0)

    def place(self) -> str:
        """Return the last place noted, such as "index 40", or "" if the worker was not in the user's code."""
        size, index = _HEAD.unpack_from(self._memory)
        if size == _NOTHING:
            return ""
        if size == _INDEX:
            return f"index {index}"
        return str(self._memory[_HEAD.size : _HEAD.size + size].decode(errors="replace"))
