"""Shards of a stage's parameters, gradients and optimizer states over its replicas, by torch's FSDP2."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_sm._lightning import LightningModule
from lightning_sm.training.strategies.pipeline.stage import Stage

HOOK = "shard_stage"


def shard_stages(module: LightningModule, stages: Mapping[int, Stage], mesh: DeviceMesh) -> None:
    """Shard this rank's stages.

    The module's method ``shard_stage(layers, mesh)`` shards the layers of a stage, an ``nn.Sequential`` that has them
    by name. Without it, each layer becomes one unit of FSDP2. A unit's parameters are gathered at its first microbatch,
    and freed after the last backward pass of a step: gathered for each microbatch, they would be sent so many times.

    Args:
        module: The LightningModule.
        stages: Its stages on this rank.
        mesh: The ranks with the same stages, of dimensions "data_parallel" and "tensor_parallel".
    """
    hook: Any = getattr(module, HOOK, None)
    for stage in stages.values():
        if hook is not None:
            hook(nn.Sequential(OrderedDict(zip(stage.layer_names, stage.layers, strict=True))), mesh)
        else:
            for layer in stage.layers:
                if next(layer.parameters(), None) is not None:
                    fully_shard(layer, mesh=mesh["data_parallel"], reshard_after_forward=False)
        # torch's schedules leave the reduction of gradients to the end of a step if the stage itself is a unit.
        fully_shard(stage, mesh=mesh["data_parallel"], reshard_after_forward=False)


def free_gathered(stages: Mapping[int, nn.Module]) -> None:
    """Free what a forward pass without a backward pass has gathered.

    Args:
        stages: This rank's stages.
    """
    for stage in stages.values():
        for child in stage.modules():
            if isinstance(child, FSDPModule):
                child.reshard()


def like(value: Any, own: Any) -> Any:
    """Return this rank's part of a tensor, if the parameter that it is for is sharded.

    Args:
        value: A whole tensor, such as from a checkpoint; anything else is returned as it is.
        own: The parameter.
    """
    if not isinstance(own, DTensor) or not isinstance(value, Tensor) or value.shape != own.shape:
        return value
    whole = value.to(own.device)
    # Every rank has the whole tensor, so that no rank sends anything.
    part = distribute_tensor(whole, own.device_mesh, own.placements, src_data_rank=None).to_local()
    if part.untyped_storage().nbytes() > part.nbytes:
        part = part.clone()  # a view would keep the whole tensor
    return DTensor.from_local(part, own.device_mesh, own.placements, shape=own.shape, stride=own.stride())


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor with its parts of all ranks, a collective call for a sharded one.

    Args:
        tensor: A tensor, sharded or not.
    """
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            return tensor.full_tensor()
    return tensor
