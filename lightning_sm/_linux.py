"""Features that only Linux has, and their substitutes on macOS. Only this module checks the system.

On macOS, scripts and emulated jobs without data groups can train. Data hosts need Linux.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import select
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from lightning_sm.errors import NeedsLinuxError

_IS_LINUX = sys.platform == "linux"
# Whether ``adopt_orphans`` has an effect. On other systems, process 1 adopts orphaned processes.
ADOPTS_ORPHANS = _IS_LINUX
# Whether containers run on the kernel of this machine. Elsewhere, Docker runs them in a virtual machine.
CONTAINERS_SHARE_KERNEL = _IS_LINUX
CGROUP = Path("/sys/fs/cgroup")
LOOPBACK_INTERFACE = "lo" if _IS_LINUX else "lo0"
_SYSTEM = {"linux": "Linux", "darwin": "macOS", "win32": "Windows"}.get(sys.platform, sys.platform)
# Interval between two checks of whether threads are asleep.
_LOOK_S = 0.01
# linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def missing_on_this_system() -> str:
    """Return a sentence about what this system lacks; empty on Linux."""
    return "" if _IS_LINUX else f"This system is {_SYSTEM}: jobs with data hosts need Linux."


def require_linux(what: str, advice: str) -> None:
    """Check that this system is Linux.

    Args:
        what: The feature that needs Linux, as the subject of a sentence.
        advice: What to do on other systems, as a sentence.

    Raises:
        NeedsLinuxError: This system is not Linux.
    """
    if not _IS_LINUX:
        raise NeedsLinuxError(f"{what} needs Linux, but this system is {_SYSTEM}. {advice}")


def usable_cpus(cgroup: Path = CGROUP) -> int:
    """Return how many CPUs this process may use, according to its affinity and its control group's quota.

    Off Linux, this is the number of CPUs of the machine.

    Args:
        cgroup: Folder with the control group's files.
    """
    cpus = len(os.sched_getaffinity(0)) if _IS_LINUX else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = (cgroup / "cpu.max").read_text(encoding="ascii").split()
        cpus = min(cpus, math.ceil(int(quota) / int(period)))  # "max" is not a number: no limit
    return max(1, cpus)


def loopback_addresses(count: int) -> list[str]:
    """Return an address of this machine for each of ``count`` hosts.

    127.0.0.1 is not used, because it would hide a wrong main address. On macOS, which has no other loopback address,
    all hosts share it.
    """
    return [f"127.0.0.{2 + number}" if _IS_LINUX else "127.0.0.1" for number in range(count)]


def handles_signal(pid: int, signum: int, *, or_blocks: bool = False) -> bool | None:
    """Return whether a process has a handler for a signal, or None off Linux, where the kernel does not report it.

    Args:
        pid: Process id; False is returned for a process that has exited.
        signum: Number of the signal.
        or_blocks: Whether to also return True if the process blocks the signal, which then stays pending and may
            find a handler later.
    """
    if not _IS_LINUX:
        return None
    masks = ("SigCgt:", "SigBlk:") if or_blocks else ("SigCgt:",)
    try:
        # Replace errors: the kernel may truncate the process's name in the middle of a character.
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    values = [line.split()[1] for line in status.splitlines() if line.startswith(masks)]
    return any(int(mask, 16) >> (signum - 1) & 1 for mask in values)


def kill_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it dies (Linux only)."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans(wanted: bool) -> None:
    """Make this process, not init, the parent of orphaned descendants, so that they can be found, killed and reaped."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(wanted))


def ended_child() -> int | None:
    """Return the process id of a child that has exited, without reaping it, or None if there is none.

    Off Linux, the result is always None: this function is meant for orphans, which process 1 adopts there.
    """
    if not _IS_LINUX:  # waitid came to macOS with Python 3.13
        return None
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if ended is None else ended.si_pid


class ExitWatch:
    """A context manager that detects the exit of any process, not only of a child (Linux only)."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._pids: dict[int, int] = {}  # by pidfd
        self._seen: set[int] = set()

    def __enter__(self) -> ExitWatch:
        return self

    def __exit__(self, *_: object) -> None:
        for pidfd in self._pids:
            os.close(pidfd)

    def add(self, pids: Iterable[int]) -> None:
        """Watch more processes; adding a process twice has no effect."""
        for pid in set(pids) - self._seen if _IS_LINUX else ():
            self._seen.add(pid)
            # Ignore errors: the process has been reaped, or the container forbids the call. The exit then goes
            # undetected.
            with contextlib.suppress(OSError):
                pidfd = os.pidfd_open(pid)
                self._pids[pidfd] = pid
                self._poll.register(pidfd, select.POLLIN)

    def wait(self, timeout_s: float) -> list[tuple[int, int | None]]:
        """Wait until a process exits or the time is up.

        Returns:
            Process id and exit code (-n for signal n) of each process that has exited. The exit code is None if the
            parent has already waited for the process.
        """
        exits = []
        for pidfd, _ in self._poll.poll(1000 * timeout_s):
            self._poll.unregister(pidfd)
            pid = self._pids.pop(pidfd)
            exits.append((pid, exit_code_of_zombie(pid)))
            os.close(pidfd)
        return exits


def exit_code_of_zombie(pid: int) -> int | None:
    """Return the exit code of a process that has exited but has not been reaped, or None for any other process.

    The exit code is -n if signal n killed the process. Off Linux, the result is always None.
    """
    with contextlib.suppress(OSError, ValueError):
        # The name, in parentheses, may contain spaces and parentheses. The fields after it are numbered from 3.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        if fields[0] == b"Z":
            return os.waitstatus_to_exitcode(int(fields[52 - 3]))
    return None


def wait_until_asleep(threads: str, timeout_s: float) -> bool:
    """Wait until all of this process's threads with a given name are asleep; return False if the time runs out first.

    The interpreter's lock is free between two checks, so a thread that has not run between them is waiting for work
    rather than for the lock. Off Linux, return True at once.

    Args:
        threads: Name of the threads, as the kernel knows it.
        timeout_s: Maximum wait in seconds.
    """
    deadline = time.monotonic() + timeout_s
    before: dict[str, tuple[str, ...]] | None = None
    while runs := _runs_of(threads):
        if runs == before and all(state.startswith("S") for state, *_ in runs.values()):
            return True
        if time.monotonic() >= deadline:
            return False
        before = runs
        time.sleep(_LOOK_S)  # poll, since the kernel sends no notification
    return True


def _runs_of(threads: str) -> dict[str, tuple[str, ...]]:
    """Return the state and the number of context switches of each thread with a given name."""
    runs = {}
    for status in Path("/proc/self/task").glob("*/status") if _IS_LINUX else ():
        with contextlib.suppress(OSError):  # the thread has just exited
            lines = status.read_text(encoding="utf-8", errors="replace").splitlines()
            fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
            if fields.get("Name") == threads:
                switches = [value for name, value in fields.items() if name.endswith("_ctxt_switches")]
                runs[status.parent.name] = (fields["State"], *switches)
    return runs


def _prctl(option: int, value: int) -> None:
    if _IS_LINUX:
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
