"""Checkpoints that appear whole or not at all in a folder that is copied to S3 in the background."""

from __future__ import annotations

import errno
import inspect
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_sm._lightning import Trainer, WrappingCheckpointIO
from lightning_sm.errors import CheckpointError

if TYPE_CHECKING:
    from lightning_fabric.plugins import CheckpointIO
    from lightning_fabric.utilities.types import _PATH

# Hidden names of what is being written: in the folder itself, and (with the folder's name before it) beside it.
_INCOMING = ".incoming-"
# torch.save reports a full disk as a RuntimeError: of PytorchStreamWriter, of its source file, or of its stream.
_STREAM_WRITER = re.compile(r"PytorchStreamWriter|inline_container|iostream error")
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FORBIDDEN = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})

# Of the module, because strategies that spawn pickle the Trainer, and a lock cannot be pickled.
_removals = threading.Lock()


class DurableCheckpointIO(WrappingCheckpointIO):
    """Let another CheckpointIO write outside a folder, and move what it wrote into the folder when it is whole.

    SageMaker copies the checkpoint folder to S3 file by file whenever a file changes: half a file that it finds there
    is half a file after a restart. Used on rank 0, where Lightning's strategies call it, in any thread; it goes inside
    of ``AsyncCheckpointIO``. Paths that are not in the folder are left to the other CheckpointIO.

    The newest checkpoint may be half uploaded when the host is taken away, so that a checkpoint is not deleted before
    the next removal: while a job trains, at least two are there.

    Args:
        checkpoint_io: What writes and reads the checkpoints, as files or as folders.
        folder: The folder that is copied to S3.
    """

    def __init__(self, checkpoint_io: CheckpointIO, folder: str | os.PathLike[str]) -> None:
        super().__init__(checkpoint_io)
        self._folder = Path(os.path.abspath(folder))
        self._removed: list[Path] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any = None) -> None:
        """Write a checkpoint.

        Args:
            checkpoint: What to write.
            path: Where it is to appear. What was there before is intact until then.
            storage_options: For the other CheckpointIO.

        Raises:
            CheckpointError: It could not be written: the disk is full, or the folder cannot be written to.
        """
        target = self._inside(path)
        if target is None:
            self._inner.save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        with _explained(target), _temporary_folder(self._staging_parents()) as staging:
            # Of the caller's type, which the other CheckpointIO can take.
            staged = str(staging / target.name) if isinstance(path, str) else staging / target.name
            self._inner.save_checkpoint(checkpoint, staged, storage_options=storage_options)
            # The checkpoint itself comes last, should there be files beside it.
            names = sorted(os.listdir(staging), key=lambda name: (name == target.name, name))
            if not names:
                # Lightning's own returns as if all were well when it is not permitted to write (_atomic_save).
                raise CheckpointError(
                    f"{type(self._inner).__name__} has not written the checkpoint {target} when it returned. One that "
                    "writes in the background must be a _WrappingCheckpointIO around one that does not; else see "
                    f"whether {tempfile.gettempdir()} and {target.parent} can be written to."
                )
            target.parent.mkdir(parents=True, exist_ok=True)
            with _removals:
                self._removed = [removed for removed in self._removed if removed != target]
            for name in names:
                _move(staging / name, target.parent / name)

    def load_checkpoint(self, path: _PATH, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a checkpoint.

        Args:
            path: Where it is.
            *args: For the other CheckpointIO.
            **kwargs: For the other CheckpointIO.
        """
        # Lightning 2.6 asks for weights_only=None of each, also of one that was written for 2.5.
        if kwargs.get("weights_only", ...) is None and not _takes(self._inner.load_checkpoint, "weights_only"):
            del kwargs["weights_only"]
        return self._inner.load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: _PATH) -> None:
        """Remove the checkpoint that was to be removed before this one; this one stays until the next call.

        Args:
            path: Where the checkpoint is that is not needed any more.
        """
        target = self._inside(path)
        if target is None:
            self._inner.remove_checkpoint(path)
            return
        with _removals:
            # One may be named before it is there: AsyncCheckpointIO writes it in a thread. Only what is there counts.
            self._removed = [*(removed for removed in self._removed if removed != target), target]
            there = [removed for removed in self._removed if os.path.lexists(removed)]
            if there:
                self._removed = self._removed[self._removed.index(there[-1]) :]
        for removed in there[:-1]:
            self._inner.remove_checkpoint(str(removed))

    def teardown(self) -> None:
        """Pass the end of the Trainer on."""
        self._inner.teardown()

    @property
    def _inner(self) -> CheckpointIO:
        assert self.checkpoint_io is not None  # noqa: S101 - it is set in __init__; None is for Lightning's wrappers
        return self.checkpoint_io

    def _inside(self, path: _PATH) -> Path | None:
        text = os.fspath(path).removeprefix("file://")
        if "://" in text:
            return None
        target = Path(os.path.abspath(text))
        # Links are followed up to the file itself: a link of its name is replaced.
        folder, parent = os.path.realpath(self._folder), os.path.realpath(target.parent)
        return target if os.path.commonpath([folder, parent]) == folder else None

    def _staging_parents(self) -> Iterator[tuple[str, Path]]:
        """Where to write, best first: beside the folder, unless that is another file system."""
        prefix = f".{self._folder.name}{_INCOMING}"
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._folder.stat().st_dev == self._folder.parent.stat().st_dev:
            yield prefix, self._folder.parent
        yield prefix, Path(tempfile.gettempdir())


def make_durable(trainer: Trainer, folder: str | os.PathLike[str]) -> None:
    """Let a Trainer write its checkpoints in ``folder`` through ``DurableCheckpointIO``; a second call does nothing.

    Its innermost CheckpointIO is wrapped, so that ``AsyncCheckpointIO`` and the user's own wrappers stay as they are.
    On rank 0 it removes what an earlier run, which was killed, was writing. Sharded strategies write by themselves.

    Args:
        trainer: The Trainer, before it runs.
        folder: The folder that is copied to S3.
    """
    outer: WrappingCheckpointIO | None = None
    inner: CheckpointIO | None = trainer.strategy.checkpoint_io
    while isinstance(inner, WrappingCheckpointIO):
        if isinstance(inner, DurableCheckpointIO):
            return
        outer, inner = inner, inner.checkpoint_io
    assert inner is not None  # noqa: S101 - the strategy fills its wrappers when it is asked for them
    durable = DurableCheckpointIO(inner, folder)
    if outer is None:
        trainer.strategy.checkpoint_io = durable
    else:
        outer._checkpoint_io = durable  # its setter takes no second one
    if trainer.is_global_zero:
        _remove_leftovers(durable._folder)


def _remove_leftovers(folder: Path) -> None:
    beside = f".{folder.name}{_INCOMING}"
    leftovers = [path for path in folder.parent.iterdir() if path.name.startswith(beside)] if folder.exists() else []
    for leftover in (*leftovers, *folder.rglob(f"{_INCOMING}*")):
        shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def _explained(target: Path) -> Iterator[None]:
    """Turn errors of writing into one that says what to do, after everything that was half written is removed."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, RuntimeError) as error:
        is_stream = isinstance(error, RuntimeError) and _STREAM_WRITER.search(str(error)) is not None
        if isinstance(error, RuntimeError) and not is_stream:
            raise
        code = getattr(error, "errno", None)
        if is_stream or code in _FULL:
            advice = "Keep fewer checkpoints (save_top_k), or give the job a larger volume (volume_size)."
        elif code in _FORBIDDEN:
            advice = "Let this process write to both."
        else:
            advice = "See whether both are in order."
        free = " and ".join(_free(folder) for folder in (target.parent, Path(tempfile.gettempdir())))
        cause = str(error).splitlines()[0] if str(error) else ""
        raise CheckpointError(
            f"The checkpoint {target} was not written: {type(error).__name__}: {cause}. {free}. What was there under "
            f"this name is intact. {advice}"
        ) from error


def _free(folder: Path) -> str:
    while not folder.exists():
        folder = folder.parent
    return f"{shutil.disk_usage(folder).free} bytes are free in {folder}"


@contextmanager
def _temporary_folder(parents: Iterator[tuple[str, Path]]) -> Iterator[Path]:
    """Make a folder in the first place that can be written to, and remove it with all that is still in it."""
    errors: list[OSError] = []
    for prefix, parent in parents:
        try:
            folder = tempfile.mkdtemp(prefix=prefix, dir=parent)
        except OSError as error:
            errors.append(error)
            continue
        try:
            yield Path(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return
    raise errors[-1]


def _move(source: Path, destination: Path) -> None:
    _sync(source)
    try:
        _replace(source, destination, source.parent)
    except OSError as error:
        # Also on one file system, between two mounts of it.
        if error.errno != errno.EXDEV:
            raise
        with _temporary_folder(iter([(_INCOMING, destination.parent)])) as nearby:
            copy = nearby / destination.name
            if source.is_dir():
                shutil.copytree(source, copy, copy_function=shutil.copy)
            else:
                shutil.copy(source, copy)
            _sync(copy)
            _replace(copy, destination, nearby)


def _replace(source: Path, destination: Path, aside: Path) -> None:
    if not os.path.lexists(destination) or not (source.is_dir() or destination.is_dir()):
        os.replace(source, destination)
        return
    # rename(2) replaces no folder that holds something: for a moment there is none of that name.
    old = aside / f"{destination.name}.old"
    os.replace(destination, old)
    try:
        os.replace(source, destination)
    except BaseException:
        os.replace(old, destination)
        raise


def _sync(path: Path) -> None:
    """Have the disk hold a file, or all files of a folder, before they get their names."""
    files = [Path(parent, name) for parent, _, names in os.walk(path) for name in names] if path.is_dir() else [path]
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())


def _takes(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
