"""The folders of emulated jobs below one parent: creates them, and removes old ones."""

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

# What ``run_name`` returns. It begins with the time, so that names sort by age.
_NAME = re.compile(r"local-\d{8}-\d{6}-[0-9a-f]{4}")
_LOCK = ".lock"
# How many runs the temporary folder keeps, the current one included.
MAX_RUNS = 20
_ONLY_OWNER = 0o700


def run_name() -> str:
    """Return a name for a new run."""
    return f"local-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def default_parent() -> Path:
    """Return the folder of this user's runs below the temporary folder, which others can guess; create it if needed.

    Whoever can write there can give a job other hyperparameters, or checkpoints, and with them code to run.

    Raises:
        OutputDirectoryError: It cannot be created, or others own it or can write there.
    """
    path = Path(tempfile.gettempdir()) / f"lightning-sm-{os.getuid()}"
    try:
        path.mkdir(_ONLY_OWNER)
    except FileExistsError:
        pass
    except OSError as error:
        raise OutputDirectoryError(f"{path}: cannot be created ({error.strerror}).") from error
    found = path.lstat()
    is_folder_of_user = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not is_folder_of_user or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OutputDirectoryError(
            f"{path}, the default folder for runs, is {stat.filemode(found.st_mode)} of user id {found.st_uid}, and "
            "not a folder that only you can write to: others could change what your job runs. Remove it, or name a "
            "folder of your own by --base-dir."
        )
    path.chmod(_ONLY_OWNER)
    return path


def create_run_folder(path: Path) -> int:
    """Create the folder of a run, which only its owner can read.

    Args:
        path: The folder.

    Returns:
        A descriptor; the run is in use until it is closed, or until this process has exited.

    Raises:
        OSError: It cannot be created.
    """
    path.mkdir(_ONLY_OWNER, parents=True)
    lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def remove_old_runs(base_dir: Path) -> None:
    """Remove all but the newest runs, unless they are in progress: they hold checkpoints, and nobody looks there.

    Args:
        base_dir: The parent of the runs. Other files and folders beside them remain.
    """
    runs = sorted(path for path in base_dir.iterdir() if _NAME.fullmatch(path.name))
    for folder in runs[:-MAX_RUNS]:
        with (folder / _LOCK).open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            shutil.rmtree(folder, ignore_errors=True)
