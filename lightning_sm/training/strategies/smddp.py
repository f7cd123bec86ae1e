"""SMDDPStrategy: DDP over SageMaker's data parallel library (SMDDP).

Source:
    SageMaker developer guide, "Run distributed training with the SageMaker AI distributed data parallelism library".
    Calls in Lightning that SMDDP does not support: Lightning issue 20409.
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
# Supported by SMDDP 2. Earlier versions also ran on ml.p3.16xlarge and ml.p3dn.24xlarge.
_INSTANCE_TYPES = ("ml.p4d.24xlarge", "ml.p4de.24xlarge")
# SMDDP can only sum, so gather values for these operations, named as in Lightning's self.log(reduce_fx=...).
_REDUCED_BY_GATHERING: dict[str, Callable[..., Tensor]] = {"max": torch.amax, "min": torch.amin, "product": torch.prod}


class SMDDPStrategy(DDPStrategy):
    """``DDPStrategy`` with the backend ``smddp``, restricted to the calls that SMDDP supports.

    SMDDP supports only SUM, has no ``new_group()``, and does not work alongside another backend. Therefore, the
    strategy computes a mean from a sum, and a maximum from gathered values. Ranks wait for ``prepare_data`` at an SMDDP
    barrier, for at most ``timeout``. Hooks, callbacks and metrics that call ``torch.distributed`` directly must
    observe the same limits.

    The strategy needs a SageMaker job with two or more hosts of type ml.p4d.24xlarge or ml.p4de.24xlarge, and an image
    with the library; docs/strategies.md lists the versions of torch. Select it with ``--trainer.strategy=smddp``.

    Args:
        **kwargs: Arguments of ``DDPStrategy``, except for ``process_group_backend``.

    Raises:
        StrategyError: When the Trainer is created, if SMDDP cannot run in this job. The message names an alternative.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(process_group_backend=_BACKEND, **kwargs)

    def _configure_launcher(self) -> None:
        # Check here: the Trainer has set num_nodes by now, but has not yet started this host's other ranks.
        obstacle = obstacle_to_smddp(SageMakerJob.from_environment(), self.num_nodes)
        if obstacle is not None:
            raise StrategyError(f"strategy=smddp cannot be used: {obstacle} Use strategy=ddp, which runs everywhere.")
        super()._configure_launcher()

    def setup_environment(self) -> None:
        """Create the process group, and make Lightning wait for ``prepare_data`` without using a Gloo group."""
        data_connector._InfiniteBarrier = _PrepareDataBarrier  # type: ignore[attr-defined]
        _warn_once(SMDDP)
        super().setup_environment()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over all ranks, in place.

        Args:
            tensor: This rank's tensor. Any other value is returned unchanged.
            group: The process group. If None, all ranks.
            reduce_op: "mean" or "avg", "sum", "max", "min", "product", or the corresponding ``ReduceOp``.

        Returns:
            The same tensor, with the same values on all ranks.
        """
        if not isinstance(tensor, Tensor) or not torch.distributed.is_initialized():
            return tensor
        name = (reduce_op if isinstance(reduce_op, str) else reduce_op.name).lower()
        if name in {"mean", "avg"}:
            return tensor.copy_(super().reduce(tensor, group, "sum") / torch.distributed.get_world_size(group))
        if name not in _REDUCED_BY_GATHERING:
            return super().reduce(tensor, group, reduce_op)
        return tensor.copy_(_REDUCED_BY_GATHERING[name](self.all_gather(tensor, group), dim=0))


class _PrepareDataBarrier(InfiniteBarrier):
    """The barrier at which ranks wait for ``prepare_data``: SMDDP's own with SMDDP, otherwise a Gloo group's."""

    def __enter__(self) -> Any:
        if torch.distributed.is_initialized() and torch.distributed.get_backend() == _BACKEND:
            self.barrier = torch.distributed.barrier  # type: ignore[assignment]  # it returns None if not async_op
            return self
        return super().__enter__()


def obstacle_to_smddp(job: SageMakerJob | None, num_nodes: int) -> str | None:
    """Return the reason why SMDDP cannot run, or None.

    Args:
        job: The job of this process; None outside SageMaker.
        num_nodes: Number of trainer hosts.

    Returns:
        A sentence, or None if there is no known obstacle.
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
        return "SMDDP speeds up traffic between hosts, so it needs at least two trainer hosts, but the job has one."
    try:
        importlib.import_module(_LIBRARY)
    except ImportError as error:
        return (
            f"the library cannot be imported ({error}). Its last known release, SMDDP 2.5.0, is built for PyTorch "
            f"2.4.1, but this is PyTorch {torch.__version__}. No release is known for PyTorch 2.6 or newer, which "
            "lightning_sm needs."
        )
    return None
