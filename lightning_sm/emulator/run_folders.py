"""The folders of emulated jobs below one parent: finds which are in use, and removes the others."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lightning_sm._text import count, size
from lightning_sm.errors import OutputDirectoryError

# What ``run_name`` returns. It begins with the time, so that names sort by age.
_NAME = re.compile(r"local-\d{8}-\d{6}-[0-9a-f]{4}")
_LOCK = ".lock"
# How many runs the temporary folder keeps, the current one included.
MAX_RUNS = 20
_ONLY_OWNER = 0o700


@dataclass(frozen=True)
class Removal:
    """The result of removing runs.

    Attributes:
        num_runs: Number of removed runs.
        num_bytes: The disk space that they took.
        in_use: Names of the runs that are in progress.
        problems: Why other runs could not be removed.
    """

    num_runs: int
    num_bytes: int
    in_use: tuple[str, ...]
    problems: tuple[str, ...]

    def __str__(self) -> str:
        return f"{count(self.num_runs, 'run')} ({size(self.num_bytes)})"


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
    if not stat.S_ISDIR(found.st_mode):
        problem = "is not a folder"
    elif found.st_uid != os.getuid():
        problem = f"belongs to user id {found.st_uid}, and you are {os.getuid()}"
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem = f"has mode {stat.S_IMODE(found.st_mode):04o}, so that other users can write there"
    else:
        path.chmod(_ONLY_OWNER)
        return path
    raise OutputDirectoryError(
        f"{path}, the default folder for runs, {problem}: others could change what your job runs. Remove it, or name a "
        "folder of your own by --base-dir."
    )


def create_run_folder(path: Path) -> int:
    """Create the folder of a run, which only its owner can read, and which counts as in use from the first moment.

    Args:
        path: The folder.

    Returns:
        A descriptor; the run is in use until it is closed, or until this process has exited.

    Raises:
        OSError: It cannot be created.
    """
    new = path.with_name(f".new-{path.name}")  # a name that ``remove_finished_runs`` does not see
    new.mkdir(_ONLY_OWNER, parents=True)
    lock = os.open(new / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        new.rename(path)
    except OSError:
        os.close(lock)
        shutil.rmtree(new, ignore_errors=True)
        raise
    return lock


def remove_finished_runs(base_dir: Path, *, keep: int = 0) -> Removal:
    """Remove the folders of runs that are not in progress. Other files and folders beside them remain.

    Args:
        base_dir: The parent of the runs; it need not exist.
        keep: How many of the newest to keep.
    """
    num_runs = num_bytes = 0
    in_use = []
    problems = []
    found = base_dir.iterdir() if base_dir.is_dir() else ()
    runs = (path for path in found if _NAME.fullmatch(path.name) and not path.is_symlink())
    for folder in sorted(runs, reverse=True):
        try:
            with _locked(folder) as is_finished:
                if not is_finished:
                    in_use.append(folder.name)
                elif keep > 0:
                    keep -= 1
                else:
                    size = _disk_usage(folder)
                    shutil.rmtree(folder)
                    num_runs += 1
                    num_bytes += size
        except OSError as error:  # noqa: PERF203 - one folder that cannot be removed must not keep the others
            problems.append(f"{error.filename or folder}: {error.strerror}")
    return Removal(num_runs, num_bytes, tuple(in_use), tuple(problems))


def remove_old_runs(base_dir: Path) -> None:
    """Remove all but the newest runs, which hold checkpoints and lie where nobody looks, in a temporary folder."""
    removal = remove_finished_runs(base_dir, keep=MAX_RUNS - 1)
    if removal.num_runs:
        sys.stdout.write(f"Removed {removal} from {base_dir}, which keeps the newest {MAX_RUNS}.\n")
        sys.stdout.flush()


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lock a run while it is removed; yield False if it is in progress."""
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    else:
        yield True
    finally:
        os.close(lock)


def _disk_usage(folder: Path) -> int:
    """Return how many bytes a folder takes, without its channels, which are links."""
    total = 0
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            total += (Path(parent) / name).lstat().st_blocks * 512
    return total
