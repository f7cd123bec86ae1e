"""JobOutputs: direct checkpoints to the folder that SageMaker uploads, and export the best model."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # fsspec has no type information

from lightning_sm._lightning import (
    DISTRIBUTION,
    Callback,
    LightningModule,
    ModelCheckpoint,
    Trainer,
    rank_zero_only,
)
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.training.checkpoints.sharded import gather_weights, holders, lacks_shards, remove_folder

logger = logging.getLogger(__name__)
_log_once = rank_zero_only(logger.info)

MODEL_CHECKPOINT = "model.ckpt"
MODEL_STATE_DICT = "state_dict.pt"
MODEL_CONFIG = "config.yaml"


class JobOutputs(Callback):
    """Set the folders of ``ModelCheckpoint`` callbacks, and export the best model at the end of ``fit``.

    Rank 0 writes three files to the model directory: ``model.ckpt`` (the full checkpoint, for
    ``load_from_checkpoint`` and resuming), ``state_dict.pt`` (the plain weights, for ``load_state_dict`` without
    Lightning) and ``config.yaml`` (the resolved configuration). Of a sharded checkpoint, which is a folder, each host
    writes the files that it has, and rank 0 gathers the weights for ``state_dict.pt``. All ranks wait for the export,
    because SageMaker's local mode stops all hosts as soon as the first one exits.

    Args:
        job: The job with its folders.
        config: The resolved configuration, as YAML; without one, there is no ``config.yaml``.
    """

    def __init__(self, job: SageMakerJob, config: str | None = None) -> None:
        super().__init__()
        self._job = job
        self._model_dir = job.model_dir
        self.config = config

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Set the folders again, because ``configure_callbacks`` may have added callbacks."""
        self.route_checkpoints(trainer)

    def route_checkpoints(self, trainer: Trainer) -> None:
        """Set the folder of each ``ModelCheckpoint``.

        If the callback has none, it gets the checkpoint directory, if the job has one. A folder below the working
        directory moves below the checkpoint directory, or else below the host's output directory.

        Call it when the Trainer exists: ``fit(ckpt_path="last")`` looks for the file before ``setup``.
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
        self._model_dir.mkdir(parents=True, exist_ok=True)
        best, held = self._find_best(trainer)
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
            logger.info("model: %s (from %s)", self._model_dir / MODEL_CHECKPOINT, os.path.basename(best))
        trainer.strategy.barrier("lightning_sm.export")

    def _find_best(self, trainer: Trainer) -> tuple[str | None, dict[str, int] | None]:
        """Return the best checkpoint, and who has which file of it if it is a folder; the same on all ranks."""
        best = trainer.strategy.broadcast(self._best_checkpoint(trainer) if trainer.is_global_zero else None)
        held = None if best is None else self._holders(trainer, best)
        if best is not None and held is not None:
            missing = lacks_shards(trainer.strategy, Path(best), held)
            if missing:
                if trainer.is_global_zero:
                    logger.warning("No host has %s of the best checkpoint %s: exporting another one.", missing[0], best)
                return None, None
        return best, held

    @staticmethod
    def _holders(trainer: Trainer, checkpoint: str) -> dict[str, int] | None:
        is_folder = trainer.strategy.broadcast(trainer.is_global_zero and os.path.isdir(checkpoint))
        return holders(Path(checkpoint)) if is_folder else None

    def _best_checkpoint(self, trainer: Trainer) -> str | None:
        """Find the best checkpoint that this host can read; callbacks that monitor a metric come first."""
        callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
        for callback in sorted(callbacks, key=lambda callback: callback.monitor is None):
            if not callback.best_model_path:
                continue
            # After a restart on another host, the file may be in another folder, under the same name.
            stated = callback.best_model_path
            for path in (stated, os.path.join(callback.dirpath or "", os.path.basename(stated))):
                filesystem, address = url_to_fs(path)
                if filesystem.exists(address):
                    return path
            logger.warning("The best checkpoint %s does not exist: exporting another one.", stated)
        return None

    def _export_file(self, checkpoint: str) -> None:
        incoming = self._incoming(MODEL_CHECKPOINT)
        if checkpoint != str(incoming):
            filesystem, address = url_to_fs(checkpoint)
            filesystem.get(address, str(incoming))
        # weights_only=False: this job wrote the file, and hyperparameters in it may be of any type.
        state_dict = torch.load(incoming, map_location="cpu", weights_only=False)["state_dict"]
        os.replace(incoming, self._model_dir / MODEL_CHECKPOINT)
        self._export_weights(state_dict)

    def _export_shards(self, folder: Path, held: dict[str, int], trainer: Trainer) -> None:
        """Export each file from one host that has it: SageMaker merges the model directories of all hosts."""
        weights = gather_weights(trainer.strategy, folder, held)
        own = [name for name, rank in held.items() if rank == trainer.global_rank]
        incoming = self._incoming(MODEL_CHECKPOINT)
        target = self._model_dir / MODEL_CHECKPOINT
        if own:
            if folder != incoming:
                remove_folder(incoming)
                for name in own:
                    (incoming / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(folder / name, incoming / name)
            remove_folder(target)
            os.replace(incoming, target)
        if not trainer.is_global_zero:
            return
        if weights is not None:
            self._export_weights(weights)
        else:
            is_deepspeed = "latest" in held
            logger.info(
                "%s is a sharded checkpoint, so %s is not written. To make it from the files of all hosts, run `%s`.",
                target,
                MODEL_STATE_DICT,
                f"python {MODEL_CHECKPOINT}/zero_to_fp32.py {MODEL_CHECKPOINT} weights"
                if is_deepspeed
                else f"python -m {DISTRIBUTION}.utilities.consolidate_checkpoint {MODEL_CHECKPOINT}",
            )

    def _export_weights(self, state_dict: dict[str, Any]) -> None:
        torch.save(state_dict, self._incoming(MODEL_STATE_DICT))
        os.replace(self._incoming(MODEL_STATE_DICT), self._model_dir / MODEL_STATE_DICT)

    def _export_config(self) -> None:
        if self.config is not None:
            self._incoming(MODEL_CONFIG).write_text(self.config, encoding="utf-8")
            os.replace(self._incoming(MODEL_CONFIG), self._model_dir / MODEL_CONFIG)

    def _incoming(self, name: str) -> Path:
        """Where a file is written before it gets its final name, so that a killed job leaves no truncated model."""
        return self._model_dir / f".{name}.incoming"
