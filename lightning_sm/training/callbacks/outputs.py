"""JobOutputs: direct checkpoints to the folder that SageMaker uploads, and export the best model."""

from __future__ import annotations

import logging
import os
import re
import shutil
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # fsspec has no type information
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from lightning_sm._lightning import (
    DISTRIBUTION,
    LightningModule,
    ModelCheckpoint,
    Trainer,
    rank_zero_only,
)
from lightning_sm._unlisted import UnlistedCallback
from lightning_sm.errors import CheckpointError
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.uploads import files_of
from lightning_sm.job.variables import MODEL, Model
from lightning_sm.training.callbacks.spot_checkpoint import SpotCheckpoint, TrainingInterrupted
from lightning_sm.training.checkpoints.durable_io import LARGER_VOLUME, first_line, free_space, is_disk_full
from lightning_sm.training.checkpoints.sharded import gather_weights, has_index, holders, lacks_shards, remove_folder
from lightning_sm.training.rank_barrier import wait_for_all_ranks

logger = logging.getLogger(__name__)
_log_once = rank_zero_only(logger.info)

MODEL_CHECKPOINT = "model.ckpt"
MODEL_STATE_DICT = "state_dict.pt"
MODEL_CONFIG = "config.yaml"

# A stopped job copies no more than this while its checkpoint is uploaded: at 100 MB/s, 15 s of its 120 s.
_STOP_BYTES = 1_500_000_000


