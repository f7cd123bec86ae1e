"""The latest valid checkpoint, from which a restarted job resumes, found by the contents of the files.

Every host starts with all files of the job's checkpoint folder in S3. Their times are those of the download, the user
chose their names, and the latest may be truncated, because its host was taken away during the upload.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.uploads import files_of, is_ignored
from lightning_sm.training.checkpoints.fits import Fit, StatedFit, are_of_fit, is_unknown_here
from lightning_sm.training.checkpoints.pickle_peek import inert_checkpoint, inert_pickle

logger = logging.getLogger(__name__)

JOB_KEY = "lightning_sm.job"

Gather = Callable[[Any], list[Any]]

_SUFFIX = ".ckpt"
# Start of a zip archive with entries; torch.save writes this format since 1.6.
_ZIP_MAGIC = b"PK\x03\x04"
# Files that torch.distributed.checkpoint and Lightning write into a sharded checkpoint's folder, besides the shards.
_SHARDS_INDEX, _SHARDS_META = ".metadata", "meta.pt"
# Written last into the folder of a DeepSpeed checkpoint: the name of the subfolder with the files of the ranks.
_DEEPSPEED_TAG = "latest"
_DEEPSPEED_FILE = re.compile(r"(?:bf16_)?(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_\d+_(?P<kind>model|optim)_states\.pt")


def job_facts(job: SageMakerJob, fit: Fit, *, is_ending: bool = False, is_interruption: bool = False) -> dict[str, Any]:
    """Return the value of ``JOB_KEY`` in a checkpoint: facts that identify the job that wrote it.

    Args:
        job: The job.
        fit: Which of the script's fits it is.
        is_ending: Whether a callback such as ``EarlyStopping`` has ended the fit.
        is_interruption: Whether it is saved because of an interruption, after all hooks of its step.
    """
    facts = {"name": job.name, "checkpoint_s3_uri": job.checkpoint_uri, "fit": fit.saved()}
    marks = {"is_ending": is_ending, "is_interruption": is_interruption}
    return {**facts, **{name: True for name, is_set in marks.items() if is_set}}


def newest_checkpoint(
    folder: str | os.PathLike[str] | None,
    job: SageMakerJob | None = None,
    *,
    fit: Fit | None = None,
    is_own: bool = False,
    gather: Gather = lambda own: [own],
) -> FoundCheckpoint | None:
    """Find the valid checkpoint with the most progress.

    Candidates are files, and folders of torch.distributed.checkpoint and DeepSpeed, that are named ``*.ckpt`` at any
    depth and are neither hidden nor unfinished. Hosts with the same files find the same checkpoint. A warning names
    each invalid candidate that may have more progress.

    A file is read with ``weights_only=True``, which runs no code. If it holds objects of other types, such as those in
    hyperparameters, and states that it is of this job or of one with its S3 address, it is read with
    ``weights_only=False``; otherwise it is invalid. The statement is read without running code.

    Args:
        folder: The checkpoint folder; it need not exist. None: there is none.
        job: The current job. Checkpoints of another job with another S3 address, which a warm pool may leave behind,
            are invalid. None accepts checkpoints of any job.
        fit: Which of the script's fits is to resume; checkpoints of other fits do not count. None accepts all.
        is_own: Whether to accept only checkpoints of ``job`` itself, from an earlier attempt.
        gather: Returns a value of this host and of all others that call this function at the same time, in the order
            of hosts: the hosts then judge all their files together. By default, this host has all files.

    Returns:
        The checkpoint; None if there is no valid one.

    Raises:
        CheckpointError: It is unclear which fit a checkpoint is of.
    """
    paths = [] if folder is None else sorted(_candidates(Path(folder)))
    sizes = _joined(gather({str(path): _sizes(path) for path in paths if path.is_dir()}))
    own = [_read(path, partial(_contents, path, job, sizes.get(str(path), {}))) for path in paths]
    readings = _best_of_each([replace(one, host=host) for host, found in enumerate(gather(own)) for one in found])
    if is_own:
        readings = [one for one in readings if one.job is not None and job is not None and one.job["name"] == job.name]
    readings = [_checked(reading, job) for reading in readings]
    if fit is not None:
        readings = _of_fit(readings, fit, job)
    best = _best(readings)
    # Every host compares its own copy: one that is damaged would count as equal to the others.
    while best is not None and (damage := next(filter(None, gather(_damage(best.path))), None)) is not None:
        readings = [replace(one, fault=damage) if one is best else one for one in readings]
        best = _best(readings)
    for reading in readings:
        if reading.fault is None:
            continue
        if best is None:
            logger.warning("%s %s.", reading.path, reading.fault)
        elif not reading.progress or reading.progress > best.progress:
            step = best.progress[0]
            logger.warning("%s %s. Using %s of step %d instead.", reading.path, reading.fault, best.path, step)
    if readings and best is None:
        logger.warning("No checkpoint in %s is valid: training starts from the beginning.", folder)
    return best


def _best(readings: Sequence[FoundCheckpoint]) -> FoundCheckpoint | None:
    valid = [reading for reading in readings if reading.fault is None]
    return max(valid, key=lambda one: one.progress, default=None)


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint, and what reading it has shown.

    Attributes:
        path: The file, or the folder of a sharded checkpoint.
        has_objects: Whether it can be read only with ``weights_only=False``.
        progress: Counts of optimizer steps, epochs, and more (see ``_progress``); empty if unknown.
        job: Its ``job_facts``, which identify the job that wrote it; None if it has none.
        fault: Why training cannot resume from it; None if it is valid.
        host: Number of the host that has read it, in the order of hosts.
    """

    path: Path
    has_objects: bool = False
    progress: tuple[int, ...] = ()
    job: Mapping[str, Any] | None = None
    fault: str | None = None
    host: int = 0


