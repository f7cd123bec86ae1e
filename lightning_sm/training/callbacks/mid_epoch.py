"""MidEpoch: restore state that Lightning loses when training resumes within an epoch."""

from __future__ import annotations

import logging
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from lightning_sm._lightning import (
    BatchSizeFinder,
    Callback,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LightningModule,
    StochasticWeightAveraging,
    Trainer,
    call,
)
from lightning_sm._random_state import RandomState
from lightning_sm._unlisted import UnlistedCallback
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.training.all_ranks import of_all_ranks
from lightning_sm.training.checkpoints.find_newest import JOB_KEY
from lightning_sm.training.checkpoints.gradients import accumulated_gradients, restore_gradients
from lightning_sm.training.checkpoints.kept_state import keep_checkpointed_state

logger = logging.getLogger(__name__)

_KEY = "lightning_sm.mid_epoch"
_HOOK = "on_train_epoch_start"
# Lightning's callbacks that, at the start of an epoch, change state that checkpoints do not include.
_TO_REPEAT = (GradientAccumulationScheduler, StochasticWeightAveraging)
_SEARCHES = (BatchSizeFinder, LearningRateFinder)
_NOT_USERS = ("lightning_sm", "pytorch_lightning", "lightning")


class MidEpoch(UnlistedCallback):
    """A callback that restores the state of an epoch in progress when training resumes within that epoch.

    It calls ``on_train_epoch_start`` of the LightningModule and the callbacks again. Lightning does not, so anything
    that these hooks set (a curriculum, or the number of batches over which gradients accumulate) would be missing for
    the rest of the epoch. The hooks run with the random state and the callbacks' states from the start of the epoch,
    but with the weights and buffers of the checkpoint. If the hooks change state that the checkpoint restores, these
    changes are undone, because the checkpoint already includes them.

    When the same job restarts, parameters that had been frozen or unfrozen since training began
    (``BackboneFinetuning``) are frozen or unfrozen again: Lightning restores the optimizer's groups, but not
    ``requires_grad``.

    Checkpoints include gradients that accumulate over several batches, and ``trainer.callback_metrics``. They do not
    include the values that ``self.log`` and the LightningModule's metrics have collected during the epoch; a log
    message says so.

    This callback must come before all callbacks that draw random numbers. ``SageMakerCLI`` and ``SageMakerTrainer``
    add it to every job.
    """

    def __init__(self) -> None:
        super().__init__()
        job = SageMakerJob.from_environment()
        self._job_name = None if job is None else job.name
        self._started: _EpochStart | None = None
        self._requires_grad: dict[str, bool] = {}
        self._loaded: dict[str, Any] | None = None
        self._is_restart = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Reset state loaded by an earlier run of the Trainer, such as a test, or a fit that failed before training."""
        self._loaded, self._is_restart = None, False
        if stage == "fit":
            self._started = None

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Read the state of the epoch, if the checkpoint has one."""
        self._loaded = checkpoint.get(_KEY)
        self._is_restart = (checkpoint.get(JOB_KEY) or {}).get("name") == self._job_name

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save the state of all ranks; a collective call."""
        if self._started is None:
            return
        changed = {
            name: parameter.requires_grad
            for name, parameter in pl_module.named_parameters()
            if self._requires_grad.get(name, parameter.requires_grad) != parameter.requires_grad
        }
        own = {
            "random": self._started.random.saved(),
            "requires_grad": changed,
            "callback_metrics": {
                name: value.to("cpu", copy=True) for name, value in trainer._logger_connector._callback_metrics.items()
            },
        }
        started = {"epoch": self._started.epoch, "callbacks": self._started.callbacks}
        checkpoint[_KEY] = {**started, "ranks": of_all_ranks(own), "gradients": accumulated_gradients(trainer)}

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore ``trainer.callback_metrics`` if the resumed fit had already ended, and so did not train."""
        self._started = None  # no epoch is in progress when the model is exported
        if self._loaded is not None:
            _restore_metrics(trainer, self._saved_by(trainer))
            self._loaded = None

    def _saved_by(self, trainer: Trainer) -> dict[str, Any]:
        """Return the saved state of this rank, or of another rank if fewer ranks saved the checkpoint."""
        ranks: list[dict[str, Any]] = (self._loaded or {}).get("ranks", [{}])
        return ranks[trainer.global_rank % len(ranks)]

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Prepare a resumed fit to repeat the start of its epoch, and to restore gradients, before the first batch."""
        loop = trainer.fit_loop
        vars(loop).pop("on_advance_start", None)  # left by a fit that failed before its first epoch
        vars(loop.epoch_loop.val_loop).pop("increment_progress_to_evaluation_end", None)
        own = self._saved_by(trainer)
        _restore_metrics(trainer, own)
        loaded, self._loaded, self._started = self._loaded or {}, None, None
        self._requires_grad = {name: parameter.requires_grad for name, parameter in pl_module.named_parameters()}
        if self._is_restart:
            for name, parameter in pl_module.named_parameters():
                parameter.requires_grad_(own.get("requires_grad", {}).get(name, parameter.requires_grad))
        is_within = loop.restarted_mid_epoch or loop.restarted_on_epoch_end
        if not (is_within or loaded):
            return
        gradients = loaded.get("gradients", {})
        on_advance_start = loop.on_advance_start

        def start_again() -> None:
            vars(loop).pop("on_advance_start")
            if not is_within:
                restore_gradients(trainer, gradients)
                on_advance_start()
                return
            on_advance_start()
            # Compare epochs: Lightning mistakes a checkpoint after an epoch's last batch for one within the next epoch.
            is_same_epoch = loaded.get("epoch") == trainer.current_epoch
            self._repeat_start(trainer, loaded["callbacks"] if is_same_epoch else {}, own if is_same_epoch else {})
            if is_same_epoch and trainer.is_global_zero:
                logger.info("Training resumes within an epoch, so its metrics cover only the remaining batches.")
            restore_gradients(trainer, gradients)

        loop.on_advance_start = start_again
        val_loop = loop.epoch_loop.val_loop
        skip_validation = val_loop.increment_progress_to_evaluation_end

        def skip_without_drawing() -> None:
            # To count batches, Lightning starts the validation loaders, which draws random numbers.
            vars(val_loop).pop("increment_progress_to_evaluation_end")
            now = RandomState.now()
            skip_validation()
            now.restore()

        val_loop.increment_progress_to_evaluation_end = skip_without_drawing

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the state with which the epoch starts."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        states = {item.state_key: item.state_dict() for item in callbacks if _is_to_repeat(item) and _is_users(item)}
        self._started = _EpochStart(trainer.current_epoch, RandomState.now(), deepcopy(states))

    def _repeat_start(self, trainer: Any, states: dict[str, Any], own: dict[str, Any]) -> None:
        """Call ``on_train_epoch_start`` of the LightningModule and the callbacks for which ``_is_to_repeat`` is true.

        Args:
            trainer: The Trainer.
            states: States of the callbacks at the start of the epoch; other callbacks keep their current state.
            own: The state that this rank saved in this epoch, or an empty dict.
        """
        model, now = trainer.lightning_module, RandomState.now()
        if own:
            RandomState.of(own["random"]).restore()
        callbacks = [callback for callback in trainer.callbacks if _is_to_repeat(callback)]
        with_state = [(item, deepcopy(item.state_dict())) for item in callbacks if item.state_key in states]
        for callback, _ in with_state:
            callback.load_state_dict(states[callback.state_key])
        self.on_train_epoch_start(trainer, model)
        if callbacks or _is_users(model):
            with keep_checkpointed_state(trainer):
                model._current_fx_name = _HOOK
                for callback in callbacks:
                    callback.on_train_epoch_start(trainer, model)
                model._current_fx_name = None
                call._call_lightning_module_hook(trainer, _HOOK)
        for callback, state in with_state:
            callback.load_state_dict(state)
        if own:
            now.restore()


@dataclass(frozen=True)
class _EpochStart:
    """The state with which the hooks at the start of an epoch run.

    Attributes:
        epoch: The epoch.
        random: The random state.
        callbacks: States of the callbacks to call again, by ``state_key``.
    """

    epoch: int
    random: RandomState
    callbacks: dict[str, Any]


def _restore_metrics(trainer: Any, saved: dict[str, Any]) -> None:
    """Restore ``trainer.callback_metrics``, such as those of the last validation, without computing this epoch's."""
    for name, value in saved.get("callback_metrics", {}).items():
        trainer._logger_connector._callback_metrics[name] = value.to(trainer.strategy.root_device, copy=True)


def _is_to_repeat(callback: Callback) -> bool:
    """Return whether a callback, at the start of an epoch, changes state that the checkpoint does not restore."""
    return isinstance(callback, _TO_REPEAT) or (_is_users(callback) and not isinstance(callback, _SEARCHES))


def _is_users(owner: Any) -> bool:
    """Return whether the hook of a callback or LightningModule is the user's code."""
    module: str = getattr(getattr(owner, _HOOK), "__module__", None) or ""
    return module.partition(".")[0] not in _NOT_USERS
