"""Checkpoints that are folders: each host has only the files that its ranks wrote.

Hosts do not share a folder while a job runs; only a restarted job finds all files on every host.
"""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from lightning_sm._lightning import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Trainer
from lightning_sm.errors import StrategyError


def install_shard_hooks(trainer: Trainer) -> None:
    """Make a sharded strategy remove checkpoints on every host, and remove an old checkpoint before overwriting it.

    Lightning removes checkpoints on rank 0 only, so the disks of the other hosts would fill up. And if a host is
    reclaimed while a checkpoint such as last.ckpt is overwritten, the checkpoint would silently mix shards of two
    steps.

    Raises:
        StrategyError: The strategy cannot restore the optimizer from the shards that it writes, or cannot write to a
            callback's dirpath.
    """
    strategy: Any = trainer.strategy
    if isinstance(trainer.strategy, (FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy)):
        _refuse_object_stores(trainer)
        if isinstance(trainer.strategy, FSDPStrategy):
            _refuse_shards_of_replicas(strategy)
        strategy.save_checkpoint = partial(_save_afresh, strategy, strategy.save_checkpoint)
        strategy.remove_checkpoint = partial(_remove_on_each_host, strategy)


def remove_folder(path: str | os.PathLike[str]) -> None:
    """Remove a folder if it exists, and ignore errors."""
    shutil.rmtree(path, ignore_errors=True)


def has_index(folder: Path) -> bool:
    """Return whether a checkpoint has its index of shards, a file that only rank 0 writes."""
    return any((folder / name).exists() for name in (".metadata", "latest"))


def object_stores(trainer: Trainer) -> list[str]:
    """Return the addresses, such as ``s3://bucket/folder``, to which callbacks of a Trainer write checkpoints."""
    folders = [str(getattr(callback, "dirpath", None) or "") for callback in trainer.checkpoint_callbacks]
    return sorted({folder for folder in folders if "://" in folder})


def _refuse_object_stores(trainer: Trainer) -> None:
    # Lightning converts the address to a pathlib.Path, even for a checkpoint that is a single file. Nothing would reach
    # the store, and a restarted job would silently start from scratch.
    for address in object_stores(trainer):
        raise StrategyError(
            f"{type(trainer.strategy).__name__} cannot write checkpoints to {address}, which is the dirpath of a "
            f"callback: it would create a folder {Path(address)} on each host's disk. Remove dirpath: checkpoints "
            "then go to the job's checkpoint folder, which SageMaker uploads to checkpoint_s3_uri."
        )


def _refuse_shards_of_replicas(strategy: Any) -> None:
    # Lightning calls torch's load_sharded_optimizer_state_dict, which spreads the state over all ranks even if only a
    # group of them shards the model. The momenta of a resumed run would silently differ from those of the interrupted
    # run.
    if strategy._state_dict_type == "sharded" and "HYBRID" in strategy.sharding_strategy.name:
        raise StrategyError(
            f"FSDPStrategy with sharding_strategy={strategy.sharding_strategy.name} restores a wrong optimizer "
            "state from a checkpoint with state_dict_type=sharded. Set state_dict_type=full, or use "
            "ModelParallelStrategy and pass fully_shard a mesh of replicas and shards."
        )


def _save_afresh(
    strategy: Any, save: Any, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
) -> None:
    path = strategy.broadcast(filepath)
    if strategy.local_rank == 0:
        # Otherwise, this host would read old shards in place of the new ones, which only other hosts have.
        remove_folder(path)
    strategy.barrier("lightning_sm.save_afresh")
    save(checkpoint, path, storage_options)


def _remove_on_each_host(strategy: Any, filepath: Any) -> None:
    if strategy.is_global_zero or (strategy.local_rank == 0 and os.path.isdir(filepath)):
        strategy.checkpoint_io.remove_checkpoint(filepath)
