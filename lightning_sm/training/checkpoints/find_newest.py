"""The search for the latest valid checkpoint, from which a restarted job resumes.

Every host starts with all files from the job's checkpoint folder in S3. File times are those of the download, and users
choose the names, so only the contents of files count. The latest checkpoint may be truncated if its host was reclaimed
during the upload.
"""

from __future__ import annotations

import logging
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lightning_sm.errors import CheckpointError
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.uploads import files_of, is_ignored
from lightning_sm.training.checkpoints.fits import Fit, may_resume
from lightning_sm.training.checkpoints.pickle_peek import inert_checkpoint, inert_pickle

logger = logging.getLogger(__name__)

JOB_KEY = "lightning_sm.job"

Gather = Callable[[Any], list[Any]]

_SUFFIX = ".ckpt"
# Files that torch.distributed.checkpoint and Lightning write beside the shards into a sharded checkpoint's folder.
_SHARDS_INDEX, _SHARDS_META = ".metadata", "meta.pt"
# The file that DeepSpeed writes last into a checkpoint's folder; it names the subfolder with the ranks' files.
_DEEPSPEED_TAG = "latest"
_DEEPSPEED_MAIN = re.compile(r"(zero_pp_rank_0_)?mp_rank_00_model_states\.pt")


def job_facts(
    job: SageMakerJob,
    fit: Fit,
    *,
    optimizers: Sequence[str] = (),
    is_ending: bool = False,
    is_interruption: bool = False,
) -> dict[str, Any]:
    """Return the value of ``JOB_KEY`` in a checkpoint: facts that identify the job that wrote it.

    Args:
        job: The job.
        fit: The fit that saves the checkpoint.
        optimizers: The ``optimizer_names`` of the Trainer.
        is_ending: Whether a callback such as ``EarlyStopping`` has ended the fit.
        is_interruption: Whether the checkpoint is saved because of an interruption, after all hooks of its step.
    """
    facts = {"name": job.name, "checkpoint_s3_uri": job.checkpoint_uri, "fit": asdict(fit)}
    marks = {"optimizers": list(optimizers), "is_ending": is_ending, "is_interruption": is_interruption}
    return {**facts, **{name: value for name, value in marks.items() if value}}


def optimizer_names(trainer: Any) -> list[str]:
    """Return the names of the classes of a Trainer's optimizers."""
    return [f"{type(one).__module__}.{type(one).__qualname__}" for one in trainer.optimizers]


