"""Names by which SageMaker's agent, which copies the checkpoint folder to S3, and the code in the container cooperate.

No document states them. They are those that AWS's own code relies on: sagemaker-xgboost-container, for checkpoints, and
smdebug, which keeps unfinished files in a folder named ``.sagemaker-ignore``.
"""

from __future__ import annotations

from pathlib import Path

# Ends the names of files that the agent does not upload.
IGNORED = ".sagemaker-ignore"
# The agent's own files, empty, beside each file: while it uploads it, and when it has.
UPLOADING = ".sagemaker-uploading"
UPLOADED = ".sagemaker-uploaded"


def is_ignored(name: str) -> bool:
    """Whether the agent does not upload what has this name: unfinished files, and the agent's own."""
    return name.endswith((IGNORED, UPLOADING, UPLOADED))


def files_of(path: Path) -> list[Path]:
    """Return the files at and below a path that the agent uploads, such as those of a checkpoint.

    Args:
        path: A file or a folder; it need not exist.
    """
    below = path.rglob("*") if path.is_dir() else [path]
    files = sorted(file for file in below if file.is_file() and not file.is_symlink())
    # Without the folders above: the path itself may lie anywhere.
    return [file for file in files if not any(map(is_ignored, (path.name, *file.relative_to(path).parts)))]


def marker_of(file: Path, ending: str) -> Path:
    """Return where the agent's own file for a file is; ``ending`` is ``UPLOADING`` or ``UPLOADED``."""
    return file.with_name(file.name + ending)


def is_uploaded(file: Path) -> bool:
    """Whether the agent has uploaded a file as it is now, and not only an earlier one of this name."""
    try:
        # Of an earlier file's upload the time is older. The inode's time of change would not do: a hard link sets it.
        return marker_of(file, UPLOADED).stat().st_mtime_ns >= file.stat().st_mtime_ns
    except FileNotFoundError:
        return False
