"""Checks of the machine and its container: memory, CPUs, limits, clock, system calls, signals."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import struct
from collections.abc import Iterator
from pathlib import Path

from lightning_sm.doctor.context import Context, text_of
from lightning_sm.doctor.report import Result, ok, problem, warning

_GIB = 1 << 30
# Each worker, connection and mapped batch takes some; the usual limit of a login shell is 1024.
_LEAST_OPEN_FILES = 4096
# cgroup v1 says "no limit" with a number near 2^63.
_NO_LIMIT = 1 << 60
_SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh", "ksh", "busybox"})
# linux/timex.h
_STA_UNSYNC, _TIME_ERROR = 0x40, 5
# The beginning of struct timex: modes, offset, freq, maxerror, esterror (in microseconds), status. All of it takes 208
# bytes on 64-bit machines.
_TIMEX, _TIMEX_BYTES = "@Illlli", 512


def memory(context: Context) -> Iterator[Result]:
    """Show how much memory this container may use, and whether the kernel killed for it before.

    Args:
        context: The host.
    """
    match = re.search(r"MemTotal:\s+(\d+) kB", text_of(context.proc / "meminfo") or "")
    total = int(match[1]) * 1024 if match else None
    # memory.max is version 2 of the interface, the other name version 1.
    limits = [
        int(text)
        for name in ("memory.max", "memory.limit_in_bytes")
        for text in _cgroup_values(context, "memory", name)
        if text.isdecimal()
    ]
    limit = min((value for value in limits if value < _NO_LIMIT), default=None)
    shown = f"{total / _GIB:.1f} GiB" if total else "unknown"
    if limit is not None and (total is None or limit < total):
        shown = f"{limit / _GIB:.1f} GiB for this container, of {shown}"
    yield ok("memory", shown)
    kills = [
        int(found[1])
        for text in _cgroup_values(context, "memory", "memory.events")
        if (found := re.search(r"^oom_kill (\d+)", text, re.MULTILINE))
    ]
    if max(kills, default=0):
        yield warning(
            "memory",
            f"The kernel killed {max(kills)} processes of this container for want of memory.",
            "Fewer workers, smaller batches or a larger instance.",
        )


def processors(context: Context) -> Iterator[Result]:
    """Compare the CPUs that there are with those that this process gets.

    Args:
        context: The host.
    """
    there = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else there
    quota = min(_quotas(context), default=None)
    text = f"{allowed} of {there}"
    if quota is not None and quota < allowed:
        yield warning(
            "CPUs",
            f"{text}, but the container may use {quota:.1f} of them at a time.",
            f"torch and DataLoader start as many threads and workers as they see CPUs: set OMP_NUM_THREADS and "
            f"num_workers for {max(1, int(quota))}.",
        )
    else:
        yield ok("CPUs", text)


def open_files(_context: Context) -> Iterator[Result]:
    """Look how many files a process may open.

    Args:
        _context: The host.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _LEAST_OPEN_FILES:
        yield ok("open files", f"up to {'any number' if soft == resource.RLIM_INFINITY else soft}")
        return
    yield warning(
        "open files",
        f"up to {soft} (ulimit -n), {'any number' if hard == resource.RLIM_INFINITY else hard} on request",
        "docker run --ulimit nofile=65536, or ulimit -n 65536: else workers may fail with 'Too many open files'.",
    )


def clock(_context: Context) -> Iterator[Result]:
    """Ask the kernel whether something keeps its clock right.

    The clocks of other hosts cannot be asked: there is no protocol for it between hosts, and what runs in a container
    does not see the time service of the instance.

    Args:
        _context: The host.
    """
    buffer = ctypes.create_string_buffer(_TIMEX_BYTES)  # all zeros, and so modes 0: read only
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(buffer)
    except AttributeError:
        yield ok("clock", "unknown: not Linux")
        return
    *_, estimated_us, status = struct.unpack_from(_TIMEX, buffer)
    if state < 0:
        yield ok("clock", f"unknown: {os.strerror(ctypes.get_errno())}")
    elif state == _TIME_ERROR or status & _STA_UNSYNC:
        yield warning(
            "clock",
            "The kernel says that nothing synchronises its clock. How far it is off is not known here.",
            "Compare date -u on the hosts. S3 refuses requests that are 15 minutes off; log lines of hosts mix up.",
        )
    else:
        yield ok("clock", f"synchronised, about {estimated_us / 1000:.1f} ms off; other hosts cannot be asked")


