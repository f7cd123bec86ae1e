"""The run folders of emulated jobs in one parent folder: creation, and removal of old ones."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from pathlib import Path

from lightning_sm.errors import OutputDirectoryError

# Matches names from ``run_name``, which contain the time so that they sort by age.
_NAME = re.compile(r"local-\d{8}-\d{6}-[0-9a-f]{4}")
_LOCK = ".lock"
# How many runs the temporary folder keeps, including the current one.
MAX_RUNS = 20
_ONLY_OWNER = 0o700


def run_name() -> str:
    """Return a name for a new run."""
    return f"local-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def default_parent() -> Path:
    """Return the folder for this user's runs in the system's temporary folder; create it if needed.

    Other users can guess its path. Anyone who can write there can change a job's hyperparameters or checkpoints, and
    thereby run code as this user.

    Raises:
        OutputDirectoryError: The folder cannot be created, or another user owns it or can write there.
    """
    path = Path(tempfile.gettempdir()) / f"lightning-sm-{os.getuid()}"
    try:
        path.mkdir(_ONLY_OWNER)
    except FileExistsError:
        pass
    except OSError as error:
        raise OutputDirectoryError(f"{path}: cannot be created ({error.strerror}).") from error
    status = path.lstat()
    is_folder_of_user = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if not is_folder_of_user or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OutputDirectoryError(
            f"{path}, the default folder for runs, has mode {stat.filemode(status.st_mode)} and owner id "
            f"{status.st_uid}. It must be a folder that only you can write to, or others could change what your job "
            "runs. Remove it, or choose another folder with --base-dir."
        )
    path.chmod(_ONLY_OWNER)
    return path


def create_run_folder(path: Path) -> int:
    """Create a run's folder, which only its owner can read.

    Args:
        path: The folder to create.

    Returns:
        A file descriptor. The run counts as in progress until the descriptor is closed or this process exits.

    Raises:
        OSError: The folder cannot be created.
    """
    path.mkdir(_ONLY_OWNER, parents=True)
    lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def remove_old_runs(base_dir: Path) -> None:
    """Remove all but the newest runs and those in progress, because old checkpoints would fill the disk unnoticed.

    Args:
        base_dir: The parent of the runs. Its other files and folders are kept.
    """
    runs = sorted(path for path in base_dir.iterdir() if _NAME.fullmatch(path.name))
    for folder in runs[:-MAX_RUNS]:
        with (folder / _LOCK).open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            shutil.rmtree(folder, ignore_errors=True)