def newest_checkpoint(
    folder: str | os.PathLike[str],
    job: SageMakerJob | None = None,
    *,
    fit: Fit | None = None,
    gather: Gather = lambda own: [own],
) -> FoundCheckpoint | None:
    """Find the valid checkpoint with the most progress; those of ``job`` take precedence over those of earlier jobs.

    Candidates are all ``*.ckpt`` files and folders (of torch.distributed.checkpoint and DeepSpeed) at any depth that
    are neither hidden nor unfinished. Hosts with the same files find the same checkpoint. A warning names each invalid
    candidate that may have more progress.

    This function never runs code from a checkpoint. A file that holds objects, such as those in hyperparameters, is
    valid only if it names this job, or a job with the same S3 address, as its origin. Anyone who can write to the
    folder can forge this name: the check only protects against files left there by accident.

    Args:
        folder: The checkpoint folder; it need not exist.
        job: The current job. Checkpoints of a job with another name and S3 address, which a warm pool may leave behind,
            are invalid. If None, checkpoints of any job are valid.
        fit: The fit that is to resume; checkpoints of other fits are skipped. If None, checkpoints of any fit count.
        gather: Returns the values of all hosts that call this function at the same time, in host order, so that they
            judge all their files together. By default, this host is assumed to have all files.

    Returns:
        The checkpoint, which may have a ``doubt``, or None if no checkpoint is valid.
    """
    paths = sorted(_candidates(Path(folder)))
    sizes = _joined(gather({str(path): _sizes(path) for path in paths}))
    own = [_read(path, sizes[str(path)], job) for path in paths]
    readings = _best_of_each([replace(item, host=host) for host, items in enumerate(gather(own)) for item in items])
    if fit is not None:
        readings = _of_fit(readings, fit, job)
    best = _best(readings, job)
    # Check every host's copy: reading the progress does not reveal damage, so a damaged copy looks like the others.
    while best is not None and (damage := next(filter(None, gather(_damage(best.path))), None)) is not None:
        readings = [replace(item, fault=damage) if item is best else item for item in readings]
        best = _best(readings, job)
    for reading in [item for item in readings if item.fault is not None]:
        if best is None:
            logger.warning("%s %s.", reading.path, reading.fault)
        elif not reading.progress or reading.progress > best.progress:
            step = best.progress[0]
            logger.warning("%s %s. Using %s from step %d instead.", reading.path, reading.fault, best.path, step)
    if readings and best is None:
        logger.warning("No checkpoint in %s is valid.", folder)
    return best


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint, and what was learned by reading it.

    Attributes:
        path: The file, or the folder of a sharded checkpoint.
        progress: Counts of optimizer steps, epochs, and more (see ``_progress``); empty if unknown.
        job: The ``job_facts`` of the job that wrote the checkpoint; None if missing. A valid checkpoint without them
            holds no objects.
        fault: Why training cannot resume from the checkpoint; None if it is valid.
        doubt: Why the checkpoint may not belong to the fit that is to resume; None if it clearly does.
        host: The number, in host order, of the host that read the checkpoint.
    """

    path: Path
    progress: tuple[int, ...] = ()
    job: Mapping[str, Any] | None = None
    fault: str | None = None
    doubt: str | None = None
    host: int = 0

    @property
    def job_name(self) -> str | None:
        """Name of the job that wrote the checkpoint, or None if unknown."""
        name: str | None = (self.job or {}).get("name")
        return name

    @property
    def fit(self) -> Fit | None:
        """The fit that wrote the checkpoint, or None if unknown."""
        return Fit.of((self.job or {}).get("fit"))

    def is_of(self, job: SageMakerJob | None) -> bool:
        """Return whether an attempt of this job wrote the checkpoint."""
        return job is not None and self.job is not None and self.job_name == job.name


class _UnusableError(Exception):
    """The reason why a checkpoint is invalid, worded to follow the checkpoint's path in a sentence."""


def _candidates(folder: Path) -> Iterator[Path]:
    """Yield all visible ``*.ckpt`` except links: the walk finds link targets inside the folder anyway."""
    for parent, folders, files in os.walk(folder):
        checkpoints = [name for name in (*folders, *files) if name.endswith(_SUFFIX) and not name.startswith(".")]
        # Change the list in place: os.walk descends into the folders that remain in it, but not into links.
        others = (name for name in folders if name not in checkpoints)
        folders[:] = [name for name in others if not name.startswith(".") and not is_ignored(name)]
        yield from (path for name in checkpoints if not (path := Path(parent, name)).is_symlink())


def _sizes(path: Path) -> dict[str, int]:
    """Return the sizes of a checkpoint's files on this host, by relative path."""
    return {str(file.relative_to(path)): file.stat().st_size for file in files_of(path)}


def _joined(of_hosts: Sequence[Mapping[str, Mapping[str, int]]]) -> dict[str, dict[str, int]]:
    """Return the file sizes of each checkpoint, merged over all hosts."""
    joined: dict[str, dict[str, int]] = {}
    for checkpoints in of_hosts:
        for path, sizes in checkpoints.items():
            joined[path] = {**sizes, **joined.get(path, {})}
    return joined


