"""File names understood by SageMaker's agent, which copies checkpoints to S3.

They are undocumented, but AWS's code relies on them: sagemaker-xgboost-container, for checkpoints, and smdebug, which
keeps unfinished files in a folder named ``.sagemaker-ignore``.
"""

from __future__ import annotations

from pathlib import Path

# Suffix of files that the agent does not upload.
IGNORED = ".sagemaker-ignore"
# Suffixes of the empty marker files that the agent creates next to each file, during its upload and after it.
UPLOADING = ".sagemaker-uploading"
UPLOADED = ".sagemaker-uploaded"


def is_ignored(name: str) -> bool:
    """Return whether the agent ignores files with this name: unfinished files, and the agent's markers."""
    return name.endswith((IGNORED, UPLOADING, UPLOADED))


def files_of(path: Path) -> list[Path]:
    """Return the files at and below a path that the agent uploads, such as those of a checkpoint.

    Args:
        path: A file or a folder; it need not exist.
    """
    below = path.rglob("*") if path.is_dir() else [path]
    files = sorted(file for file in below if file.is_file() and not file.is_symlink())
    # Do not check the folders above the path, which may have any name.
    return [file for file in files if not any(map(is_ignored, (path.name, *file.relative_to(path).parts)))]


def marker_of(file: Path, ending: str) -> Path:
    """Return the path of the agent's marker for a file; ``ending`` is ``UPLOADING`` or ``UPLOADED``."""
    return file.with_name(file.name + ending)


def is_uploaded(file: Path) -> bool:
    """Return whether the agent has uploaded this version of a file, not just an earlier one with the same name."""
    try:
        # An earlier version's marker is older than the file. Do not compare st_ctime, which hard links change.
        return marker_of(file, UPLOADED).stat().st_mtime_ns >= file.stat().st_mtime_ns
    except FileNotFoundError:
        return False
