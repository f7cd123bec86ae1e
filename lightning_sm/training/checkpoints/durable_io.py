"""Atomic checkpoint writes to a folder that SageMaker copies to S3 in the background."""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning_sm._lightning import TorchCheckpointIO, Trainer, WrappingCheckpointIO
from lightning_sm._unlisted import UnlistedCheckpointIO
from lightning_sm.errors import CheckpointError
from lightning_sm.job.uploads import IGNORED
from lightning_sm.training.checkpoints.sharded import remove_folder

if TYPE_CHECKING:
    from lightning_fabric.plugins import CheckpointIO
    from lightning_fabric.utilities.types import _PATH

# torch.save reports a full disk as a RuntimeError that names PytorchStreamWriter, its source file, or its stream.
_STREAM_WRITER = re.compile(r"PytorchStreamWriter|inline_container|iostream error")
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

# A global, not an attribute: strategies that spawn processes pickle the Trainer, and a lock cannot be pickled.
_removals = threading.Lock()


class DurableCheckpointIO(UnlistedCheckpointIO):
    """A wrapper that makes a CheckpointIO write under names that SageMaker's agent ignores, and renames complete files.

    SageMaker copies the checkpoint folder to S3 file by file whenever a file changes, so a half-written file could
    come back from S3 truncated after a restart. Lightning's strategies call the wrapper on rank 0, in any thread.
    The wrapper belongs inside ``AsyncCheckpointIO``. Paths outside the folder are passed on to the wrapped
    CheckpointIO.

    If a host is reclaimed, the latest checkpoint may be only partly uploaded. Therefore, a checkpoint that Lightning
    removes is kept until the next removal, and the folder has at least two checkpoints while a job trains.

    Args:
        checkpoint_io: The wrapped CheckpointIO, which writes and reads the checkpoints.
        folder: The folder that SageMaker copies to S3.
    """

    def __init__(self, checkpoint_io: CheckpointIO, folder: str | os.PathLike[str]) -> None:
        super().__init__(checkpoint_io)
        self._inner = checkpoint_io
        self._folder = Path(os.path.abspath(folder))
        self._removed: list[Path] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any = None) -> None:
        """Write a checkpoint. An earlier one at the same path stays intact until the new one is complete.

        Raises:
            CheckpointError: The disk is full, the folder is not writable, or the wrapped CheckpointIO wrote nothing.
        """
        target = self._inside(path)
        if target is None:
            self._inner.save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        unfinished = target.with_name(target.name + IGNORED)
        with disk_errors_explained(f"checkpoint {target}", target.parent, "Any earlier one of this name is intact."):
            target.parent.mkdir(parents=True, exist_ok=True)
            _discard(unfinished)  # left by a save that was killed
            try:
                self._write(checkpoint, unfinished, storage_options)
                with _removals:
                    self._removed = [removed for removed in self._removed if removed != target]
                _sync(unfinished)
                if unfinished.is_dir() or target.is_dir():  # rename(2) would not replace a folder
                    _discard(target)
                os.replace(unfinished, target)
            finally:
                _discard(unfinished)

    def _write(self, checkpoint: dict[str, Any], path: Path, storage_options: Any) -> None:
        if type(self._inner) is TorchCheckpointIO and storage_options is None:
            # Lightning's implementation would build the whole file in memory, write it to the temporary directory,
            # which is on another disk in a container, and copy it (_atomic_save, and fsspec's LocalFileOpener.commit).
            torch.save(checkpoint, path)
        else:
            self._inner.save_checkpoint(checkpoint, str(path), storage_options=storage_options)
        if not path.exists():
            raise CheckpointError(
                f"{type(self._inner).__name__} returned without writing the checkpoint {path}. If a CheckpointIO "
                "writes in the background, make it a _WrappingCheckpointIO around one that does not."
            )

    def remove_checkpoint(self, path: _PATH) -> None:
        """Remove the checkpoint that the previous call named, and keep the given one until the next call."""
        target = self._inside(path)
        if target is None:
            self._inner.remove_checkpoint(path)
            return
        with _removals:
            self._removed = [*(removed for removed in self._removed if removed != target), target]
            # AsyncCheckpointIO writes in a thread, so a checkpoint may be removed before it exists.
            existing = [removed for removed in self._removed if os.path.lexists(removed)]
            if existing:
                self._removed = self._removed[self._removed.index(existing[-1]) :]
        for removed in existing[:-1]:
            self._inner.remove_checkpoint(str(removed))

    def teardown(self) -> None:
        """Tear down the wrapped CheckpointIO."""
        self._inner.teardown()

    def _inside(self, path: _PATH) -> Path | None:
        text = os.fspath(path).removeprefix("file://")
        if "://" in text:
            return None
        target = Path(os.path.abspath(text))
        # Resolve links in the parents only: if the file itself is a link, a new checkpoint replaces it.
        return target if target.parent.resolve().is_relative_to(self._folder.resolve()) else None


def make_durable(trainer: Trainer, folder: str | os.PathLike[str]) -> None:
    """Make a Trainer write its checkpoints in ``folder`` through ``DurableCheckpointIO``; a second call does nothing.

    The innermost CheckpointIO is wrapped, so that ``AsyncCheckpointIO`` and the user's wrappers stay in place.
    Unfinished checkpoints that a killed run left behind are removed. Sharded strategies write without a CheckpointIO.
    """
    outer: WrappingCheckpointIO | None = None
    inner: CheckpointIO | None = trainer.strategy.checkpoint_io
    while isinstance(inner, WrappingCheckpointIO):
        if isinstance(inner, DurableCheckpointIO):
            return
        outer, inner = inner, inner.checkpoint_io
    assert inner is not None  # noqa: S101 - strategy.checkpoint_io has filled its wrappers
    durable = DurableCheckpointIO(inner, folder)
    if outer is None:
        trainer.strategy.checkpoint_io = durable
    else:
        outer._checkpoint_io = durable  # the property's setter refuses to replace a CheckpointIO
    if trainer.local_rank == 0:
        for unfinished in [*Path(folder).rglob(f"*{IGNORED}")]:
            _discard(unfinished)


@contextmanager
def disk_errors_explained(what: str, folder: Path, intact: str) -> Iterator[None]:
    """Replace a disk error that the block raises with a CheckpointError that gives advice.

    Args:
        what: What the block writes, as named in the message.
        folder: The destination folder.
        intact: A sentence about what is still intact.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        is_of_disk = isinstance(error, OSError) or _STREAM_WRITER.search(str(error)) is not None
        if isinstance(error, CheckpointError) or not is_of_disk:
            raise
        line = str(error).partition("\n")[0]
        remedy = f"Check that {folder} is writable."
        if isinstance(error, RuntimeError) or error.errno in _FULL:
            remedy = (
                "The disk is full: give the job a larger volume (volume_gb in job.yaml, volume_size in the SDK), or "
                "keep fewer checkpoints (save_top_k)."
            )
        raise CheckpointError(
            f"The {what} was not written to {folder}: {type(error).__name__}: {line}. {remedy} {intact}"
        ) from error


def _discard(path: Path) -> None:
    """Remove a file or a folder if it exists, and ignore errors."""
    if path.is_dir() and not path.is_symlink():
        remove_folder(path)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Flush a file, or all files in a folder, to disk."""
    for file in [path, *path.rglob("*")]:
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
