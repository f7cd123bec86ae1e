"""Checks of the folders of the job: room, permission to write, leftovers of another job, shared memory."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lightning_sm.doctor.context import Context
from lightning_sm.doctor.report import Result, Status, listed, ok, problem, warning

_GIB, _MB = 1 << 30, 10**6
# A checkpoint of a model with 400 million parameters and Adam takes 5 GB; below 500 MB not even logs are safe.
_LITTLE_BYTES, _LEAST_BYTES = 5000 * _MB, 500 * _MB
_LEAST_INODES = 1000
_SHARED_MEMORY_BYTES = _GIB
# A checkpoint folder may hold thousands of files, and a path through S3 is slow.
_MOST_LISTED = 1000
_AS_ROOT = "Run as root in the container, as the service expects, or give the folder to this user."


def disk(context: Context) -> Iterator[Result]:
    """Look how much room the folders have, file system by file system.

    Args:
        context: The host.
    """
    places: dict[int, list[Path]] = {}
    for folder in [*_job_folders(context), _temporary(context)]:
        found = _file_system(folder)
        if isinstance(found, int):
            places.setdefault(found, []).append(folder)
        else:
            yield problem("disk", f"{folder}: {os.strerror(found.errno or 0)} (user {os.getuid()}).", _AS_ROOT)
    for folders in places.values():
        room = os.statvfs(_nearest(folders[0]))
        free, total = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
        where = ", ".join(map(str, folders))
        text = f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB free: {where}"
        yield Result("disk", room_status(free), text, "" if free >= _LITTLE_BYTES else "Raise volume_size, or tidy up.")
        if room.f_files and room.f_favail < _LEAST_INODES:
            yield warning("disk", f"Only {room.f_favail} more files can be made: {where}", "Remove small files.")


def room_status(free_bytes: int) -> Status:
    """How bad it is to have so much room left.

    Args:
        free_bytes: Bytes that a user may still write.
    """
    if free_bytes < _LEAST_BYTES:
        return Status.PROBLEM
    return Status.WARNING if free_bytes < _LITTLE_BYTES else Status.OK


def writable(context: Context) -> Iterator[Result]:
    """Try to write where the training must.

    Args:
        context: The host.
    """
    failed = False
    folders = [folder for folder in _job_folders(context) if folder != context.base_dir]
    for folder in folders:
        error = _write_error(folder)
        if error is not None:
            failed = True
            yield problem(
                "writable",
                f"{folder}: {os.strerror(error.errno or 0)} (user {os.getuid()}).",
                _AS_ROOT,
            )
    if folders and not failed:
        yield ok("writable", ", ".join(map(str, folders)))


def leftovers(context: Context) -> Iterator[Result]:
    """Look for what another job, or the image, left in the folders that the service collects.

    Args:
        context: The host.
    """
    if context.job is None:
        return
    job, is_clean = context.job, True
    if os.path.exists(job.output_dir / "failure"):  # False where Path.exists raises: in folders of another user
        is_clean = False
        yield warning(
            "leftovers",
            f"{job.output_dir / 'failure'} exists.",
            "Remove it, unless the training has just failed. (lightning-sm train does so; other entry points do not.)",
        )
    models = _files(job.model_dir)
    if models:
        is_clean = False
        yield warning(
            "leftovers",
            f"{job.model_dir} is not empty: {listed(models, 3)}",
            "Remove them, unless the training has just written them: they end up in model.tar.gz.",
        )
    if is_clean:
        yield ok("leftovers", f"none in {job.model_dir}, no {job.output_dir / 'failure'}")
    if job.checkpoint_dir is not None:
        found = _files(job.checkpoint_dir)
        count = f"{len(found)}{' or more' if len(found) == _MOST_LISTED else ''}"
        goes_on = f"checkpoint files: {count}; the training goes on from the newest sound one"
        yield ok("resume", goes_on if found else "no checkpoint yet")


def shared_memory(context: Context) -> Iterator[Result]:
    """Look how large /dev/shm is, which the workers of DataLoader fill.

    Args:
        context: The host.
    """
    folder = context.dev / "shm"
    try:
        room = os.statvfs(folder)
    except OSError:
        yield warning("shared memory", f"There is no {folder}.", "DataLoader(num_workers>0) needs it.")
        return
    size, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    text = f"{folder}: {free / _GIB:.2f} of {size / _GIB:.2f} GiB free"
    if free < _SHARED_MEMORY_BYTES:
        yield warning(
            "shared memory",
            text,
            "DataLoader(num_workers>0) may die of a bus error: docker run --shm-size=8g, or fewer workers. Batches of "
            "data hosts do not use it.",
        )
    else:
        yield ok("shared memory", text)


def _job_folders(context: Context) -> list[Path]:
    """The folders that the service makes; none off SageMaker."""
    base = context.base_dir
    # Not only where the job is known: its files may be broken, or a job may be about to be made here.
    if context.job is None and not os.path.isdir(base):
        return []
    checkpoints = context.job.checkpoint_dir if context.job is not None else None
    return [base, base / "model", base / "output", *([checkpoints] if checkpoints else [])]


def _temporary(context: Context) -> Path:
    return Path(context.env.get("TMPDIR") or tempfile.gettempdir())


def _file_system(folder: Path) -> int | OSError:
    """The number of the file system that a folder is on, or why it cannot be told."""
    try:
        return _nearest(folder).stat().st_dev
    except OSError as error:
        return error


def _nearest(folder: Path) -> Path:
    """The folder, or the one above it in which it would be made."""
    folder = folder.absolute()
    for candidate in (folder, *folder.parents):
        try:
            candidate.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:  # it may be there, but not for this user: who writes there finds out why
            return candidate
        return candidate
    return folder


def _write_error(folder: Path) -> OSError | None:
    nearest = _nearest(folder)
    unnamed = getattr(os, "O_TMPFILE", None)
    if unnamed is None:  # not Linux
        return _access_error(nearest)
    try:
        # A file without a name: a checkpoint folder is copied to S3 while we look, deletions included.
        os.close(os.open(nearest, unnamed | os.O_WRONLY, 0o600))
    except OSError as error:
        # What file systems say that know no such files (open(2), O_TMPFILE).
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            return error
        return _access_error(nearest)
    return None


def _access_error(folder: Path) -> OSError | None:
    return None if os.access(folder, os.W_OK | os.X_OK) else PermissionError(errno.EACCES, "not writable")


def _files(folder: Path) -> list[str]:
    found: list[str] = []
    for directory, _, files in os.walk(folder):
        found += [os.path.relpath(os.path.join(directory, name), folder) for name in files]
        if len(found) >= _MOST_LISTED:
            break
    return sorted(found[:_MOST_LISTED])