class _UnusableError(Exception):
    """The reason why a checkpoint is invalid: the predicate of a sentence whose subject is the checkpoint."""


class _UntrustedError(_UnusableError):
    """The reason why code of the checkpoint must not run: nothing states that it is of this job."""


def _candidates(folder: Path) -> Iterator[Path]:
    """Yield all ``*.ckpt`` except links: the walk finds the target of a link itself, if it is inside the folder."""
    for parent, folders, files in os.walk(folder):
        checkpoints = [name for name in (*folders, *files) if name.endswith(_SUFFIX) and not name.startswith(".")]
        # In place: os.walk descends into the folders that remain in this list, but not into links.
        folders[:] = [
            name for name in folders if not name.startswith(".") and name not in checkpoints and not is_ignored(name)
        ]
        yield from (path for name in checkpoints if not (path := Path(parent, name)).is_symlink())


def _read(path: Path, contents: Callable[[], tuple[Any, bool]]) -> FoundCheckpoint:
    """Describe a checkpoint.

    Args:
        path: Its path.
        contents: Returns its contents, and whether they hold objects.
    """
    try:
        checkpoint, has_objects = contents()
        progress = _progress(checkpoint)
    except _UnusableError as error:
        return FoundCheckpoint(path, fault=str(error))
    except Exception as error:  # noqa: BLE001 - a broken file may raise anything, even in the user's classes
        return FoundCheckpoint(path, fault=f"cannot be read ({_brief(error)})")
    # Lightning refuses to resume from such a checkpoint (ModelCheckpoint(save_weights_only=True)).
    fault = None if "lr_schedulers" in checkpoint else "contains weights only"
    facts = checkpoint.get(JOB_KEY)
    facts = facts if isinstance(facts, Mapping) else None
    # A periodic checkpoint of the same step lacks what later hooks of that step did.
    is_interruption = facts is not None and facts.get("is_interruption") is True
    return FoundCheckpoint(path, has_objects, (*progress, int(is_interruption)), facts, fault)


def _sizes(folder: Path) -> dict[str, int]:
    """Return the sizes of a sharded checkpoint's files on this host."""
    return {str(file.relative_to(folder)): file.stat().st_size for file in files_of(folder)}


def _joined(of_hosts: Sequence[Mapping[str, Mapping[str, int]]]) -> dict[str, dict[str, int]]:
    """Return the files of all hosts, by checkpoint."""
    joined: dict[str, dict[str, int]] = {}
    for checkpoints in of_hosts:
        for path, sizes in checkpoints.items():
            joined[path] = {**sizes, **joined.get(path, {})}
    return joined


def _best_of_each(readings: Sequence[FoundCheckpoint]) -> list[FoundCheckpoint]:
    """Return one reading of each path: a valid one, of those the one with the most progress, and the first of equals.

    Hosts have different files of one name where only one host has overwritten what all had downloaded.
    """
    best: dict[str, FoundCheckpoint] = {}
    for one in readings:
        known = best.get(str(one.path))
        if known is None or (known.fault is not None, *one.progress) > (one.fault is not None, *known.progress):
            best[str(one.path)] = one
    return list(best.values())


