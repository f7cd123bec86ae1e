"""The folders of emulated jobs below one parent: finds which are in use, and removes the others."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# The names that ``LocalCluster`` gives to jobs. They begin with the time, so that they sort by age.
_NAME = re.compile(r"local-\d{8}-\d{6}-[0-9a-f]{4}")
_LOCK = ".lock"


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
        runs = "1 run" if self.num_runs == 1 else f"{self.num_runs} runs"
        return f"{runs} ({self.num_bytes / 1e6:.1f} MB)"


def create_run_folder(path: Path) -> int:
    """Create the folder of a run, which counts as in use from the first moment.

    Args:
        path: The folder.

    Returns:
        A descriptor; the run is in use until it is closed, or until this process has exited.

    Raises:
        OSError: It cannot be created.
    """
    new = path.with_name(f".new-{path.name}")  # a name that ``remove_finished_runs`` does not see
    new.mkdir(parents=True)
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
    folders = sorted(path for path in base_dir.glob("local-*") if _NAME.fullmatch(path.name) and not path.is_symlink())
    for folder in reversed(folders):
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