def _read(path: Path, sizes: Mapping[str, int], job: SageMakerJob | None) -> FoundCheckpoint:
    """Read a checkpoint, given the sizes of its files on all hosts."""
    try:
        main = path
        if path.is_dir():
            main = _main_of_deepspeed(path) if _DEEPSPEED_TAG in sizes else _main_of_shards(path, sizes)
        checkpoint = inert_checkpoint(main)
        progress = _progress(checkpoint)
        if _DEEPSPEED_TAG in sizes:
            _check_deepspeed(checkpoint, sizes)
        facts = checkpoint.get(JOB_KEY)
        facts = facts if isinstance(facts, Mapping) else None
        if "lr_schedulers" not in checkpoint:
            # Lightning refuses to resume from such a checkpoint (ModelCheckpoint(save_weights_only=True)).
            fault: str | None = "contains weights only"
        elif job is None:
            fault = None
        else:
            fault = _fault_of_unknown(main) if facts is None else _fault_of_another_job(facts, job)
    except _UnusableError as error:
        return FoundCheckpoint(path, fault=str(error))
    except zipfile.BadZipFile:
        return FoundCheckpoint(path, fault="is truncated, or was not written by torch.save")
    except Exception as error:  # noqa: BLE001 - a broken file may raise anything
        return FoundCheckpoint(path, fault=f"cannot be read ({type(error).__name__}: {error})")
    # Prefer an interruption's checkpoint: a periodic one of the same step lacks the work of the step's later hooks.
    is_interruption = facts is not None and facts.get("is_interruption") is True
    return FoundCheckpoint(path, (*progress, int(is_interruption)), facts, fault)


def _main_of_shards(path: Path, sizes: Mapping[str, int]) -> Path:
    """Check that the hosts have all shards of a checkpoint, and return the file with everything but the weights."""
    for name in (_SHARDS_INDEX, _SHARDS_META):
        if name not in sizes:
            raise _UnusableError(f"is a folder without {name}: an incomplete sharded checkpoint, or another format")
        if not (path / name).is_file():
            raise _UnusableError(f"is a folder whose {name} is on another host")
    for place in inert_pickle((path / _SHARDS_INDEX).read_bytes()).storage_data.values():
        end = place.offset + place.length
        if sizes.get(place.relative_path, 0) < end:
            raise _UnusableError(f"has no shard {place.relative_path} of at least {end} bytes")
    return path / _SHARDS_META


def _main_of_deepspeed(path: Path) -> Path:
    """Return rank 0's file of a DeepSpeed checkpoint, which holds the Trainer's state."""
    if not (path / _DEEPSPEED_TAG).is_file():
        raise _UnusableError(f"is a folder whose file {_DEEPSPEED_TAG} is on another host")
    folder = path / (path / _DEEPSPEED_TAG).read_text(encoding="utf-8").strip()
    for file in folder.iterdir():
        if _DEEPSPEED_MAIN.fullmatch(file.name):
            return file
    raise _UnusableError(f"has no model states of rank 0 in its subfolder {folder.name}")