def kernel(context: Context) -> Iterator[Result]:
    """Try the system calls that a data host and its trainers need.

    Args:
        context: The host.
    """
    refused = [f"{name} ({error})" for name in ("memfd_create", "pidfd_open") if (error := _refusal(name))]
    status = text_of(context.proc / "self" / "status") or ""
    seccomp = "filtered by seccomp" if re.search(r"^Seccomp:\s+2", status, re.MULTILINE) else "no seccomp filter"
    text = f"{os.uname().sysname} {os.uname().release}, {seccomp}"
    if refused:
        yield problem(
            "system calls",
            f"{text}; refused: {', '.join(refused)}",
            "Data hosts need both: Linux 5.3 or newer, and a seccomp profile that allows them.",
        )
    else:
        yield ok("system calls", f"{text}; memfd_create and pidfd_open work")


def signals(context: Context) -> Iterator[Result]:
    """Find out whether SIGTERM, which the service sends 120 s before the end, would reach the training.

    Args:
        context: The host.
    """
    user = f"user {os.getuid()}"
    own = text_of(context.proc / "self" / "status") or ""
    if _has_signal(own, "SigIgn") or _has_signal(own, "SigBlk"):
        yield warning(
            "signals",
            "SIGTERM is ignored or blocked here, and so in every process that is started from here.",
            "Look at what started this shell: nohup, trap '' TERM.",
        )
    if os.getpid() == 1:
        yield ok("signals", f"{user}, process 1: signals of the service come here")
        return
    command = (text_of(context.proc / "1" / "cmdline") or "").split("\0")
    name = Path(command[0]).name.lstrip("-")
    first = f"process 1 is {' '.join(command)[:60].strip() or 'unknown'}"
    status = text_of(context.proc / "1" / "status")
    # Process 1 of a laptop or of a virtual machine is nothing that a job could end.
    is_container = context.job is not None and not context.is_emulated
    if name in _SHELLS:
        yield warning(
            "signals",
            f"{user}; {first}: a shell passes no signal on, and the training would be killed without a word.",
            'Use the exec form, ENTRYPOINT ["lightning-sm"], or exec in the script.',
        )
    elif is_container and status is not None and "SigCgt:" in status and not _has_signal(status, "SigCgt"):
        # The kernel drops what process 1 of a container does not handle (pid_namespaces(7)).
        yield warning(
            "signals",
            f"{user}; {first}, which does not handle SIGTERM: the kernel drops it.",
            'Let the launcher be process 1: ENTRYPOINT ["lightning-sm"].',
        )
    else:
        yield ok("signals", f"{user}; {first}")


def _cgroup_values(context: Context, controller: str, name: str) -> Iterator[str]:
    """A value of this process's control group and of each group around it, in both versions of the interface."""
    for line in (text_of(context.proc / "self" / "cgroup") or "0::/").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        root = context.sys / "fs" / "cgroup" / (controllers and controller)
        group = root / path.lstrip("/")
        for folder in [group, *group.parents]:
            text = text_of(folder / name)
            if text is not None:
                yield text
            if folder == root:
                break


def _quotas(context: Context) -> Iterator[float]:
    """CPUs that the control groups allow to be used at a time."""
    for text in _cgroup_values(context, "cpu", "cpu.max"):
        quota, _, period = text.partition(" ")
        if quota.isdecimal() and period.isdecimal():
            yield int(quota) / int(period)
    quotas = _cgroup_values(context, "cpu", "cpu.cfs_quota_us")
    for text, period in zip(quotas, _cgroup_values(context, "cpu", "cpu.cfs_period_us"), strict=False):
        if text.isdecimal() and period.isdecimal():  # -1: no limit
            yield int(text) / int(period)


def _refusal(name: str) -> str:
    """Why a system call does not work; empty if it does."""
    try:
        if name == "memfd_create":
            os.close(os.memfd_create("lightning_sm_doctor", os.MFD_CLOEXEC))
        else:
            os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:  # AttributeError: not Linux, or a libc without it
        return str(error)
    return ""


def _has_signal(status: str, mask: str) -> bool:
    """Whether SIGTERM is in a signal mask of /proc/PID/status."""
    match = re.search(rf"^{mask}:\s*([0-9a-f]+)", status, re.MULTILINE)
    return match is not None and bool(int(match[1], 16) >> (signal.SIGTERM - 1) & 1)
