"""Selection of the strategy that the SDK's ``distribution={...}`` asks for, unless the script sets one."""

from __future__ import annotations

import logging
from typing import Any

from lightning_sm._lightning import rank_zero_only
from lightning_sm.errors import StrategyError
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.model_parallel import ModelParallelism, requested_model_parallelism
from lightning_sm.training.strategies.smddp import SMDDPStrategy, obstacle_to_smddp

logger = logging.getLogger(__name__)
_warn_once = rank_zero_only(logger.warning)
_log_once = rank_zero_only(logger.info)


def distribution_arguments(job: SageMakerJob, num_nodes: int, chosen: Any) -> dict[str, Any]:
    """Return the Trainer's ``strategy`` if ``distribution={...}`` asks for one; warn if SMDDP cannot be used.

    It is not an error if SMDDP cannot run: a request for ``pytorchddp``, which supports any GPU and strategy, looks the
    same as a request for SMDDP.

    Args:
        job: The job.
        num_nodes: Number of trainer hosts.
        chosen: The user's ``strategy``; None or "auto" leaves the choice to the job.

    Raises:
        StrategyError: ``distribution`` asks for model parallelism, but the user has chosen another strategy.
    """
    split = requested_model_parallelism(job.hyperparameters)
    if split is not None:
        if chosen not in (None, "auto"):
            _check_chosen(split, chosen)
            return {}
        _log_once("%s: %s.", split.source, split)
        return {"strategy": split.strategy}
    if not job.asks_for_smddp:
        return {}
    asked = "distribution={...} asks for smdistributed.dataparallel (or pytorchddp: the SDK sends the same for both)"
    if chosen not in (None, "auto"):
        if _name_of(chosen) not in {"smddp", SMDDPStrategy.__name__}:
            _warn_once("%s, but strategy=%s is set. To use SMDDP, set strategy=smddp.", asked, _name_of(chosen))
        return {}
    obstacle = obstacle_to_smddp(job, num_nodes)
    if obstacle is not None:
        _warn_once("%s. Training without it: %s", asked, obstacle)
        return {}
    return {"strategy": "smddp"}


def pipeline_options() -> dict[str, Any]:
    """Return the ``PipelineParallelStrategy`` arguments that ``distribution={...}`` sets, for ``strategy=pipeline``.

    Raises:
        StrategyError: ``distribution`` asks for model parallelism without splitting the model.
    """
    job = SageMakerJob.from_environment()
    split = None if job is None else requested_model_parallelism(job.hyperparameters)
    if split is None:
        return {}
    _check_chosen(split, "pipeline")
    return dict(split.options)


def refuse_in_fabric(job: SageMakerJob) -> None:
    """Raise if a job asks for a split model, which Fabric does not support.

    Args:
        job: The job.

    Raises:
        StrategyError: The job asks for a split model.
    """
    split = requested_model_parallelism(job.hyperparameters)
    if split is not None and split.strategy == "pipeline":
        raise StrategyError(
            f"{split.source}, which is {split} here, but SageMakerFabric does not support pipelines. Use "
            "SageMakerTrainer or SageMakerCLI, or remove modelparallel from distribution."
        )


def _check_chosen(split: ModelParallelism, chosen: Any) -> None:
    name = _name_of(chosen)
    fits = name == "pipeline" if split.strategy == "pipeline" else name.lower().startswith(("ddp", "smddp"))
    if not fits:
        raise StrategyError(
            f"{split.source}, which is {split} here, but the script has strategy={name}. Remove modelparallel from "
            "distribution, or remove the script's strategy."
        )


def _name_of(strategy: Any) -> str:
    """Return the name of a strategy, given its name, an instance, or its class in a configuration."""
    if isinstance(strategy, str):
        return strategy
    return str(getattr(strategy, "class_path", type(strategy).__name__)).rpartition(".")[2]