def _contents(path: Path, job: SageMakerJob | None, sizes: Mapping[str, int]) -> tuple[Any, bool]:
    """Return the contents of a checkpoint, and whether it holds objects."""
    if not path.is_dir():
        return _load(path, job)
    return (_load_deepspeed if _DEEPSPEED_TAG in sizes else _load_shards)(path, job, sizes)


def _load(path: Path, job: SageMakerJob | None) -> tuple[Any, bool]:
    size = path.stat().st_size
    if not size:
        raise _UnusableError("is empty")
    with path.open("rb") as file:
        is_zip = file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC
    if is_zip:
        _check_archive(path, size)
    # Mapped tensors cost nothing; with the device "meta", classes that read tensors when they are unpickled would fail.
    load = partial(torch.load, path, map_location="cpu", mmap=is_zip)
    try:
        return load(weights_only=True), False
    except pickle.UnpicklingError as error:
        _check_trust(path, job, error)
    return load(weights_only=False), True


def _check_trust(path: Path, job: SageMakerJob | None, error: Exception) -> None:
    """Refuse a file with objects unless it states that it is of this job, or of an earlier one with its S3 address.

    Anyone who can write to the folder can forge the statement: the check protects from files left there by accident.
    """
    if job is None:
        return
    facts = None
    with contextlib.suppress(Exception):  # not written by a job of ours
        facts = inert_checkpoint(path).get(JOB_KEY)
    if not isinstance(facts, Mapping):
        # The rest of torch's message is about its own options.
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        named = f" ({found[1]})" if found else ""
        raise _UntrustedError(
            f"holds objects{named}, whose code would run, and does not state which job wrote it. To resume from it, "
            "name it as ckpt_path with weights_only=False"
        ) from error
    fault = _of_another_job(facts, job)
    if fault is not None:
        raise _UntrustedError(fault) from error


def _check_archive(path: Path, size: int) -> None:
    # The list of entries is at the end of the file, so a truncated file lacks it.
    try:
        zipfile.ZipFile(path).close()
    except zipfile.BadZipFile as error:
        raise _UnusableError(f"is truncated at {size} bytes ({_brief(error)})") from error


def _damage(path: Path) -> str | None:
    """Return the fault of a checkpoint whose bytes differ from what was written; None if there is no such fault.

    torch does not compare the checksums of its archives. This reads the whole file, as loading does afterwards: only
    the checkpoint that would be chosen is checked. Shards of torch.distributed.checkpoint are not archives.
    """
    if not path.exists():  # on another host
        return None
    for file in sorted(path.rglob("*.pt")) if path.is_dir() else [path]:
        if not zipfile.is_zipfile(file):
            continue
        try:
            with zipfile.ZipFile(file) as archive:
                damaged = archive.testzip()
        except (NotImplementedError, EOFError) as error:  # the header of an entry is damaged
            return f"is damaged: {file.name} cannot be read ({_brief(error)})"
        if damaged is not None:
            return f"is damaged: the checksum of {damaged} in {file.name} is wrong"
    return None


def _load_shards(path: Path, job: SageMakerJob | None, sizes: Mapping[str, int]) -> tuple[Any, bool]:
    """Check that the hosts have all shards of a checkpoint, and return its contents without the weights."""
    index = path / _SHARDS_INDEX
    for name in (_SHARDS_INDEX, _SHARDS_META):
        if name not in sizes:
            raise _UnusableError(f"is a folder without {name}: an incomplete sharded checkpoint, or another format")
        if not (path / name).is_file():
            raise _UnusableError(f"is a folder whose {name} another host has")
    ends: dict[str, int] = {}
    for info in inert_pickle(index.read_bytes()).storage_data.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in sorted(ends.items()):
        if name not in sizes:
            raise _UnusableError(f"has no shard {name}")
        if sizes[name] < end:
            raise _UnusableError(f"is truncated: its shard {name} has {sizes[name]} bytes of {end}")
    try:
        return _load(path / _SHARDS_META, job)
    except _UntrustedError:
        raise
    except _UnusableError as error:
        raise _UnusableError(f"has a {_SHARDS_META} that {error}") from error


