"""How the kernel treats a process: signals, the death of its parent, orphans. On systems but Linux, no-ops."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

# The longest single wait of a main thread that handles signals. Python runs handlers in the main thread, between two
# instructions; the kernel may give a signal to any other thread, or to this one just before it blocks. A wait without a
# limit would continue, and the handler of SIGTERM would not run until the script exits by itself.
SIGNAL_POLL_S = 1.0
# linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def terminate_with_parent(parent_pid: int) -> bool:
    """Get SIGTERM when the parent dies.

    Args:
        parent_pid: Process id that the parent had when it started this process.

    Returns:
        False if the parent is already dead: then no signal comes.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    return os.getppid() == parent_pid


def kill_with_parent() -> None:
    """Get SIGKILL when the thread that started this process dies."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans(wanted: bool) -> None:
    """Make processes whose parent died ours instead of init's, so that they can be found, ended and reaped."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(wanted))


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
