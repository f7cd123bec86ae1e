"""The state of this process that preparing it for training changes, and that tests restore."""

from __future__ import annotations

import atexit
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_sm.job import failure_file


def forget_preparation() -> None:
    """Act like a process that ``prepare_process`` has not prepared."""
    module = sys.modules.get("lightning_sm.training.process")  # loads torch, which most tests do not need
    if module is not None and module.PreparedProcess.current is not None:
        module.PreparedProcess.current.end_run()
        module.PreparedProcess.current = None
        module.rank_zero_only.rank = 0
        module.stay_at_exit()


@contextmanager
def restored_process() -> Iterator[None]:
    """Restore the package's logger, the exception hook, Lightning's rank and the exit handlers on exit."""
    package, hook = logging.getLogger("lightning_sm"), sys.excepthook
    level, propagate, handlers = package.level, package.propagate, list(package.handlers)
    yield
    forget_preparation()
    package.setLevel(level)
    package.propagate, package.handlers, sys.excepthook = propagate, handlers, hook
    for reporter in failure_file._reporters.values():
        atexit.unregister(reporter._at_exit)
    failure_file._reporters.clear()
