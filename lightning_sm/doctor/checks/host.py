"""Checks of the machine and of its process 1."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil

from lightning_sm._linux import missing_on_this_system
from lightning_sm.doctor.context import Context, text_of
from lightning_sm.doctor.report import Result, ok, warning

_GIB = 1 << 30
_SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh", "ksh", "busybox"})


def machine(_context: Context) -> Iterator[Result]:
    """Show CPUs, memory and kernel, and what the kernel lacks."""
    memory = psutil.virtual_memory().total / _GIB
    kernel = os.uname()
    yield ok("machine", f"CPUs: {os.cpu_count()}, memory: {memory:.1f} GiB, {kernel.sysname} {kernel.release}")
    missing = missing_on_this_system()
    if missing:
        yield warning("system", missing, "Run them in a Linux container, or leave the data groups out.")


def signals(context: Context) -> Iterator[Result]:
    """Find out whether SIGTERM, which the service sends to process 1, would reach the training script."""
    user = f"user {os.getuid()}"
    if os.getpid() == 1:
        yield ok("signals", f"{user}, process 1: it gets the signals of the service")
        return
    command = (text_of(context.proc / "1" / "cmdline") or "").split("\0")
    name = Path(command[0]).name.lstrip("-")
    first = f"process 1 is {' '.join(command)[:60].strip() or 'unknown'}"
    status = text_of(context.proc / "1" / "status")
    # Process 1 of a laptop or of a virtual machine does not decide how a job ends.
    is_container = context.job is not None and not context.shares_machine
    if name in _SHELLS:
        yield warning(
            "signals",
            f"{user}; {first}: a shell does not forward signals; SIGKILL would end the training without a checkpoint.",
            'Use the exec form, ENTRYPOINT ["lightning-sm"], or exec in the script.',
        )
    elif is_container and status is not None and "SigCgt:" in status and not _handles_sigterm(status):
        # The kernel drops signals that process 1 of a container does not handle (pid_namespaces(7)).
        yield warning(
            "signals",
            f"{user}; {first}, which does not handle SIGTERM: the kernel drops it.",
            'Make the launcher process 1: ENTRYPOINT ["lightning-sm"].',
        )
    else:
        yield ok("signals", f"{user}; {first}")


def _handles_sigterm(status: str) -> bool:
    """Return whether a process handles SIGTERM, by the mask in its /proc/PID/status."""
    match = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return match is not None and bool(int(match[1], 16) >> (signal.SIGTERM - 1) & 1)
