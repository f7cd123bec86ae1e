"""Atomic writing of checkpoints into a folder that SageMaker copies to S3 in the background."""

from __future__ import annotations

import errno
import inspect
import os
import re
import shutil
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
LARGER_VOLUME = "give the job a larger volume (volume_gb in job.yaml, volume_size in the SDK)"
_FORBIDDEN = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})

# Not an attribute: strategies that spawn pickle the Trainer, and a lock cannot be pickled.
_removals = threading.Lock()
# Folders that this process has cleaned. Clean each only once: later, another host that shares it may be writing there.
_cleaned: set[Path] = set()


class DurableCheckpointIO(UnlistedCheckpointIO):
    """A wrapper that lets a CheckpointIO write under names that SageMaker's agent ignores, and renames complete files.

    SageMaker copies the checkpoint folder to S3 file by file whenever a file changes: half a file that it finds there
    is half a file after a restart. Lightning's strategies call the wrapper on rank 0, in any thread; it goes inside
    ``AsyncCheckpointIO``. Paths outside the folder are passed on to the other CheckpointIO.

    The latest checkpoint may be partly uploaded when the host is taken away. So a checkpoint that Lightning removes is
    kept until the next removal: while a job trains, the folder has at least two.

    Args:
        checkpoint_io: Writes and reads the checkpoints, as files or as folders.
        folder: The folder that SageMaker copies to S3.
    """

    def __init__(self, checkpoint_io: CheckpointIO, folder: str | os.PathLike[str]) -> None:
        super().__init__(checkpoint_io)
        self._folder = Path(os.path.abspath(folder))
        self._removed: list[Path] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any = None) -> None:
        """Write a checkpoint. An earlier one at the same path stays intact until the new one is complete.

        Raises:
            CheckpointError: The disk is full, the folder is not writable, or the other CheckpointIO wrote nothing.
        """
        target = self._inside(path)
        if target is None:
            self._inner.save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        unfinished = target.with_name(target.name + IGNORED)
        with _explained(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            _discard(unfinished)  # left by a save that was killed
            try:
                # The other CheckpointIO gets the caller's type of path.
                self._write(checkpoint, str(unfinished) if isinstance(path, str) else unfinished, storage_options)
                written = _written(unfinished)
                if not written:
                    # Lightning's own CheckpointIO returns without an error when it lacks permission (_atomic_save).
                    raise CheckpointError(
                        f"{type(self._inner).__name__} returned without writing the checkpoint {target}. Check that "
                        f"{target.parent} is writable. A CheckpointIO that writes in the background must be a "
                        "_WrappingCheckpointIO around one that does not."
                    )
                with _removals:
                    self._removed = [removed for removed in self._removed if removed != target]
                for file in written:
                    _sync(file)
                    _replace(file, target.with_name(target.name + file.name.removeprefix(unfinished.name)))
            finally:
                for file in _written(unfinished):
                    _discard(file)

    def _write(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any) -> None:
        if type(self._inner) is TorchCheckpointIO and storage_options is None:
            # Lightning's own would build the whole file in memory, write it to the temporary directory, which in a
            # container is on another disk, and copy it from there (_atomic_save, and fsspec's LocalFileOpener.commit).
            torch.save(checkpoint, path)
        else:
            self._inner.save_checkpoint(checkpoint, path, storage_options=storage_options)

    def load_checkpoint(self, path: _PATH, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a checkpoint with the other CheckpointIO."""
        # Lightning 2.6 passes weights_only, which a CheckpointIO written for 2.5 does not accept.
        load = self._inner.load_checkpoint
        if not kwargs.get("weights_only", True):
            parameters = inspect.signature(load).parameters
            takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
            if "weights_only" not in parameters and not takes_any:
                del kwargs["weights_only"]
        return load(path, *args, **kwargs)

    def remove_checkpoint(self, path: _PATH) -> None:
        """Remove the checkpoint of the previous call, and keep this one until the next call."""
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
            if removed.is_dir() and not removed.is_symlink():
                remove_folder(removed)
            else:
                self._inner.remove_checkpoint(str(removed))

    def teardown(self) -> None:
        """Tear the other CheckpointIO down."""
        self._inner.teardown()

    @property
    def _inner(self) -> CheckpointIO:
        assert self.checkpoint_io is not None  # noqa: S101 - set in __init__; only Lightning's own wrappers have None
        return self.checkpoint_io

    def _inside(self, path: _PATH) -> Path | None:
        text = os.fspath(path).removeprefix("file://")
        if "://" in text:
            return None
        target = Path(os.path.abspath(text))
        # Follow links in the parents, but not a link of the file's own name: a new checkpoint replaces that.
        folder = os.path.realpath(self._folder)
        parent = os.path.realpath(target.parent)
        return target if os.path.commonpath([folder, parent]) == folder else None


def make_durable(trainer: Trainer, folder: str | os.PathLike[str]) -> None:
    """Make a Trainer write its checkpoints in ``folder`` through ``DurableCheckpointIO``; a second call does nothing.

    It wraps the innermost CheckpointIO, so that ``AsyncCheckpointIO`` and the user's own wrappers stay in place. The
    first call on a host also removes the unfinished checkpoints of a killed run. Sharded strategies write without a
    CheckpointIO.
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
        outer._checkpoint_io = durable  # its setter refuses to replace one
    root = durable._folder
    if trainer.local_rank == 0 and root not in _cleaned:
        _cleaned.add(root)
        for unfinished in [*root.rglob(f"*{IGNORED}*")]:
            _discard(unfinished)


@contextmanager
def _explained(target: Path) -> Iterator[None]:
    """Raise a CheckpointError with advice in place of an error from writing."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not is_disk_full(error):
            raise
        if is_disk_full(error):
            advice = f"Keep fewer checkpoints (save_top_k), or {LARGER_VOLUME}."
        elif getattr(error, "errno", None) in _FORBIDDEN:
            advice = f"Give this process write permission for {target.parent}."
        else:
            advice = f"Check that {target.parent} is writable."
        raise CheckpointError(
            f"The checkpoint {target} was not written: {first_line(error)}. {free_space(target.parent)}. Any earlier "
            f"checkpoint of this name is intact. {advice}"
        ) from error


def is_disk_full(error: BaseException) -> bool:
    """Return whether an error from writing a file says that the disk is full."""
    if isinstance(error, RuntimeError):
        return _STREAM_WRITER.search(str(error)) is not None
    return isinstance(error, OSError) and error.errno in _FULL


def free_space(folder: Path) -> str:
    """Say how much space is free in a folder, or where it would be made."""
    while not folder.exists():
        folder = folder.parent
    return f"{shutil.disk_usage(folder).free} bytes are free in {folder}"


def first_line(error: BaseException) -> str:
    """Return the type and the first line of an error."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _written(path: Path) -> list[Path]:
    """Return the checkpoint, and files beside it whose names begin with its name; the checkpoint is the last."""
    return sorted((file for file in path.parent.iterdir() if file.name.startswith(path.name)), reverse=True)


def _discard(path: Path) -> None:
    """Remove a file or a folder, which need not exist; leave what cannot be removed."""
    if path.is_dir() and not path.is_symlink():
        remove_folder(path)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _replace(source: Path, destination: Path) -> None:
    if not os.path.lexists(destination) or not (source.is_dir() or destination.is_dir()):
        os.replace(source, destination)
        return
    # rename(2) does not replace a folder with files in it: move it aside first. For a moment, the name is unused.
    old = destination.with_name(f"{destination.name}.old{IGNORED}")
    _discard(old)
    os.replace(destination, old)
    try:
        os.replace(source, destination)
    except BaseException:
        os.replace(old, destination)
        raise
    _discard(old)


def _sync(path: Path) -> None:
    """Flush a file, or all files of a folder, to the disk."""
    files = [Path(parent, name) for parent, _, names in os.walk(path) for name in names] if path.is_dir() else [path]
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
