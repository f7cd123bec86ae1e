"""Checks of the machine, its process 1, and the installed packages."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from lightning_sm._installed import installed_version
from lightning_sm._linux import handles_signal, missing_on_this_system
from lightning_sm._text import size
from lightning_sm.doctor.context import Context, Result, ok, warning

# A checkpoint of a model with 400 million parameters and Adam takes 5 GB.
_LEAST_FREE_BYTES = 5 * 10**9
_SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh", "ksh", "busybox"})
_PACKAGES = ("lightning-sm", "torch", "pytorch-lightning", "lightning", "jsonargparse", "sagemaker-training", "grpcio")


def disk(context: Context) -> Iterator[Result]:
    """Measure the free space of the job's folders and the temporary folder, with one row per file system."""
    folders = [Path(context.env.get("TMPDIR") or tempfile.gettempdir())]
    if context.job is not None:
        folders += [context.job.model_dir, context.job.checkpoint_dir or context.job.output_dir]
    folders_of: dict[int, list[Path]] = {}
    for folder in folders:
        nearest = next(parent for parent in (folder, *folder.absolute().parents) if os.path.exists(parent))
        folders_of.setdefault(nearest.stat().st_dev, []).append(nearest)
    for same_device in folders_of.values():
        free = shutil.disk_usage(same_device[0]).free
        text = f"{size(free)} free: {', '.join(map(str, same_device))}"
        if free < _LEAST_FREE_BYTES:
            yield warning("disk", text, "Raise volume_gb in job.yaml (volume_size in the SDK), or remove files.")
        else:
            yield ok("disk", text)


def machine(_context: Context) -> Iterator[Result]:
    """Show CPUs, memory and kernel, and warn about features that this system lacks."""
    memory = size(psutil.virtual_memory().total)
    yield ok("machine", f"{os.cpu_count()} CPUs, {memory} of memory, {platform.system()} {platform.release()}")
    missing = missing_on_this_system()
    if missing:
        yield warning("system", missing, "Run them in a Linux container, or leave the data groups out.")


def signals(context: Context) -> Iterator[Result]:
    """Check whether SIGTERM, which the service sends to PID 1, would reach the training script."""
    if os.getpid() == 1:
        yield ok("signals", "process 1 is lightning-sm, which receives the service's signals")
        return
    command = psutil.Process(1).cmdline()
    first = f"process 1 is {' '.join(command)[:60] or 'unknown'}"
    if command and Path(command[0]).name.lstrip("-") in _SHELLS:
        yield warning(
            "signals",
            f"{first}: a shell does not forward signals, so SIGKILL would end training without a checkpoint.",
            'Use the exec form, ENTRYPOINT ["lightning-sm"], or exec in the script.',
        )
    # On a laptop or virtual machine, process 1 is not part of a job.
    elif context.has_own_machine and handles_signal(1, signal.SIGTERM) is False:
        # The kernel drops signals that process 1 of a container does not handle (pid_namespaces(7)).
        yield warning(
            "signals",
            f"{first}, which does not handle SIGTERM: the kernel drops it.",
            'Make the launcher process 1: ENTRYPOINT ["lightning-sm"].',
        )
    else:
        yield ok("signals", first)


def versions(_context: Context) -> Iterator[Result]:
    """Show the versions of Python and important packages, from metadata, because importing torch takes seconds."""
    found = [f"{name} {version}" for name in _PACKAGES if (version := installed_version(name))]
    yield ok("versions", ", ".join([f"Python {platform.python_version()}", *found]))
