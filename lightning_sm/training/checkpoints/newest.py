"""Which checkpoint a restarted job goes on from: decided by what is in the files.

Every host starts with all files of the job's checkpoint folder in S3. Their times are those of the download, their
names are the user's, and the newest may be half a file: it was being uploaded when its host was taken away.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_sm.job.facts import SageMakerJob

logger = logging.getLogger(__name__)

JOB_KEY = "lightning_sm.job"

Load = Callable[[Path], Any]

_SUFFIX = ".ckpt"
# Of a zip archive that holds something; torch.save writes nothing else since 1.6.
_ZIP_MAGIC = b"PK\x03\x04"
# What torch.distributed.checkpoint and Lightning put into the folder of a sharded checkpoint, beside the shards.
_SHARDS_INDEX, _SHARDS_META = ".metadata", "meta.pt"


def job_facts(job: SageMakerJob) -> dict[str, str | None]:
    """Return what a checkpoint says of the job that wrote it, under ``JOB_KEY``.

    Args:
        job: The job.
    """
    return {"name": job.name, "checkpoint_s3_uri": job.checkpoint_uri}


def newest_checkpoint(
    folder: str | os.PathLike[str], job: SageMakerJob | None = None, load: Load | None = None
) -> Path | None:
    """Find the checkpoint that is furthest among those that training can go on from.

    Looks at files and folders named ``*.ckpt`` at any depth, not at hidden ones. Every host finds the same one in the
    same files. Logs a warning for each that is passed over though it may be further.

    Args:
        folder: The checkpoint folder; it need not exist.
        job: The current job. Checkpoints of another job with another S3 address, as a warm pool may leave them behind,
            are passed over. None takes checkpoints of any job.
        load: Reads what Lightning itself and torch.distributed.checkpoint have not written: that of a ``CheckpointIO``.

    Returns:
        The file, or the folder of a sharded checkpoint; None if there is none.
    """
    readings = [_read(path, job, load) for path in sorted(_candidates(Path(folder)))]
    best = max((reading for reading in readings if not reading.fault), key=lambda one: one.progress, default=None)
    for reading in readings:
        if not reading.fault:
            continue
        if best is None:
            logger.warning("%s %s.", reading.path, reading.fault)
        elif not reading.progress or reading.progress > best.progress:
            step = best.progress[0]
            logger.warning("%s %s: taking %s, of step %d, instead.", reading.path, reading.fault, best.path, step)
    if readings and best is None:
        logger.warning("No checkpoint in %s can be resumed: training starts from the beginning.", folder)
    return None if best is None else best.path


class _UnusableError(Exception):
    """Why a checkpoint is passed over, as the end of a sentence about it."""


@dataclass(frozen=True)
class _Reading:
    """What was found in one checkpoint.

    Attributes:
        path: The file or folder.
        progress: How far the training was, the optimizer steps first; empty if that is not known.
        fault: Why training cannot go on from it; empty if it can.
    """

    path: Path
    progress: tuple[int, ...] = ()
    fault: str = ""


def _candidates(folder: Path) -> Iterator[Path]:
    """All ``*.ckpt`` that are no links: what a link inside the folder points to is found by itself."""
    inside = os.path.realpath(folder)
    for parent, folders, files in os.walk(folder):
        # In place: os.walk enters what is left, and never a link.
        checkpoints = [name for name in (*folders, *files) if name.endswith(_SUFFIX) and not name.startswith(".")]
        folders[:] = [name for name in folders if not name.startswith(".") and name not in checkpoints]
        links = [name for name in (*folders, *checkpoints) if os.path.islink(os.path.join(parent, name))]
        for name in links:
            target = os.path.realpath(os.path.join(parent, name))
            if os.path.commonpath([inside, target]) != inside:
                logger.warning("%s is ignored: it links to %s, outside.", os.path.join(parent, name), target)
            elif not os.path.exists(target):
                logger.warning("%s is ignored: it links to %s, which is gone.", os.path.join(parent, name), target)
        yield from (Path(parent, name) for name in checkpoints if name not in links)


def _read(path: Path, job: SageMakerJob | None, load: Load | None) -> _Reading:
    try:
        checkpoint = _contents(path, load)
        progress = _progress(checkpoint)
        foreign = _foreign(checkpoint.get(JOB_KEY), job)
    except _UnusableError as error:
        return _Reading(path, fault=str(error))
    except Exception as error:  # noqa: BLE001 - a broken file may raise anything, in the user's classes, too
        return _Reading(path, fault=f"cannot be read ({_brief(error)})")
    if foreign:
        return _Reading(path, fault=foreign)
    # Lightning refuses to resume such a checkpoint (ModelCheckpoint(save_weights_only=True)).
    fault = "" if "lr_schedulers" in checkpoint else "holds the weights only"
    return _Reading(path, progress, fault)


def _contents(path: Path, load: Load | None) -> Any:
    try:
        return _load_shards(path) if path.is_dir() else _load(path)
    except Exception:
        if load is not None:
            with contextlib.suppress(Exception):  # then it is broken in any format, and the first error says more
                return load(path)
        raise


def _load(path: Path) -> Any:
    size = path.stat().st_size
    if not size:
        raise _UnusableError("is empty")
    with path.open("rb") as file:
        is_zip = file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC
    if is_zip:
        _check_archive(path, size)
    # weights_only=False: a job of the user's wrote the file, and hyperparameters in it may be of any type. Mapped, the
    # tensors cost nothing; on the device "meta", a user's class that looks at one while it is unpickled would fail.
    return torch.load(path, map_location="cpu", weights_only=False, mmap=is_zip)


def _check_archive(path: Path, size: int) -> None:
    # The list of the entries is at the end: what was cut off has none.
    try:
        with zipfile.ZipFile(path) as archive:
            end = max((entry.header_offset + entry.compress_size for entry in archive.infolist()), default=0)
    except zipfile.BadZipFile as error:
        raise _UnusableError(f"is truncated, at {size} bytes ({_brief(error)})") from error
    if end > size:
        raise _UnusableError(f"is truncated: it has {size} bytes, and lists entries up to byte {end}")


def _load_shards(path: Path) -> Any:
    """Return all but the weights of a sharded checkpoint, whose shards are there."""
    index = path / _SHARDS_INDEX
    for file in (index, path / _SHARDS_META):
        if not file.is_file():
            raise _UnusableError(f"is a folder without {file.name}: half a sharded checkpoint, or of another kind")
    ends: dict[str, int] = {}
    for info in pickle.loads(index.read_bytes()).storage_data.values():  # noqa: S301 - trusted like the checkpoint
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in sorted(ends.items()):
        if not (path / name).is_file():
            raise _UnusableError(f"lacks its shard {name}")
        size = (path / name).stat().st_size
        if size < end:
            raise _UnusableError(f"is truncated: its shard {name} has {size} bytes of {end}")
    try:
        return _load(path / _SHARDS_META)
    except _UnusableError as error:
        raise _UnusableError(f"has a {_SHARDS_META} that {error}") from error


def _progress(checkpoint: Any) -> tuple[int, ...]:
    """How far the training was; the later numbers tell checkpoints of the same optimizer step apart."""
    if not isinstance(checkpoint, Mapping) or not {"global_step", "epoch", "loops"} <= checkpoint.keys():
        raise _UnusableError("is no checkpoint of a Lightning Trainer")
    fit_loop = checkpoint["loops"]["fit_loop"]
    epochs, batches, validation = (
        fit_loop.get(name, {}).get("total", {})
        for name in ("epoch_progress", "epoch_loop.batch_progress", "epoch_loop.val_loop.batch_progress")
    )
    counts = [counter.get("processed", 0) for counter in (epochs, batches, validation)]
    return tuple(int(count) for count in (checkpoint["global_step"], checkpoint["epoch"], *counts))


def _foreign(facts: Any, job: SageMakerJob | None) -> str:
    """Say why a checkpoint is none of this job's; empty if it may be."""
    if job is None or not isinstance(facts, Mapping):
        return ""
    name, uri = facts.get("name"), facts.get("checkpoint_s3_uri")
    # A restart has the same name; a new job that is to go on where another one ended has its S3 address.
    if None in (name, job.name) or name == job.name or _folder_of(uri) == _folder_of(job.checkpoint_uri):
        return ""
    return (
        f"is left over from job {name!r} (checkpoint_s3_uri={uri!r}); this is job {job.name!r} "
        f"(checkpoint_s3_uri={job.checkpoint_uri!r})"
    )


def _folder_of(uri: str | None) -> str | None:
    return None if uri is None else uri.rstrip("/")


def _brief(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
