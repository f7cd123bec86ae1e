"""What processes ask of the Linux kernel about their parents and their orphans; elsewhere, nothing happens."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping

# Set by the emulator to its process id: the hosts end with it, however it ends.
EMULATOR_VARIABLE = "LIGHTNING_SM_PARENT_PID"

# linux/prctl.h
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def end_with_emulator(env: Mapping[str, str]) -> bool:
    """Ask for SIGTERM when the emulator dies.

    Args:
        env: Environment variables; without the emulator's there is nothing to ask for.

    Returns:
        False if the emulator is dead already, so that nobody waits for this process.
    """
    if EMULATOR_VARIABLE not in env:
        return True
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    return env[EMULATOR_VARIABLE] == str(os.getppid())


def end_with_parent() -> None:
    """Ask for SIGKILL when the thread that started this process dies: for processes that are nothing without it."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans(wanted: bool) -> None:
    """Make processes whose parent died ours instead of init's, so that they can be found, ended and reaped.

    Args:
        wanted: Whether to do so from now on.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, int(wanted))


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
