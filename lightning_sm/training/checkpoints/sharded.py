"""Checkpoints that are folders: each host has the files that its own ranks wrote, and no host has all of them.

Hosts share no folder while a job runs; only a restarted job finds all files on every host.
"""

from __future__ import annotations

import io
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lightning_sm._lightning import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Trainer
from lightning_sm.errors import StrategyError
from lightning_sm.job.uploads import files_of
from lightning_sm.training.all_ranks import of_all_ranks

# Names under which ModelParallelStrategy and FSDPStrategy save the weights.
_WEIGHTS = ("state_dict", "model")
_INDEX = ".metadata"


def install_shard_hooks(trainer: Trainer) -> None:
    """Let a sharded strategy remove checkpoints on every host, and make an old one invalid before it is overwritten.

    Lightning removes checkpoints on rank 0 only, so the disks of the other hosts would fill. And if a host is taken
    away while a checkpoint such as last.ckpt is overwritten, its shards are of two steps, and nothing shows it.

    Raises:
        StrategyError: The strategy cannot restore the optimizer from its own shards, or cannot write to the dirpath of
            a callback.
    """
    strategy: Any = trainer.strategy
    if isinstance(trainer.strategy, (FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy)):
        _refuse_object_stores(trainer)
        if isinstance(trainer.strategy, FSDPStrategy):
            _refuse_shards_of_replicas(strategy)
        strategy.save_checkpoint = partial(_save_afresh, strategy, strategy.save_checkpoint)
        strategy.remove_checkpoint = partial(_remove_on_each_host, strategy)


def remove_folder(path: str | os.PathLike[str]) -> None:
    """Remove a folder, which other hosts that share it may be removing at the same time."""
    shutil.rmtree(path, ignore_errors=True)


def has_index(folder: Path) -> bool:
    """Return whether a checkpoint has the file that names its shards, which only rank 0 writes."""
    return any((folder / name).exists() for name in (_INDEX, "latest"))


def holders(folder: Path) -> dict[str, int]:
    """Return the lowest rank that has each file of a checkpoint, by relative path. A collective call.

    Args:
        folder: The checkpoint, which every host has under the same path.
    """
    own = {str(file.relative_to(folder)) for file in files_of(folder)}  # without those of SageMaker's agent
    return {name: rank for rank, names in reversed([*enumerate(of_all_ranks(own))]) for name in sorted(names)}


def lacks_shards(strategy: Any, folder: Path, held: dict[str, int]) -> list[str]:
    """Return the shards that a checkpoint of torch.distributed.checkpoint lists and no host has. A collective call.

    Args:
        strategy: The Trainer's strategy.
        folder: The checkpoint.
        held: Its ``holders``.
    """
    index = _index(strategy, folder, held)
    listed = set() if index is None else {place.relative_path for place in index.storage_data.values()}
    return sorted(listed - held.keys())


def gather_weights(strategy: Any, folder: Path, held: dict[str, int]) -> dict[str, Any] | None:
    """Bring the weights of a sharded checkpoint to rank 0, over the process group. A collective call.

    Rank 0 needs memory for all weights; optimizer states stay where they are.

    Args:
        strategy: The Trainer's strategy.
        folder: The checkpoint.
        held: Its ``holders``; none of its shards may be missing.

    Returns:
        On rank 0 the plain ``state_dict``, on other ranks an empty one; None if the folder is of another format.
    """
    index = _index(strategy, folder, held)
    if index is None:
        return None
    paths = index.planner_data
    names = {fqn: paths[fqn][1] for fqn in index.state_dict_metadata if paths[fqn][0] in _WEIGHTS}
    weights: dict[str, Any] = dict.fromkeys(names.values()) if strategy.global_rank == 0 else {}
    for piece, place in index.storage_data.items():
        if piece.fqn not in names:
            continue
        file = folder / place.relative_path
        data = _fetch(strategy, file, place.offset, place.length, held[place.relative_path])
        if data is None:
            continue
        # weights_only=False: the job wrote the file, and extra state of a module may be of any type.
        value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
        described = index.state_dict_metadata[piece.fqn]
        name = names[piece.fqn]
        if isinstance(described, TensorStorageMetadata):
            if weights[name] is None:
                weights[name] = torch.empty(described.size, dtype=described.properties.dtype)
            offset = piece.offset or [0] * value.dim()
            region = tuple(slice(start, start + size) for start, size in zip(offset, value.shape, strict=True))
            weights[name][region] = value
        else:
            weights[name] = value
    return weights


