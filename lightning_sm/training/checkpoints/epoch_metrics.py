"""The values that ``self.log(..., on_epoch=True)`` and torchmetrics have collected in an epoch so far.

Lightning does not save them: without them, the value of a resumed epoch covers the batches since the resume only.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torchmetrics import Metric, MetricCollection

from lightning_sm._lightning import result

logger = logging.getLogger(__name__)

# The arguments of a logged value that are plain.
_PLAIN = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph"),
    *("add_dataloader_idx", "dataloader_idx", "metric_attribute"),
)
_REDUCTIONS: dict[str, Any] = {"mean": torch.mean, "sum": torch.sum, "max": torch.max, "min": torch.min}
_REDUCTIONS |= {"built-in sum": sum, "built-in max": max, "built-in min": min}
# For the metrics of all ranks, which exchange them: a metric that keeps all predictions may be larger than the model.
_MAX_METRIC_BYTES = 64_000_000


def update_counts(trainer: Any) -> dict[str, int]:
    """Return how often each metric of the LightningModule was updated since its last reset."""
    return {name: metric._update_count for name, metric in _metrics(trainer)}


def collected_metrics(trainer: Any, before_validation: Mapping[str, int]) -> dict[str, Any]:
    """Return what this rank has collected in the epoch so far, as plain values and tensors on the CPU.

    Args:
        trainer: The Trainer.
        before_validation: If the Trainer validates, ``update_counts`` from before: metrics that were updated since are
            left out, as the validation is repeated, or over.
    """
    values = {}
    for key, one in trainer.fit_loop.epoch_loop._results.items():
        reduction = next((name for name, known in _REDUCTIONS.items() if known is one.meta.reduce_fx), None)
        if reduction and one.meta.on_epoch and not one.has_reset and one.meta.sync.group is None:
            values[key] = _saved_value(one, reduction)
    metrics: dict[str, Any] = {}
    free_bytes = _MAX_METRIC_BYTES // trainer.world_size
    for name, metric in _metrics(trainer):
        count = metric._update_count
        if not count or (trainer.validating and before_validation.get(name) != count):
            continue
        state = {key: getattr(metric, key) for key in metric._defaults}
        num_bytes = sum(map(_num_bytes, state.values()))
        if num_bytes <= free_bytes:
            free_bytes -= num_bytes
            metrics[name] = {"state": {key: _copied(value, "cpu") for key, value in state.items()}, "count": count}
        else:
            metrics[name] = {}
    return {"values": values, "metrics": metrics}


def restore_metrics(trainer: Any, saved_by_ranks: Sequence[Mapping[str, Any]]) -> None:
    """Let the epoch go on with what ``collected_metrics`` returned on the same rank in another run.

    Args:
        trainer: The Trainer.
        saved_by_ranks: What each rank has returned. A metric is restored if all ranks have saved its state.
    """
    metrics = dict(_metrics(trainer))
    saved = saved_by_ranks[trainer.global_rank]
    partial = {name for rank in saved_by_ranks for name, one in rank["metrics"].items() if "state" not in one}
    for name, one in saved["metrics"].items():
        if name in metrics and name not in partial:
            for key, value in one["state"].items():
                setattr(metrics[name], key, _copied(value, metrics[name].device))
            metrics[name]._update_count = one["count"]
            metrics[name]._computed = None
    if partial and trainer.is_global_zero:
        logger.warning(
            "Metrics of this epoch that cover the batches since the resume only: %s. Their states were not saved, as "
            "those of all ranks are larger than %d bytes.",
            ", ".join(sorted(partial)),
            _MAX_METRIC_BYTES,
        )
    if trainer.fit_loop.epoch_loop.batch_progress.current.ready == 0:
        return  # before the first batch, Lightning still has the values of the epoch before
    results = trainer.fit_loop.epoch_loop._results
    results.clear()
    for key, one in saved["values"].items():
        if one["is_tensor"] or one["meta"]["metric_attribute"] in metrics:
            results[key] = _restored_value(trainer, one, metrics).to(trainer.strategy.root_device)
    # Else Lightning takes the next batch for the first one of an epoch, and resets what its hook logs.
    trainer._logger_connector._first_loop_iter = False


def saved_callback_metrics(trainer: Any) -> dict[str, torch.Tensor]:
    """Return ``trainer.callback_metrics`` for a checkpoint, without computing those of the epoch."""
    return {name: _copied(value, "cpu") for name, value in trainer._logger_connector._callback_metrics.items()}


def restore_callback_metrics(trainer: Any, saved: Mapping[str, torch.Tensor]) -> None:
    """Restore ``trainer.callback_metrics``, such as those of the last validation."""
    device = trainer.strategy.root_device
    values = {name: _copied(value, device) for name, value in saved.items()}
    trainer._logger_connector._callback_metrics.update(values)


def _metrics(trainer: Any) -> Iterator[tuple[str, Metric]]:
    model = trainer.lightning_module
    for module in model.modules():
        if isinstance(module, MetricCollection):
            module.values(copy_state=False)  # gives the metrics that share a state the current one
    for name, module in model.named_modules():
        if isinstance(module, Metric):
            yield name, module


def _saved_value(one: Any, reduction: str) -> dict[str, Any]:
    meta = one.meta
    saved = {
        "meta": {name: getattr(meta, name) for name in _PLAIN},
        "reduction": reduction,
        "sync": {"_should": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only},
        "is_tensor": one.is_tensor,
    }
    names = [name for name in ("value", "cumulated_batch_size") if one.is_tensor and name in one._defaults]
    return {**saved, "state": {name: _copied(torch.as_tensor(getattr(one, name)), "cpu") for name in names}}


def _restored_value(trainer: Any, saved: Mapping[str, Any], metrics: Mapping[str, Metric]) -> Any:
    # Equal to what self.log will make of the same arguments, or Lightning refuses these.
    meta = result._Metadata(**saved["meta"], reduce_fx=_REDUCTIONS[saved["reduction"]])
    meta.sync = result._Sync(fn=trainer.strategy.reduce, **saved["sync"])
    one = result._ResultMetric(meta, saved["is_tensor"])
    if not one.is_tensor:
        one.value = metrics[saved["meta"]["metric_attribute"]]
    for name, value in saved["state"].items():
        setattr(one, name, _copied(value, "cpu"))
    one._update_count = 1  # else torchmetrics warns that nothing was collected
    return one


def _num_bytes(value: Any) -> int:
    return sum(map(_num_bytes, value)) if isinstance(value, (list, tuple)) else getattr(value, "nbytes", 0)


def _copied(value: Any, device: torch.device | str) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(one, device) for one in value)
    return value.detach().to(device, copy=True) if isinstance(value, torch.Tensor) else deepcopy(value)
