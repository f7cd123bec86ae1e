"""Stand-in for SageMaker's data parallel library (SMDDP): the backend "smddp" on Gloo, with SMDDP's limitations.

Put the folder ``smdistributed_stand_in`` on PYTHONPATH. As with SMDDP itself, importing this module registers the
backend.

Source:
    SageMaker developer guide, "Use the SMDDP library in your PyTorch Lightning training script" and "Troubleshooting":
    no other operation than SUM, no new_group(), no Gloo or NCCL beside it, no barrier(device_ids=...), no single host.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed
from torch.distributed import ProcessGroup, ProcessGroupGloo, ReduceOp, Store, Work, distributed_c10d


class UnsupportedBySMDDPError(RuntimeError):
    """A call that SMDDP does not support."""


class _SMDDP(ProcessGroup):
    """The collective calls that DistributedDataParallel and Lightning make; ``ProcessGroup`` raises for all others."""

    def __init__(self, store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
        super().__init__(rank, world_size)
        self._gloo = ProcessGroupGloo(store, rank, world_size, timeout)

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        opts = opts or torch.distributed.AllreduceOptions()
        if opts.reduceOp != ReduceOp.SUM:
            name = next(name for name, value in ReduceOp.RedOpType.__members__.items() if opts.reduceOp == value)
            raise UnsupportedBySMDDPError(f"smddp does not support: ReduceOp.{name}")
        return self._gloo.allreduce(tensors, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        return self._gloo.allgather(outputs, inputs, opts or torch.distributed.AllgatherOptions())

    def broadcast(self, tensors: Any, opts: Any = None) -> Work:
        return self._gloo.broadcast(tensors, opts or torch.distributed.BroadcastOptions())

    def barrier(self, opts: Any = None) -> Work:
        opts = opts or torch.distributed.BarrierOptions()
        if opts.device_ids:
            raise UnsupportedBySMDDPError(f"smddp does not support: barrier(device_ids={opts.device_ids})")
        return self._gloo.barrier(opts)

    def getBackendName(self) -> str:  # noqa: N802  # the name in C++
        return "smddp"


def _refuse_new_group(*_: Any, **__: Any) -> None:
    raise UnsupportedBySMDDPError("smddp does not support: new_group(), nor NCCL or Gloo beside it")


torch.distributed.Backend.register_backend("smddp", _SMDDP, devices=["cpu", "cuda"])
torch.distributed.new_group = _refuse_new_group
distributed_c10d.new_group = _refuse_new_group