def _index(strategy: Any, folder: Path, held: dict[str, int]) -> Metadata | None:
    """Return, on all ranks, rank 0's list of what is in which shard; None if rank 0 has none."""
    if held.get(_INDEX) != 0:
        return None
    index: Metadata = strategy.broadcast(
        FileSystemReader(folder).read_metadata() if strategy.global_rank == 0 else None
    )
    return index


def _fetch(strategy: Any, file: Path, offset: int, length: int, holder: int) -> bytes | None:
    """Return a piece of a file on rank 0, and None on the others; only rank 0 and the holder take part."""
    if strategy.global_rank not in {0, holder}:
        return None
    piece = torch.empty(length, dtype=torch.uint8)
    if strategy.global_rank == holder:
        with file.open("rb") as opened:
            opened.seek(offset)
            piece = torch.frombuffer(bytearray(opened.read(length)), dtype=torch.uint8)
    if holder != 0:
        piece = piece.to(strategy.root_device)  # NCCL sends from one GPU to another
        if strategy.global_rank == holder:
            distributed.send(piece, 0)
            return None
        distributed.recv(piece, holder)
    return _bytes(piece)


def _bytes(piece: Tensor) -> bytes:
    return piece.cpu().numpy().tobytes()


def object_stores(trainer: Trainer) -> list[str]:
    """Return the addresses, such as ``s3://bucket/folder``, to which callbacks of a Trainer write checkpoints."""
    folders = [str(getattr(callback, "dirpath", None) or "") for callback in trainer.checkpoint_callbacks]
    return sorted({folder for folder in folders if "://" in folder})


def _refuse_object_stores(trainer: Trainer) -> None:
    # Lightning makes a pathlib.Path of the address, even for a checkpoint that is a single file. Nothing would reach
    # the store, and a restarted job would start from scratch, without an error.
    for address in object_stores(trainer):
        raise StrategyError(
            f"{type(trainer.strategy).__name__} cannot write checkpoints to {address}, which is the dirpath of a "
            f"callback: it would make a folder {Path(address)} on each host's disk. Leave dirpath out: checkpoints "
            "then go to the job's checkpoint folder, which SageMaker uploads to checkpoint_s3_uri."
        )


def _refuse_shards_of_replicas(strategy: Any) -> None:
    # torch's load_sharded_optimizer_state_dict, which Lightning calls, spreads the state over all ranks, whichever
    # group shards the model: a resumed run had other momenta than the interrupted one, without an error.
    if strategy._state_dict_type == "sharded" and "HYBRID" in strategy.sharding_strategy.name:
        raise StrategyError(
            f"FSDPStrategy with sharding_strategy={strategy.sharding_strategy.name} restores a wrong state of the "
            "optimizer from a checkpoint with state_dict_type=sharded. Set state_dict_type=full, or use "
            "ModelParallelStrategy with a mesh of replicas and shards for fully_shard."
        )


def _save_afresh(
    strategy: Any, save: Any, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
) -> None:
    path = strategy.broadcast(filepath)
    if strategy.local_rank == 0:
        # Shards of the old one that other hosts wrote would be read in place of the new ones, which this host lacks.
        remove_folder(path)
    strategy.barrier("lightning_sm.save_afresh")
    save(checkpoint, path, storage_options)


def _remove_on_each_host(strategy: Any, filepath: Any) -> None:
    if strategy.is_global_zero or (strategy.local_rank == 0 and os.path.isdir(filepath)):
        try:
            strategy.checkpoint_io.remove_checkpoint(filepath)
        except FileNotFoundError:  # another host that shares the folder is removing it, too
            remove_folder(filepath)
