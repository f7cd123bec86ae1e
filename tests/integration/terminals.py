"""Read what processes write to a pseudo-terminal."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable

TIMEOUT_S = 60


def read_terminal(terminal: int, is_enough: Callable[[bytes], bool] = lambda _: False) -> bytes:
    """Read a terminal until the text is enough or, by default, until all processes that write to it have exited.

    Raises:
        AssertionError: This takes longer than ``TIMEOUT_S``; the message has the end of the text.
    """
    text, deadline = b"", time.monotonic() + TIMEOUT_S
    while not is_enough(text):
        left_s = max(0.0, deadline - time.monotonic())
        assert select.select([terminal], [], [], left_s)[0], f"nothing more was written than {text[-2000:]!r}"
        try:
            part = os.read(terminal, 4096)
        except OSError:  # how Linux reports that the other end is closed
            break
        if not part:
            break
        text += part
    return text