def _check_deepspeed(checkpoint: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    """Check that the hosts have the optimizer states of all ranks; without ZeRO, there are no such files."""
    num_ranks = checkpoint["dp_world_size"] if checkpoint["param_shapes"] is not None else 0
    num_found = sum(name.endswith("optim_states.pt") for name in sizes)
    if num_found < num_ranks:
        raise _UnusableError(f"has the optimizer states of only {num_found} of {num_ranks} ranks")


def _progress(checkpoint: Any) -> tuple[int, ...]:
    """Return the counts by which to order checkpoints: optimizer steps, then counts that differ within a step."""
    if not isinstance(checkpoint, Mapping) or not {"global_step", "epoch", "loops"} <= checkpoint.keys():
        raise _UnusableError("is not a checkpoint of a Lightning Trainer")
    fit_loop = checkpoint["loops"]["fit_loop"]
    names = ("epoch_progress", "epoch_loop.batch_progress", "epoch_loop.val_loop.batch_progress")
    processed = [fit_loop.get(name, {}).get("total", {}).get("processed", 0) for name in names]
    return tuple(int(count) for count in (checkpoint["global_step"], checkpoint["epoch"], *processed))


def _fault_of_unknown(file: Path) -> str | None:
    """Return the fault of a file that names no job; it must not hold objects, because their code would run."""
    try:
        torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        # Take only the class from torch's message: the rest is about options of torch.load.
        match = re.search(r"GLOBAL ([\w.]+)", str(error))
        class_name = f" ({match[1]})" if match else ""
        return (
            f"holds objects{class_name}, whose code would run, and does not state which job wrote it. To resume from "
            "it, pass it as ckpt_path with weights_only=False"
        )
    return None


def _fault_of_another_job(facts: Mapping[str, Any], job: SageMakerJob) -> str | None:
    """Return the fault of a checkpoint that another job wrote, unless both jobs use the same S3 address."""
    name = facts.get("name")
    uri = facts.get("checkpoint_s3_uri")
    # Without names, compare the addresses. Jobs without either cannot be told apart, and count as the same job.
    if name == job.name and (name is not None or uri == job.checkpoint_uri):
        return None
    if uri and job.checkpoint_uri and str(uri).rstrip("/") == job.checkpoint_uri.rstrip("/"):
        return None
    return (
        f"is left over from job {name!r} (checkpoint_s3_uri={uri!r}); this is job {job.name!r} "
        f"(checkpoint_s3_uri={job.checkpoint_uri!r})"
    )


def _best_of_each(readings: Sequence[FoundCheckpoint]) -> list[FoundCheckpoint]:
    """Return the best reading of each path: a valid one if any, then the most progress, then the first host's.

    Hosts may have different files of the same name if all of them downloaded a file, and one has since overwritten it.
    """
    best: dict[str, FoundCheckpoint] = {}
    for reading in readings:
        known = best.get(str(reading.path))
        if known is None or (known.fault is not None, *reading.progress) > (reading.fault is not None, *known.progress):
            best[str(reading.path)] = reading
    return list(best.values())


def _of_fit(readings: Sequence[FoundCheckpoint], own: Fit, job: SageMakerJob | None) -> list[FoundCheckpoint]:
    """Return the readings that belong to a fit; a checkpoint that names no fit belongs to any fit."""
    kept = []
    for reading in readings:
        of_job = [other.fit for other in readings if other.job_name == reading.job_name and other.fit is not None]
        is_own_job = job is not None and reading.job_name == job.name is not None
        try:
            if reading.fit is None or may_resume(own, reading.fit, of_job, is_own_job=is_own_job):
                kept.append(reading)
        except CheckpointError as error:
            kept.append(replace(reading, doubt=str(error)))
    return kept


def _best(readings: Sequence[FoundCheckpoint], job: SageMakerJob | None) -> FoundCheckpoint | None:
    valid = [reading for reading in readings if reading.fault is None]
    return max(valid, key=lambda reading: (reading.is_of(job), reading.progress), default=None)


def _damage(path: Path) -> str | None:
    """Return the fault of a checkpoint whose bytes have changed since it was written, or None.

    torch does not verify the checksums in its archives. This function reads the whole file, as loading does later, so
    call it only for the checkpoint to resume from. Shards of torch.distributed.checkpoint are not archives.
    """
    if not path.exists():  # on another host
        return None
    for file in sorted(path.rglob("*.pt")) if path.is_dir() else [path]:
        try:
            with zipfile.ZipFile(file) as archive:
                damaged = archive.testzip()
        except (zipfile.BadZipFile, NotImplementedError, EOFError) as error:  # truncated, or a damaged header
            return f"is damaged: {file.name} cannot be read ({type(error).__name__}: {error})"
        if damaged is not None:
            return f"is damaged: the checksum of {damaged} in {file.name} is wrong"
    return None
