"""Python's garbage collector in the processes of a job."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def pause_collector() -> Iterator[None]:
    """Pause the collector during the import of torch and Lightning, of whose CPU time it would take a quarter."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@functools.cache
def freeze_imports() -> None:
    """Let the collector skip all objects that exist now: mostly modules, which live as long as the process anyway.

    With Lightning, there are a million of them. Examining them again took 1.5 of the 6.5 s of CPU time of a process
    that only imports Lightning and exits: time that an interrupted host does not have. Processes that are forked later
    share the pages (``gc.freeze`` in Python's documentation). Further calls do nothing, so that no garbage of a
    training is kept.
    """
    gc.freeze()
