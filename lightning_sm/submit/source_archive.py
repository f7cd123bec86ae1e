"""The archive of a job's own code: which files it has, and how it is made.

As SDK v2 makes it from ``source_dir``: links are replaced by what they lead to. Owners are left out.
"""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lightning_sm.errors import SubmitError

# sagemaker 2.257.7, fw_utils.py: tar_and_upload_dir.
ARCHIVE_NAME = "sourcedir.tar.gz"


class SourceEntry(NamedTuple):
    """A file or a folder of the code.

    Attributes:
        path: Where it is on this machine.
        name: Its path in the archive.
        size: Bytes of a file; 0 for a folder.
        problem: Why it cannot be in the archive; empty if it can.
    """

    path: Path
    name: str
    size: int = 0
    problem: str = ""


def source_entries(folder: Path) -> Iterator[SourceEntry]:
    """Yield all files and folders below a folder, sorted by their names; links to folders are followed."""
    yield from _below(folder, "", ())


def write_archive(folder: Path, archive: Path) -> int:
    """Write the archive of a folder, and return the number of files in it.

    Args:
        folder: The code.
        archive: The file to write.

    Raises:
        OSError: A file cannot be read, or the archive cannot be written.
        SubmitError: The folder has something that cannot be in an archive.
    """
    num_files = 0
    with tarfile.open(archive, "w:gz", dereference=True) as tar:
        for entry in source_entries(folder):
            if entry.problem:
                raise SubmitError(f"source_dir contains {entry.path}, which {entry.problem}.")
            tar.add(entry.path, entry.name, recursive=False, filter=_without_owner)
            num_files += not entry.path.is_dir()
    return num_files


def _below(folder: Path, prefix: str, around: tuple[tuple[int, int], ...]) -> Iterator[SourceEntry]:
    try:
        own = folder.stat()
        paths = sorted(folder.iterdir())
    except OSError as error:
        yield SourceEntry(folder, prefix.rstrip("/") or ".", problem=f"cannot be read ({error.strerror})")
        return
    around = (*around, (own.st_dev, own.st_ino))
    for path in paths:
        name = f"{prefix}{path.name}"
        try:
            found = path.stat()
        except OSError as error:
            link = " (broken link)" if path.is_symlink() else f" ({error.strerror})"
            yield SourceEntry(path, name, problem=f"cannot be read{link}")
            continue
        if stat.S_ISDIR(found.st_mode):
            if (found.st_dev, found.st_ino) in around:
                yield SourceEntry(path, name, problem="is a link to a folder around it")
            else:
                yield SourceEntry(path, name)
                yield from _below(path, f"{name}/", around)
        elif not stat.S_ISREG(found.st_mode):
            yield SourceEntry(path, name, problem="is neither a file nor a folder")
        else:
            yield SourceEntry(path, name, found.st_size, "" if os.access(path, os.R_OK) else "cannot be read")


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member