class JobOutputs(UnlistedCallback):
    """A callback that sets the folders of ``ModelCheckpoint`` callbacks, and exports the best model after ``fit``.

    Rank 0 writes three files to the model directory: ``model.ckpt`` (the full checkpoint, for
    ``load_from_checkpoint`` and resuming), ``state_dict.pt`` (the plain weights, for ``load_state_dict`` without
    Lightning) and ``config.yaml`` (the resolved configuration). If the checkpoint is sharded, and so a folder, each
    host writes the files that it has, and rank 0 gathers the weights for ``state_dict.pt``. ``LIGHTNING_SM_MODEL`` can
    leave out ``model.ckpt``, or everything.

    All ranks wait for the export, because SageMaker's local mode stops all hosts as soon as the first one exits. They
    do not wait in a collective call, whose timeout would fail a job whose model takes longer to copy.

    A job that is interrupted or stopped saves its checkpoint first, and then exports its best model so far.

    Args:
        job: The job with its folders.
        config: The resolved configuration, as YAML; without one, there is no ``config.yaml``.

    Raises:
        JobConfigError: ``LIGHTNING_SM_MODEL`` has an invalid value.
    """

    def __init__(self, job: SageMakerJob, config: str | None = None) -> None:
        super().__init__()
        self._job = job
        self._model_dir = job.model_dir
        self._model = MODEL.read(os.environ)
        self.config = config

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Set the folders again, because ``configure_callbacks`` may have added callbacks."""
        self.route_checkpoints(trainer)
        if self._job.checkpoint_dir is not None:
            # The record of the run is in this folder from the start, and a restart finds its checkpoints there.
            folder = re.escape(str(self._job.checkpoint_dir))
            warnings.filterwarnings("ignore", rf"Checkpoint directory {folder}(/.*)? exists and is not empty")

    def route_checkpoints(self, trainer: Trainer) -> None:
        """Set the folder of each ``ModelCheckpoint``.

        If the callback has none, it gets the checkpoint directory, if the job has one. A folder below the working
        directory moves below the checkpoint directory, or else below the host's output directory.

        Call it as soon as the Trainer exists: ``fit(ckpt_path="last")`` looks for the file before ``setup``.
        """
        for callback in trainer.checkpoint_callbacks:
            if not isinstance(callback, ModelCheckpoint):
                continue
            if callback.dirpath:
                callback.dirpath = self._routed(str(callback.dirpath))
            elif self._job.checkpoint_dir is not None:
                callback.dirpath = str(self._job.checkpoint_dir)
            if callback.save_last == "link" and self._job.checkpoint_dir is not None:
                logger.info("ModelCheckpoint: save_last makes a copy, because SageMaker does not upload links.")
                callback.save_last = True

    def _routed(self, dirpath: str) -> str:
        """Return the new place of a folder that was relative in the script; ``ModelCheckpoint`` made it absolute."""
        here = Path.cwd()
        folder = Path(dirpath).resolve()
        base = self._job.base_dir.resolve()
        target = self._job.checkpoint_dir or self._job.host_output_dir
        is_jobs = folder.is_relative_to(target.resolve()) or (folder.is_relative_to(base) and base not in here.parents)
        # In the root directory, an absolute folder cannot be distinguished from one that was relative.
        if "://" in dirpath or is_jobs or not folder.is_relative_to(here) or here == Path(here.anchor):
            return dirpath
        moved = str(target / folder.relative_to(here))
        _log_once("ModelCheckpoint: dirpath = %s, because SageMaker does not upload %s.", moved, dirpath)
        return moved

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Export the best model."""
        if self._model is Model.NONE:
            return
        with self._full_disk_explained():
            held = self._export(trainer)
        wait_for_all_ranks("export the model")
        if held is not None and trainer.local_rank == 0:
            remove_folder(self._incoming(MODEL_CHECKPOINT))  # where only the weights were wanted

    def _export(self, trainer: Trainer) -> dict[str, int] | None:
        """Export the best model; return the rank that has each file of its checkpoint, if it is sharded."""
        self._model_dir.mkdir(parents=True, exist_ok=True)
        best, held = self._find_best(trainer)
        source = "the last step" if best is None else os.path.basename(best)
        if best is None:
            best = trainer.strategy.broadcast(str(self._incoming(MODEL_CHECKPOINT)))
            trainer.save_checkpoint(best)  # a collective call for sharded strategies
            held = self._holders(trainer, best)
        if held is not None:
            self._export_shards(Path(best), held, trainer)
        elif trainer.is_global_zero:
            self._export_file(best)
        if trainer.is_global_zero:
            self._export_config()
            name = MODEL_CHECKPOINT if self._model is Model.FULL else MODEL_STATE_DICT
            logger.info("model: %s (from %s)", self._model_dir / name, source)
        return held

    @contextmanager
    def _full_disk_explained(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:
            if isinstance(error, CheckpointError) or not is_disk_full(error):
                raise
            less = f", or set {MODEL.name}={Model.WEIGHTS.value}" if self._model is Model.FULL else ""
            raise CheckpointError(
                f"The model was not written to {self._model_dir}: {first_line(error)}. {free_space(self._model_dir)}. "
                f"To keep it, {LARGER_VOLUME}{less}. The checkpoints are intact."
            ) from error

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Export the best model so far if the job is stopped and its checkpoint is saved, without collective calls.

        If no model is the best yet, export that of the saved checkpoint.
        """
        spots = [one for one in trainer.checkpoint_callbacks if isinstance(one, SpotCheckpoint)]
        saved = next((str(spot.saved) for spot in spots if spot.saved is not None), None)
        is_stopped = isinstance(exception, TrainingInterrupted) and saved is not None
        if self._model is Model.NONE or not is_stopped or trainer.local_rank != 0:
            return
        candidates = [*(found for _, found in self._stated_best(trainer)), saved]
        best = next((path for path in candidates if path is not None and os.path.exists(path)), None)
        if best is None:  # only another host has it
            return
        try:
            self._model_dir.mkdir(parents=True, exist_ok=True)
            is_exported = self._export_at_once(Path(best), trainer)
        except Exception as error:  # noqa: BLE001 - another exception would turn the interruption into a failure
            logger.warning("The model so far was not exported (%s: %s).", type(error).__name__, error)
            return
        if is_exported and trainer.is_global_zero:
            self._export_config()
            logger.info("The model so far is in %s (from %s).", self._model_dir, os.path.basename(best))

    def _export_at_once(self, best: Path, trainer: Trainer) -> bool:
        """Export what takes little time, and return whether anything was exported."""
        incoming = self._incoming(MODEL_CHECKPOINT)
        if best.is_dir():
            # Only rank 0 writes the index: another host that has one has downloaded all files, as has the host of rank
            # 0, which exports them.
            if has_index(best) and not trainer.is_global_zero:
                return False
            files = files_of(best)
            is_little = sum(file.stat().st_size for file in files) <= _STOP_BYTES
            # Even if only the weights are wanted: gathering them would take a collective call.
            is_placed = self._place_shards(best, [str(file.relative_to(best)) for file in files], may_copy=is_little)
            if is_placed and trainer.is_global_zero:
                self._say_how_to_consolidate(is_deepspeed=(best / "latest").exists())
            return is_placed
        if not trainer.is_global_zero:  # another host has it only if it was downloaded when the job started
            return False
        is_little = best.stat().st_size <= _STOP_BYTES
        is_placed = self._model is Model.FULL and self._place(best, incoming, may_copy=is_little)
        if is_placed:
            self._complete(MODEL_CHECKPOINT)
        weights = _read_weights(best)
        is_small = sum(value.nbytes for value in weights.values() if isinstance(value, torch.Tensor)) <= _STOP_BYTES
        if is_small:
            self._export_weights(weights)
        return is_placed or is_small

    def _find_best(self, trainer: Trainer) -> tuple[str | None, dict[str, int] | None]:
        """Return the best checkpoint and, if it is a folder, which rank has which file; the same on all ranks."""
        best = trainer.strategy.broadcast(self._best_checkpoint(trainer) if trainer.is_global_zero else None)
        held = None if best is None else self._holders(trainer, best)
        if best is not None and held is not None:
            missing = lacks_shards(trainer.strategy, Path(best), held)
            if missing:
                if trainer.is_global_zero:
                    logger.warning(
                        "No host has %s of the best checkpoint %s: exporting the last step.", missing[0], best
                    )
                return None, None
        return best, held

    @staticmethod
    def _holders(trainer: Trainer, checkpoint: str) -> dict[str, int] | None:
        is_folder = trainer.strategy.broadcast(trainer.is_global_zero and os.path.isdir(checkpoint))
        return holders(Path(checkpoint)) if is_folder else None

    def _best_checkpoint(self, trainer: Trainer) -> str | None:
        """Find the best checkpoint that this host can read; callbacks that monitor a metric come first."""
        for stated, found in self._stated_best(trainer):
            if found is not None:
                return found
            logger.warning("The best checkpoint %s does not exist: exporting another one.", stated)
        return None

    @staticmethod
    def _stated_best(trainer: Trainer) -> Iterator[tuple[str, str | None]]:
        """Yield the best checkpoint of each callback, and its path on this host; None if it is not there."""
        callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
        for callback in sorted(callbacks, key=lambda callback: callback.monitor is None):
            stated = callback.best_model_path
            if stated:
                # After a restart on another host, the file may be in another folder, under the same name.
                moved = os.path.join(callback.dirpath or "", os.path.basename(stated))
                yield stated, next((path for path in (stated, moved) if _exists(path)), None)

    def _export_file(self, checkpoint: str) -> None:
        incoming = self._incoming(MODEL_CHECKPOINT)
        filesystem, address = url_to_fs(checkpoint)
        file = Path(address)
        if not isinstance(filesystem, LocalFileSystem):
            file = incoming
            filesystem.get(address, str(incoming))
        weights = _read_weights(file)
        if self._model is Model.FULL:
            if file != incoming:
                self._place(file, incoming)
            self._complete(MODEL_CHECKPOINT)
        self._export_weights(weights)
        incoming.unlink(missing_ok=True)  # where model.ckpt is left out

    def _export_shards(self, folder: Path, held: dict[str, int], trainer: Trainer) -> None:
        """Export each file from one host that has it: SageMaker merges the model directories of all hosts."""
        weights = gather_weights(trainer.strategy, folder, held)
        own = [name for name, rank in held.items() if rank == trainer.global_rank]
        if own and (self._model is Model.FULL or weights is None):
            self._place_shards(folder, own)
        if not trainer.is_global_zero:
            return
        if weights is not None:
            self._export_weights(weights)
        else:
            self._say_how_to_consolidate(is_deepspeed="latest" in held)

    def _say_how_to_consolidate(self, *, is_deepspeed: bool) -> None:
        logger.info(
            "%s is a sharded checkpoint, so %s is not written. To make it from the files of all hosts, run `%s`.",
            self._model_dir / MODEL_CHECKPOINT,
            MODEL_STATE_DICT,
            f"python {MODEL_CHECKPOINT}/zero_to_fp32.py {MODEL_CHECKPOINT} weights"
            if is_deepspeed
            else f"python -m {DISTRIBUTION}.utilities.consolidate_checkpoint {MODEL_CHECKPOINT}",
        )

    def _place_shards(self, folder: Path, names: Sequence[str], *, may_copy: bool = True) -> bool:
        incoming = self._incoming(MODEL_CHECKPOINT)
        if folder != incoming:
            remove_folder(incoming)
            for name in names:
                (incoming / name).parent.mkdir(parents=True, exist_ok=True)
                if not self._place(folder / name, incoming / name, may_copy=may_copy):
                    remove_folder(incoming)
                    return False
        self._complete(MODEL_CHECKPOINT)
        return True

    def _place(self, source: Path, target: Path, *, may_copy: bool = True) -> bool:
        """Link a file, or copy it where a link is impossible and copies are allowed; return whether it is in place."""
        target.unlink(missing_ok=True)
        real = Path(os.path.realpath(source))
        folder = self._job.checkpoint_dir
        # Link only from the checkpoint folder: its files are replaced by new ones, and never written to again.
        if folder is not None and real.is_relative_to(os.path.realpath(folder)):
            with suppress(OSError):  # another file system, another mount of this one, or one without links
                os.link(real, target)
                return True
        if may_copy:
            shutil.copyfile(real, target)
        return may_copy

    def _complete(self, name: str) -> None:
        """Rename an incoming file or folder to its final name, in place of what an earlier fit exported."""
        incoming, target = self._incoming(name), self._model_dir / name
        # rename(2) cannot replace a folder by a file, and does nothing if both names are links to the same file.
        remove_folder(target) if target.is_dir() else target.unlink(missing_ok=True)
        os.replace(incoming, target)

    def _export_weights(self, state_dict: dict[str, Any]) -> None:
        torch.save(state_dict, self._incoming(MODEL_STATE_DICT))
        self._complete(MODEL_STATE_DICT)

    def _export_config(self) -> None:
        if self.config is not None:
            self._incoming(MODEL_CONFIG).write_text(self.config, encoding="utf-8")
            self._complete(MODEL_CONFIG)

    def _incoming(self, name: str) -> Path:
        """Return where a file is written before it gets its final name, so that a kill leaves no truncated model."""
        return self._model_dir / f".{name}.incoming"


def _exists(path: str) -> bool:
    filesystem, address = url_to_fs(path)
    return bool(filesystem.exists(address))


def _read_weights(file: Path) -> dict[str, Any]:
    """Return the weights of a checkpoint without reading the rest, such as the states of optimizers."""
    # weights_only=False: this job wrote the file, and hyperparameters in it may be of any type. Only a zip archive,
    # which torch.save writes since 1.6, can be mapped.
    checkpoint = torch.load(file, map_location="cpu", weights_only=False, mmap=zipfile.is_zipfile(file))
    state_dict: dict[str, Any] = checkpoint["state_dict"]
    return state_dict
