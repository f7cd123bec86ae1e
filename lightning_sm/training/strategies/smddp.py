"""SMDDPStrategy: DDP whose collective calls are made by SageMaker's data parallel library (SMDDP).

Source:
    SageMaker developer guide, "Run distributed training with the SageMaker AI distributed data parallelism library".
    Lightning's calls that SMDDP does not support: Lightning issue 20409.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_sm._lightning import DDPStrategy, InfiniteBarrier, data_connector, rank_zero_only
from lightning_sm._untested import SMDDP
from lightning_sm.errors import StrategyError
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.topology import Topology

logger = logging.getLogger(__name__)
_warn_once = rank_zero_only(logger.warning)

_BACKEND = "smddp"
_LIBRARY = "smdistributed.dataparallel.torch.torch_smddp"
# Those of SMDDP 2. Earlier versions also ran on ml.p3.16xlarge and ml.p3dn.24xlarge.
_INSTANCE_TYPES = ("ml.p4d.24xlarge", "ml.p4de.24xlarge")
# SMDDP can only sum, so these gather first. The names are those of Lightning's self.log(reduce_fx=...).
_REDUCED_BY_GATHERING: dict[str, Callable[..., Tensor]] = {
    "max": torch.amax,
    "min": torch.amin,
    "product": torch.prod,
}


class SMDDPStrategy(DDPStrategy):
    """``DDPStrategy`` with the backend ``smddp``, restricted to the calls that SMDDP supports.

    SMDDP has no operation but SUM, no ``new_group()``, and tolerates no other backend beside it. So a mean is a divided
    sum, a maximum is taken over gathered values, and the ranks wait for ``prepare_data`` at a barrier of SMDDP's own,
    within ``timeout``. Hooks, callbacks and metrics that call ``torch.distributed`` themselves must observe the same
    limits.

    It needs a SageMaker job with two or more hosts of type ml.p4d.24xlarge or ml.p4de.24xlarge, and an image with the
    library: docs/strategies.md names the versions of torch. ``--trainer.strategy=smddp`` selects this strategy.

    Args:
        **kwargs: Arguments of ``DDPStrategy``, except for ``process_group_backend``.

    Raises:
        StrategyError: SMDDP cannot run in this job; raised when the Trainer is made. The message names an alternative.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(process_group_backend=_BACKEND, **kwargs)

    def _configure_launcher(self) -> None:
        # The Trainer has set num_nodes by now, and starts the other ranks of this host afterwards.
        obstacle = obstacle_to_smddp(SageMakerJob.from_environment(), self.num_nodes)
        if obstacle is not None:
            raise StrategyError(f"strategy=smddp cannot be used: {obstacle} Use strategy=ddp: it runs everywhere.")
        super()._configure_launcher()

    def setup_environment(self) -> None:
        """Make the process group, and let Lightning wait for ``prepare_data`` without a Gloo group."""
        data_connector._InfiniteBarrier = _PrepareDataBarrier  # type: ignore[attr-defined]
        _warn_once(SMDDP)
        super().setup_environment()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over all ranks, in place.

        Args:
            tensor: The tensor of this rank. Anything else is returned as it is.
            group: The process group; None for all ranks.
            reduce_op: "mean" or "avg", "sum", "max", "min", "product", or the ``ReduceOp`` of one of them.

        Returns:
            The same tensor, with the same values on all ranks.
        """
        if not isinstance(tensor, Tensor) or not torch.distributed.is_initialized():
            return tensor
        name = (reduce_op if isinstance(reduce_op, str) else reduce_op.name).lower()
        world_size = torch.distributed.get_world_size(group)
        if name in {"mean", "avg"}:
            return tensor.copy_(super().reduce(tensor, group, "sum") / world_size)
        if name not in _REDUCED_BY_GATHERING:
            return super().reduce(tensor, group, reduce_op)
        gathered = [torch.empty_like(tensor) for _ in range(world_size)]
        torch.distributed.all_gather(gathered, tensor, group)
        return tensor.copy_(_REDUCED_BY_GATHERING[name](torch.stack(gathered), dim=0))


class _PrepareDataBarrier(InfiniteBarrier):
    """The barrier at which ranks wait for ``prepare_data``: SMDDP's own if there is one, else that of a Gloo group."""

    def __enter__(self) -> Any:
        if torch.distributed.is_initialized() and torch.distributed.get_backend() == _BACKEND:
            self.barrier = torch.distributed.barrier  # type: ignore[assignment]  # it returns None if not async_op
            return self
        return super().__enter__()


def obstacle_to_smddp(job: SageMakerJob | None, num_nodes: int) -> str | None:
    """Return why SMDDP cannot run.

    Args:
        job: The job of this process; None off SageMaker.
        num_nodes: Number of trainer hosts.

    Returns:
        A sentence; None if nothing is known to be in the way.
    """
    if job is None:
        return "SMDDP runs in SageMaker jobs only."
    trainers = Topology.from_job(job).trainer_hosts
    types = {group.instance_type or "" for group in job.groups if set(group.hosts) & set(trainers)}
    unsupported = sorted(types - {"", *_INSTANCE_TYPES})
    if unsupported:
        return (
            f"SMDDP runs on {' and '.join(_INSTANCE_TYPES)}, but the trainer hosts are of type "
            f"{', '.join(unsupported)} ({job.source})."
        )
    if num_nodes == 1:
        return "SMDDP needs at least two trainer hosts, but the job has one: it speeds up traffic between hosts."
    try:
        importlib.import_module(_LIBRARY)
    except ImportError as error:
        return (
            f"the library cannot be imported ({error}). Its last known release, SMDDP 2.5.0, is built for PyTorch "
            f"2.4.1, and this is PyTorch {torch.__version__}: none is known for 2.6 or newer, which lightning_sm needs."
        )
    return None
