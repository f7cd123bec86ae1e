"""Checks of the job's folders: free space, and permission to write."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lightning_sm.doctor.context import Context
from lightning_sm.doctor.report import Result, Status, ok, problem

_GIB = 1 << 30
_MB = 10**6
# One checkpoint of a model with 400 million parameters and Adam takes 5 GB.
_WARNING_BYTES = 5000 * _MB
# Below this, not even logs fit.
_PROBLEM_BYTES = 500 * _MB
_AS_ROOT = "Run as root in the container, as the service expects, or let this user write to the folder."


def disk(context: Context) -> Iterator[Result]:
    """Measure the free space of the folders, one row for each file system."""
    folders_of: dict[int, list[Path]] = {}
    for folder in [*_job_folders(context), Path(context.env.get("TMPDIR") or tempfile.gettempdir())]:
        try:
            device = _nearest(folder).stat().st_dev
        except OSError as error:  # noqa: PERF203 - one row for each
            yield problem("disk", _denied(folder, error), _AS_ROOT)
        else:
            folders_of.setdefault(device, []).append(folder)
    for folders in folders_of.values():
        space = os.statvfs(_nearest(folders[0]))
        free = space.f_bavail * space.f_frsize
        total = space.f_blocks * space.f_frsize
        status = space_status(free)
        text = f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB free: {', '.join(map(str, folders))}"
        yield Result(
            "disk",
            status,
            text,
            "" if status is Status.OK else "Raise volume_gb in job.yaml (volume_size in the SDK), or remove files.",
        )


def space_status(free_bytes: int) -> Status:
    """Return the severity of having only this much free space."""
    if free_bytes < _PROBLEM_BYTES:
        return Status.PROBLEM
    return Status.WARNING if free_bytes < _WARNING_BYTES else Status.OK


def writable(context: Context) -> Iterator[Result]:
    """Try to write to the folders that the training script writes to."""
    folders = [folder for folder in _job_folders(context) if folder != context.base_dir]
    failed = False
    for folder in folders:
        error = _write_error(folder)
        if error is not None:
            failed = True
            yield problem("writable", _denied(folder, error), _AS_ROOT)
    if folders and not failed:
        yield ok("writable", ", ".join(map(str, folders)))


def _job_folders(context: Context) -> list[Path]:
    """Return the folders that the service makes; none off SageMaker."""
    base = context.base_dir
    # Even if the job is unknown, because its files may be malformed, or not written yet.
    if context.job is None and not os.path.isdir(base):
        return []
    folders = [base, base / "model", base / "output"]
    if context.job is not None and context.job.checkpoint_dir is not None:
        folders.append(context.job.checkpoint_dir)
    return folders


def _denied(folder: Path, error: OSError) -> str:
    return f"{folder}: {os.strerror(error.errno or 0)} (user {os.getuid()})."


def _nearest(folder: Path) -> Path:
    """Return the folder, or the nearest existing one above it, in which it would be made."""
    folder = folder.absolute()
    for candidate in (folder, *folder.parents):
        try:
            candidate.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:  # it may exist without this user's permission to see it; the caller's access then says why
            return candidate
        return candidate
    return folder


def _write_error(folder: Path) -> OSError | None:
    nearest = _nearest(folder)
    unnamed = getattr(os, "O_TMPFILE", None)
    if unnamed is None:  # not Linux
        return _access_error(nearest)
    try:
        # A file without a name, because the service may copy the checkpoint folder to S3 at any moment, deletions
        # included.
        os.close(os.open(nearest, unnamed | os.O_WRONLY, 0o600))
    except OSError as error:
        # Errors of file systems that do not support such files (open(2), O_TMPFILE).
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            return error
        return _access_error(nearest)
    return None


def _access_error(folder: Path) -> OSError | None:
    return None if os.access(folder, os.W_OK | os.X_OK) else PermissionError(errno.EACCES, "not writable")
