"""JobOutputs: save checkpoints in the folder that SageMaker uploads, and export the best model."""

from __future__ import annotations

import logging
import os
import re
import shutil
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # fsspec has no type information
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from lightning_sm._lightning import (
    Callback,
    LightningModule,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Trainer,
    rank_zero_only,
)
from lightning_sm._unlisted import UnlistedCallback
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.uploads import files_of
from lightning_sm.job.variables import MODEL, Model
from lightning_sm.training.callbacks.spot_checkpoint import SpotCheckpoint, TrainingInterrupted
from lightning_sm.training.checkpoints.durable_io import disk_errors_explained
from lightning_sm.training.checkpoints.sharded import has_index, remove_folder
from lightning_sm.training.rank_barrier import wait_for_all_ranks

logger = logging.getLogger(__name__)
_log_once = rank_zero_only(logger.info)

MODEL_CHECKPOINT = "model.ckpt"
MODEL_STATE_DICT = "state_dict.pt"
MODEL_CONFIG = "config.yaml"

# Size of the largest checkpoint that a stopped job exports while its checkpoints are uploaded. At 100 MB/s, the export
# takes 15 s of the 120 s that the job has left.
_STOP_BYTES = 1_500_000_000


class JobOutputs(UnlistedCallback):
    """A callback that sets the folders of ``ModelCheckpoint`` callbacks, and exports the best model after ``fit``.

    Rank 0 writes three files to the model directory: ``model.ckpt`` (the full checkpoint, for ``load_from_checkpoint``
    and resuming), ``state_dict.pt`` (the plain weights, for ``load_state_dict`` without Lightning) and ``config.yaml``
    (the resolved configuration). If the checkpoint is sharded, ``model.ckpt`` is a folder, to which each host writes
    the files that it has. There is then no ``state_dict.pt``, but the log shows the command that makes one. Set
    ``LIGHTNING_SM_MODEL`` to leave out ``model.ckpt`` (unless it is a folder) or everything.

    All ranks wait for the export, because SageMaker's local mode stops all hosts as soon as the first one exits. They
    do not wait in a collective call: if copying the model took longer than the call's timeout, the job would fail.

    A job that is interrupted or stopped saves its checkpoint first, and then exports its best model so far.

    Args:
        job: The job that provides the folders.
        config: The resolved configuration as YAML. If None, ``config.yaml`` is not written.

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
        self.route_folders(trainer)
        if self._job.checkpoint_dir is not None:
            # Ignore the warning, because the folder always holds the run's record and, after a restart, the run's
            # checkpoints.
            folder = re.escape(str(self._job.checkpoint_dir))
            warnings.filterwarnings("ignore", rf"Checkpoint directory {folder}(/.*)? exists and is not empty")

    def route_folders(self, trainer: Trainer) -> None:
        """Set the folders of checkpoint callbacks and of the profiler.

        A ``ModelCheckpoint`` without a folder gets the checkpoint directory, if the job has one. A folder below the
        working directory moves below the checkpoint directory, or else below the host's output directory. A profiler's
        folder moves below the host's output directory.

        Call this as soon as the Trainer exists: ``fit(ckpt_path="last")`` looks for the file before ``setup``.
        """
        output_dir = self._job.host_output_dir
        self._route(trainer.profiler, output_dir)  # type: ignore[attr-defined]
        for callback in trainer.checkpoint_callbacks:
            self._route(callback, self._job.checkpoint_dir or output_dir)  # also of other classes
            if not isinstance(callback, ModelCheckpoint) or self._job.checkpoint_dir is None:
                continue
            if not callback.dirpath:
                callback.dirpath = str(self._job.checkpoint_dir)
            if callback.save_last == "link":
                logger.info("ModelCheckpoint: save_last makes a copy, because SageMaker does not upload links.")
                callback.save_last = True

    def _route(self, owner: Any, target: Path) -> None:
        """Move ``owner.dirpath`` if the script had a relative folder, which ``ModelCheckpoint`` has made absolute."""
        dirpath, here = getattr(owner, "dirpath", None), Path.cwd()
        if not dirpath:
            return
        folder = Path(dirpath).resolve()
        base = self._job.base_dir.resolve()
        is_jobs = folder.is_relative_to(target.resolve()) or (folder.is_relative_to(base) and base not in here.parents)
        # Keep all folders if the working directory is the root, because every absolute folder is below it.
        if "://" in str(dirpath) or is_jobs or not folder.is_relative_to(here) or here == Path(here.anchor):
            return
        owner.dirpath = str(target / folder.relative_to(here))
        _log_once(
            "%s: dirpath = %s, because SageMaker does not upload %s.", type(owner).__name__, owner.dirpath, dirpath
        )

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Export the best model."""
        if self._model is Model.NONE:
            return
        less = f" If the disk is full, try {MODEL.name}={Model.WEIGHTS.value}." if self._model is Model.FULL else ""
        with disk_errors_explained("model", self._model_dir, f"The checkpoints are intact.{less}"):
            self._model_dir.mkdir(parents=True, exist_ok=True)
            best = next(self._best_checkpoints(trainer), None) if trainer.is_global_zero else None
            best = trainer.strategy.broadcast(best)
            if best is None:
                best = trainer.strategy.broadcast(str(self._incoming(MODEL_CHECKPOINT)))
                trainer.save_checkpoint(best)  # a collective call for sharded strategies
            self._export(trainer, best)
        wait_for_all_ranks()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """If the job is stopped and its checkpoint is saved, export the best model so far, without collective calls.

        If there is no best model so far, export the model of the saved checkpoint.
        """
        spots = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, SpotCheckpoint)]
        saved = next((str(spot.saved) for spot in spots if spot.saved is not None), None)
        if self._model is Model.NONE or not isinstance(exception, TrainingInterrupted) or saved is None:
            return
        best = next((path for path in (*self._best_checkpoints(trainer), saved) if os.path.exists(path)), None)
        if best is None or sum(file.stat().st_size for file in files_of(Path(best))) > _STOP_BYTES:
            return
        try:
            self._model_dir.mkdir(parents=True, exist_ok=True)
            self._export(trainer, best)
        except Exception as error:  # noqa: BLE001 - another exception would turn the interruption into a failure
            logger.warning("The model trained so far was not exported (%s: %s).", type(error).__name__, error)

    @staticmethod
    def _best_checkpoints(trainer: Trainer) -> Iterator[str]:
        """Yield each callback's best checkpoint if this host can read it; those that monitor a metric come first.

        With ``StochasticWeightAveraging``, skip the others: it sets the averages after their last checkpoint.
        """
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        is_averaged = any(isinstance(callback, StochasticWeightAveraging) for callback in callbacks)
        found = [callback for callback in callbacks if isinstance(callback, ModelCheckpoint)]
        for callback in sorted(found, key=lambda callback: callback.monitor is None):
            if is_averaged and callback.monitor is None:
                return
            best = callback.best_model_path
            # After a restart on another host, the file may be in another folder, under the same name.
            moved = os.path.join(callback.dirpath or "", os.path.basename(best))
            existing = [path for path in (best, moved) if best and _exists(path)]
            yield from existing[:1]
            if best and not existing and trainer.is_global_zero:
                logger.warning("The best checkpoint %s does not exist: exporting another one.", best)

    def _export(self, trainer: Trainer, checkpoint: str) -> None:
        """Export a checkpoint: rank 0 exports a single file, or each host exports the shards of its own ranks."""
        folder = Path(checkpoint)
        # Rank 0 writes the index. If another host has the index, too, both hosts have downloaded all files, and rank 0
        # exports them.
        has_own_shards = trainer.local_rank == 0 and folder.is_dir() and not has_index(folder)
        if not (trainer.is_global_zero or has_own_shards):
            return
        if folder.is_dir():
            self._export_shards(folder)
        else:
            self._export_file(checkpoint)
        if trainer.is_global_zero:
            if self.config is not None:
                self._incoming(MODEL_CONFIG).write_text(self.config, encoding="utf-8")
                self._complete(MODEL_CONFIG)
            name = MODEL_CHECKPOINT if folder.is_dir() or self._model is Model.FULL else MODEL_STATE_DICT
            source = "the last step" if folder == self._incoming(MODEL_CHECKPOINT) else folder.name
            logger.info("model: %s (from %s)", self._model_dir / name, source)

    def _export_file(self, checkpoint: str) -> None:
        incoming = self._incoming(MODEL_CHECKPOINT)
        filesystem, address = url_to_fs(checkpoint)
        file = Path(address)
        if not isinstance(filesystem, LocalFileSystem):
            file = incoming
            filesystem.get(address, str(incoming))
        # mmap avoids reading the rest, such as optimizer states, but needs the zip archive that torch.save writes.
        # weights_only=False is safe because this job wrote the file; hyperparameters in it may be of any type.
        weights = torch.load(file, map_location="cpu", weights_only=False, mmap=zipfile.is_zipfile(file))["state_dict"]
        torch.save(weights, self._incoming(MODEL_STATE_DICT))
        self._complete(MODEL_STATE_DICT)
        if self._model is Model.FULL:
            if file != incoming:
                self._place(file, incoming)
            self._complete(MODEL_CHECKPOINT)
        incoming.unlink(missing_ok=True)  # if model.ckpt is left out

    def _export_shards(self, folder: Path) -> None:
        """Export this host's files; SageMaker merges the model directories of all hosts."""
        incoming = self._incoming(MODEL_CHECKPOINT)
        if folder != incoming:
            remove_folder(incoming)
            for file in files_of(folder):
                self._place(file, incoming / file.relative_to(folder))
        self._complete(MODEL_CHECKPOINT)
        logger.info(
            "%s is a sharded checkpoint, so %s is not written. To merge the files of all hosts into one, run `%s`.",
            self._model_dir / MODEL_CHECKPOINT,
            MODEL_STATE_DICT,
            f"python {MODEL_CHECKPOINT}/zero_to_fp32.py {MODEL_CHECKPOINT} weights"
            if (self._model_dir / MODEL_CHECKPOINT / "latest").exists()
            else f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {MODEL_CHECKPOINT} model.pt",
        )

    def _place(self, source: Path, target: Path) -> None:
        """Link a file, or copy it if a link is impossible."""
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        real = Path(os.path.realpath(source))
        folder = self._job.checkpoint_dir
        # Link only files in the checkpoint folder: they are replaced, never modified, so the link stays intact.
        if folder is not None and real.is_relative_to(os.path.realpath(folder)):
            with suppress(OSError):  # another file system, another mount of this one, or one without links
                os.link(real, target)
                return
        shutil.copyfile(real, target)

    def _complete(self, name: str) -> None:
        """Rename an incoming file or folder to its final name, replacing the export of an earlier fit."""
        incoming, target = self._incoming(name), self._model_dir / name
        # rename(2) cannot replace a folder with a file, and does nothing if both names are links to the same file.
        remove_folder(target) if target.is_dir() else target.unlink(missing_ok=True)
        os.replace(incoming, target)

    def _incoming(self, name: str) -> Path:
        """Return the temporary path for a file, so that a kill during the export does not leave a truncated model."""
        return self._model_dir / f".{name}.incoming"


def _exists(path: str) -> bool:
    filesystem, address = url_to_fs(path)
    return bool(filesystem.exists(address))