def _load_deepspeed(path: Path, job: SageMakerJob | None, sizes: Mapping[str, int]) -> tuple[Any, bool]:
    """Check that the hosts have the files of all ranks of a DeepSpeed checkpoint, and return rank 0's contents."""
    if not (path / _DEEPSPEED_TAG).is_file():
        raise _UnusableError(f"is a folder whose file {_DEEPSPEED_TAG} another host has")
    folder = path / (path / _DEEPSPEED_TAG).read_text(encoding="utf-8").strip()
    # With ZeRO 3, each rank has model states of its own; without it, there is one file, listed under rank None.
    files: dict[str, dict[str | None, Path]] = {"model": {}, "optim": {}}
    for name in sorted(sizes):
        file = path / name
        match = _DEEPSPEED_FILE.fullmatch(file.name)
        if match is not None and file.parent == folder:
            files[match["kind"]][match["rank"]] = file
            if file.is_file():
                _check_part(file)
    main = files["model"].get(None) or files["model"].get("0")
    if main is None:
        raise _UnusableError(f"has no model states of rank 0 in its subfolder {folder.name}")
    checkpoint, has_objects = _load(main, job)
    # MiCS saves the shards of one group of ranks only.
    num_shards = checkpoint["ds_config"].get("zero_optimization", {}).get("mics_shard_size", -1)
    ranks = [str(rank) for rank in range(num_shards if num_shards > 0 else checkpoint["dp_world_size"])]
    expected = {"model": [] if None in files["model"] else ranks}
    # Without ZeRO, the optimizer's state is in the main file, and there are no shapes.
    expected["optim"] = [] if checkpoint["param_shapes"] is None else ranks
    for kind, wanted in expected.items():
        missing = [rank for rank in wanted if rank not in files[kind]]
        if missing:
            raise _UnusableError(f"has no {kind} states of rank {missing[0]} (of {len(wanted)} data-parallel ranks)")
    return checkpoint, has_objects


def _check_part(file: Path) -> None:
    try:
        _check_archive(file, file.stat().st_size)
    except _UnusableError as error:
        raise _UnusableError(f"has a {file.name} that {error}") from error


def _progress(checkpoint: Any) -> tuple[int, ...]:
    """Return counts to compare checkpoints by, optimizer steps first; the others order checkpoints of one step."""
    if not isinstance(checkpoint, Mapping) or not {"global_step", "epoch", "loops"} <= checkpoint.keys():
        raise _UnusableError("is not a checkpoint of a Lightning Trainer")
    fit_loop = checkpoint["loops"]["fit_loop"]
    names = ("epoch_progress", "epoch_loop.batch_progress", "epoch_loop.val_loop.batch_progress")
    processed = [fit_loop.get(name, {}).get("total", {}).get("processed", 0) for name in names]
    return tuple(int(count) for count in (checkpoint["global_step"], checkpoint["epoch"], *processed))


def _of_another_job(facts: Mapping[str, Any], job: SageMakerJob) -> str | None:
    """Return the fault of a checkpoint that another job wrote, unless this job continues that one at its S3 address."""
    name = facts.get("name")
    uri = facts.get("checkpoint_s3_uri")
    # Without a name, only the address tells jobs apart. Jobs that have neither cannot be told apart.
    if name == job.name and (name is not None or uri == job.checkpoint_uri):
        return None
    if uri and job.checkpoint_uri and str(uri).rstrip("/") == job.checkpoint_uri.rstrip("/"):
        return None
    return (
        f"is left over from job {name!r} (checkpoint_s3_uri={uri!r}); this is job {job.name!r} "
        f"(checkpoint_s3_uri={job.checkpoint_uri!r})"
    )


def _checked(reading: FoundCheckpoint, job: SageMakerJob | None) -> FoundCheckpoint:
    """Return the reading with a fault if the checkpoint belongs to another job."""
    if reading.fault is not None or reading.job is None or job is None:
        return reading
    fault = _of_another_job(reading.job, job)
    return reading if fault is None else replace(reading, fault=fault, progress=())


def _of_fit(readings: Sequence[FoundCheckpoint], fit: Fit, job: SageMakerJob | None) -> list[FoundCheckpoint]:
    """Return the readings without those of the script's other fits."""
    stated = []
    for reading in readings:
        facts = reading.job or {}
        stated.append(StatedFit(reading.path, facts.get("name"), Fit.of(facts.get("fit"))))
    of_fit = are_of_fit(stated, fit, None if job is None else job.name)
    unknown = [one for one, is_own in zip(stated, of_fit, strict=True) if not is_own and is_unknown_here(one.fit)]
    if unknown and not any(one.fit is not None and is_own for one, is_own in zip(stated, of_fit, strict=True)):
        logger.warning(
            "%s starts from the beginning: it has no checkpoint. %s is from %s, which this attempt of the script has "
            "not made.",
            fit,
            unknown[-1].path,
            unknown[-1].fit,
        )
    return [reading for reading, is_own in zip(readings, of_fit, strict=True) if is_own]


def _brief(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
