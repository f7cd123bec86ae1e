"""JobOutputs: checkpoints into the synchronised folder, and the best model into the model directory."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

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

logger = logging.getLogger(__name__)
_log_once = rank_zero_only(logger.info)

MODEL_CHECKPOINT = "model.ckpt"
MODEL_STATE_DICT = "state_dict.pt"
MODEL_CONFIG = "config.yaml"


class JobOutputs(Callback):
    """Route checkpoints, and export the best model once at the end of ``fit``.

    Rank 0 writes three files to the model directory: ``model.ckpt`` (the full checkpoint, for
    ``load_from_checkpoint`` and resuming), ``state_dict.pt`` (the plain weights, for ``load_state_dict`` without
    Lightning) and ``config.yaml`` (the resolved configuration). Of a sharded checkpoint, which is a folder, each host
    writes the shards of its own ranks. All ranks wait for it, because SageMaker's local mode
    stops all hosts as soon as the first one exits.

    Args:
        job: The job with its folders.
        config: Text of the resolved configuration, YAML.
    """

    def __init__(self, job: SageMakerJob, config: str) -> None:
        super().__init__()
        self._job = job
        self._model_dir = job.model_dir
        self._config = config

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Route the checkpoint callbacks, those of ``configure_callbacks`` included."""
        self.route_checkpoints(trainer)

    def route_checkpoints(self, trainer: Trainer) -> None:
        """Give each ``ModelCheckpoint`` its place among the job's folders.

        Without a folder it gets the checkpoint directory, if the job has one; a folder below the working directory
        becomes one below the checkpoint directory, else below the host's output.

        Called after the trainer is made, too: ``fit(ckpt_path="last")`` looks for the file before ``setup``.

        Args:
            trainer: The trainer whose callbacks to route.
        """
        for callback in trainer.checkpoint_callbacks:
            if not isinstance(callback, ModelCheckpoint):
                continue
            if callback.dirpath:
                callback.dirpath = self._routed(str(callback.dirpath))
            elif self._job.checkpoint_dir is not None:
                callback.dirpath = str(self._job.checkpoint_dir)
            if callback.save_last == "link" and self._job.checkpoint_dir is not None:
                logger.info("save_last: a copy, because the service does not upload links.")
                callback.save_last = True

    def _routed(self, dirpath: str) -> str:
        """Where a script's relative folder goes, which ``ModelCheckpoint`` has made absolute."""
        here, folder, base = Path.cwd(), Path(dirpath).resolve(), self._job.base_dir.resolve()
        target = self._job.checkpoint_dir or self._job.host_output_dir
        is_jobs = folder.is_relative_to(target.resolve()) or (folder.is_relative_to(base) and base not in here.parents)
        # Everything lies below the root: what is relative and what is absolute cannot be told apart there.
        if "://" in dirpath or is_jobs or not folder.is_relative_to(here) or here == Path(here.anchor):
            return dirpath
        moved = str(target / folder.relative_to(here))
        _log_once("ModelCheckpoint: dirpath = %s, because %s stays on this host.", moved, dirpath)
        return moved

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Export the best model."""
        best = trainer.strategy.broadcast(self._best_checkpoint(trainer) if trainer.is_global_zero else None)
        if best is None:
            self._model_dir.mkdir(parents=True, exist_ok=True)
            # A collective call for sharded strategies: every rank makes it, and rank 0 writes.
            best = str(self._incoming(MODEL_CHECKPOINT))
            trainer.save_checkpoint(best)
        if trainer.is_global_zero:
            self._export(best)
        elif trainer.local_rank == 0:
            self._export_shards(best, trainer)
        trainer.strategy.barrier("lightning_sm.export")

    def _best_checkpoint(self, trainer: Trainer) -> str | None:
        """The best checkpoint that this host can read: of the first callback that monitors a metric, else the first."""
        callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
        for callback in sorted(callbacks, key=lambda callback: callback.monitor is None):
            if not callback.best_model_path:
                continue
            # After a restart on another host the folder may lie elsewhere; the file's name stays.
            stated = callback.best_model_path
            for path in (stated, os.path.join(callback.dirpath or "", os.path.basename(stated))):
                filesystem, address = url_to_fs(path)
                if filesystem.exists(address):
                    return path
            logger.warning("The best checkpoint %s is gone: exporting another.", stated)
        return None

    def _export(self, checkpoint: str) -> None:
        self._model_dir.mkdir(parents=True, exist_ok=True)
        incoming, target = self._incoming(MODEL_CHECKPOINT), self._model_dir / MODEL_CHECKPOINT
        if checkpoint != str(incoming):
            shutil.rmtree(incoming, ignore_errors=True)
            filesystem, address = url_to_fs(checkpoint)
            filesystem.get(address, str(incoming), recursive=True)
        if incoming.is_dir():
            shutil.rmtree(target, ignore_errors=True)
            os.replace(incoming, target)
            logger.info(
                "%s is sharded, so %s is not written: consolidate it with "
                "`python -m %s.utilities.consolidate_checkpoint`.",
                target,
                MODEL_STATE_DICT,
                DISTRIBUTION,
            )
        else:
            # weights_only=False: this job wrote the file, and hyperparameters in it may be of any type.
            state_dict = torch.load(incoming, map_location="cpu", weights_only=False)["state_dict"]
            torch.save(state_dict, self._incoming(MODEL_STATE_DICT))
            os.replace(incoming, target)
            os.replace(self._incoming(MODEL_STATE_DICT), self._model_dir / MODEL_STATE_DICT)
        self._incoming(MODEL_CONFIG).write_text(self._config, encoding="utf-8")
        os.replace(self._incoming(MODEL_CONFIG), self._model_dir / MODEL_CONFIG)
        logger.info("model: %s (from %s)", target, os.path.basename(checkpoint))

    def _export_shards(self, checkpoint: str, trainer: Trainer) -> None:
        """Add this host's part of a sharded checkpoint: the service puts all hosts' model directories together."""
        if not os.path.isdir(checkpoint) or self._model_dir in Path(checkpoint).parents:
            return
        first = trainer.global_rank
        ranks = range(first, first + trainer.num_devices)
        shards = [path for rank in ranks for path in Path(checkpoint).glob(f"__{rank}_*.distcp")]
        folder = self._model_dir / MODEL_CHECKPOINT
        folder.mkdir(parents=True, exist_ok=True)
        for shard in shards:
            shutil.copyfile(shard, folder / shard.name)

    def _incoming(self, name: str) -> Path:
        """Where a file is written before it takes its name, so that a killed job leaves no half of a model."""
        return self._model_dir / f".{name}.incoming"
