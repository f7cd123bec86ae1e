"""KeepLastStep: what a restart within the job needs to resume at the step that has failed, or at one shortly before."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch

from lightning_sm._lightning import LightningModule, Trainer
from lightning_sm._random_state import RandomState
from lightning_sm._unlisted import UnlistedCallback
from lightning_sm.job.control_folder import announce
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.variables import RESTART_DIR
from lightning_sm.training.all_ranks import of_all_ranks
from lightning_sm.training.callbacks.failing_rank import FailingRank, needing_all_ranks
from lightning_sm.training.callbacks.local_position import RANDOM_STATES_KEY, LoaderOrders, LocalPosition
from lightning_sm.training.callbacks.mid_epoch import MID_EPOCH_KEY, MidEpoch
from lightning_sm.training.callbacks.spot_checkpoint import (
    STOP_SIGNALS,
    SpotCheckpoint,
    TrainingInterrupted,
    num_prefetched,
)
from lightning_sm.training.checkpoints.host_copy import first_values
from lightning_sm.training.checkpoints.periodic_states import PeriodicStates
from lightning_sm.training.checkpoints.restart_files import RestartFiles

logger = logging.getLogger(__name__)

_CHECKPOINT_KEY = "lightning_sm.restart_state"
# In a state whose random numbers, buffers and values of the epoch are later ones.
_APPROXIMATE_KEY = "lightning_sm.approximate"
# Of the time of the training, for what a step's start records.
_MAX_SHARE = 0.01
# Buffers that are larger in all are not kept.
_MAX_BUFFER_BYTES = 64_000_000


class KeepLastStep(UnlistedCallback):
    """A callback that lets a restart within the job resume at the step at which a rank has failed.

    When a rank fails, the others get an exception in their next exchange with it, before their optimizers step. Their
    weights and optimizers are those of the last step, so one rank of each host writes a checkpoint of it, without any
    other rank. Progress, random states, buffers and the values of the epoch, which the failed step has changed, are
    those of its start. Each rank also keeps its own in memory, where a restart finds them if the rank was killed.

    Where no rank gets an exception in time (NCCL; all ranks are killed at once; manual optimization), a restart resumes
    from the last of the states that the ranks keep in memory every so many steps, see ``PeriodicStates``.

    A state from which the job has resumed without making a step is not used again: the next restart resumes from an
    earlier state or checkpoint.

    It must be the first callback: others may change something at the start of a batch. ``SageMakerCLI`` and
    ``SageMakerTrainer`` add it to every job. It is active if the job may restart and each rank has the complete model.

    Attributes:
        is_approximate: Whether the fit has resumed with random numbers, buffers or values of the epoch that are not
            those of the step at which it resumed, or not this rank's own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_approximate = False
        self._files: RestartFiles | None = None
        self._states: PeriodicStates | None = None
        self._is_exact = False
        self._start: _StepStart | None = None
        self._resumed_step: int | None = None
        self._loaded_buffers: dict[str, torch.Tensor] = {}
        self._began_at = 0.0
        self._spent_s = 0.0
        self._loader_states: deque[list[dict[str, Any]]] = deque(maxlen=3)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget an earlier fit."""
        self._files = self._states = self._start = self._resumed_step = None
        self._loaded_buffers = {}
        self.is_approximate = False

    def _open_files(self, trainer: Trainer) -> RestartFiles | None:
        folder, job = RESTART_DIR.read(os.environ), SageMakerJob.from_environment()
        if job is None or folder is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return None
        fit = _one_of(trainer, SpotCheckpoint).fit_name
        return RestartFiles(folder, job.checkpoint_dir, fit, trainer.global_rank)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Give each rank what it knew itself before the step that failed; a collective call.

        It must come before the callbacks that take their part of the checkpoint.
        """
        step = checkpoint.get(_CHECKPOINT_KEY)
        files = self._open_files(trainer)
        if step is None or files is None:
            return
        self._resumed_step = step
        self.is_approximate = checkpoint.get(_APPROXIMATE_KEY, False)
        if trainer.local_rank == 0:
            files.note_tried(step)
        states, epoch = checkpoint[RANDOM_STATES_KEY], checkpoint[MID_EPOCH_KEY]
        if len(states["ranks"]) == trainer.world_size:
            return
        own: _RankPart | None = files.part(step)
        parts = of_all_ranks(own)
        (state,), (collected,) = states["ranks"], epoch["ranks"]
        states["ranks"] = [state if one is None else one.orders.saved() for one in parts]
        epoch["ranks"] = [collected if one is None else {**collected, **one.of_epoch()} for one in parts]
        main = parts[0]
        if main is not None:
            self._loaded_buffers = main.buffers
        missing = [rank for rank, one in enumerate(parts) if one is None]
        self.is_approximate |= bool(missing)
        if missing and trainer.is_global_zero:
            logger.warning(
                "The random numbers and the values of the epoch so far of rank %s are lost: it goes on with those of "
                "another rank.",
                ", ".join(map(str, missing)),
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the buffers of a restart in place, and find out whether the ranks can save alone.

        By now, no callback loads any more: some load weights and buffers of the rank that has saved.
        """
        self._restore_loaded_buffers(trainer)
        self._loader_states.clear()
        self._began_at, self._spent_s = time.monotonic(), 0.0
        self._files = self._open_files(trainer)
        part = needing_all_ranks(trainer.strategy)
        if self._files is not None and part is not None:
            self._files = None
            if trainer.is_global_zero:
                logger.info(
                    "A restart within the job resumes from the latest checkpoint: of %s, no rank has all. No states of "
                    "later steps are kept.",
                    type(part).__name__,
                )
        self._is_exact = self._files is not None and pl_module.automatic_optimization
        self._states = None
        if self._files is not None:
            if trainer.local_rank == 0:
                self._files.begin()
            self._states = PeriodicStates(trainer, self._files)

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Record what the step is about to change besides weights and optimizers."""
        if self._files is None or batch_idx % trainer.accumulate_grad_batches:
            return
        self._start = None
        step = trainer.global_step
        if self._resumed_step is not None and step != self._resumed_step:
            self._resumed_step = None
            if trainer.local_rank == 0:
                self._files.forget_tried()
        loader_states = self._states_of_loaders(trainer, batch_idx)
        if loader_states is None or step == 0 or (batch_idx == 0 and trainer.current_epoch == 0):
            return
        if self._is_exact:
            began = time.thread_time()  # other processes that compute meanwhile are no cost of this
            self._start = self._started(self._files, trainer, loader_states, batch_idx)
            self._spent_s += time.thread_time() - began
        if self._states is not None:
            self._states.on_step_start(trainer, partial(_checkpoint_of, trainer, loader_states, batch_idx))

    def _states_of_loaders(self, trainer: Any, batch_idx: int) -> list[dict[str, Any]] | None:
        """Return the states of stateful loaders before the step; None if they are unknown."""
        if batch_idx == 0 or not any(trainer.fit_loop._combined_loader._state_dicts()):
            return []
        if len(self._loader_states) <= num_prefetched(trainer):
            return None  # the first step of an attempt
        return self._loader_states[-1 - num_prefetched(trainer)]

    def _started(
        self, files: RestartFiles, trainer: Any, loader_states: list[dict[str, Any]], batch_idx: int
    ) -> _StepStart | None:
        progress = [(one, one.state_dict()) for one in _progress_of(trainer)]
        start = _StepStart(trainer.global_step, progress, loader_states, batch_idx)
        if self._spent_s > _MAX_SHARE * (time.monotonic() - self._began_at):
            return start
        position = _one_of(trainer, LocalPosition).position(trainer)
        epoch = _one_of(trainer, MidEpoch)
        if position is None or epoch.random_at_start is None:
            return None
        model = trainer.lightning_module
        start.part = _RankPart(position, epoch.random_at_start, epoch.collected(trainer), _kept_buffers(trainer))
        start.fingerprint = first_values(model.parameters())
        try:
            files.write_part(trainer.global_step, start.part.for_rank(trainer.global_rank))
        except OSError as error:
            logger.warning("A restart within the job loses the last step: %s.", error)
            self._is_exact = False
            return None
        return start

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Note that the weights are about to change."""
        self._start = None
        if self._states is not None:
            self._states.before_optimizer_step()

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, *_: Any) -> None:
        """Record the states of stateful loaders."""
        if self._files is not None:
            self._loader_states.append(trainer.fit_loop._combined_loader._state_dicts())

    def _restore_loaded_buffers(self, trainer: Trainer) -> None:
        loaded, self._loaded_buffers = self._loaded_buffers, {}
        _restore_buffers(trainer, loaded)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove all files of the fit."""
        self._restore_loaded_buffers(trainer)  # of a fit that has not trained
        if self._files is not None and self._states is not None:
            self._states.stop()
            if trainer.local_rank == 0:
                self._files.remove_states()
            self._files.close()
            self._files = self._states = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write the state of the last step, if the failed one has not changed it and no rank of this host has."""
        with _signals_held():
            # The traceback comes first, and none of the signals that follow a failure in between.
            _one_of(trainer, FailingRank).on_exception(trainer, pl_module, exception)
            files, start = self._files, self._start
            self._files = self._states = self._start = None
            if files is not None and start is not None and _is_failure(exception):
                self._save(trainer, files, start)

    def _save(self, trainer: Trainer, files: RestartFiles, start: _StepStart) -> None:
        if start.step == self._resumed_step:
            _say(f"Step {start.step + 1} fails again: the next restart resumes from an earlier state or checkpoint.")
        elif not start.is_unchanged(trainer.lightning_module):
            _say(f"Step {start.step} is not kept for a restart: the next one has changed weights before the optimizer.")
        elif files.claim(start.step):
            try:
                path = files.write(_checkpoint_before(trainer, start), start.step)
            except Exception as error:  # noqa: BLE001 - hooks of the user's run; the failure must be what is seen
                _say(f"Step {start.step} is not kept for a restart: {error}.")
            else:
                _say(f"Rank {trainer.global_rank} has saved step {start.step} in {path}, for a restart.")


@dataclass(frozen=True)
class _RankPart:
    """What a rank alone knows between two steps.

    Attributes:
        orders: The random states of its loaders and of the process.
        random: The random state with which the epoch has started.
        collected: What it has collected in the epoch.
        buffers: The buffers of the model and of the modules that callbacks hold, by name.
    """

    orders: LoaderOrders
    random: RandomState
    collected: dict[str, Any]
    buffers: dict[str, torch.Tensor]

    def for_rank(self, rank: int) -> _RankPart:
        """Return what a rank keeps in memory: the buffers of rank 0 count, as in any checkpoint."""
        is_kept = rank == 0 and all(one.device.type == "cpu" for one in self.buffers.values())
        return self if is_kept else _RankPart(self.orders, self.random, self.collected, {})

    def of_epoch(self) -> dict[str, Any]:
        """Return what ``MidEpoch`` saves of it."""
        return {"random": self.random.saved(), **self.collected}


@dataclass
class _StepStart:
    """The start of a step.

    Attributes:
        step: The number of steps before it.
        progress: The counts of the Trainer's loops, and their state.
        loader_states: The states of stateful loaders.
        batch_idx: The batches of the epoch before it.
        part: What its forward pass changes; None where recording that would take too much of the time.
        fingerprint: A value of each weight.
    """

    step: int
    progress: list[tuple[Any, dict[str, Any]]]
    loader_states: list[dict[str, Any]]
    batch_idx: int
    part: _RankPart | None = None
    fingerprint: list[torch.Tensor] | None = None

    def is_unchanged(self, model: LightningModule) -> bool:
        """Return whether the weights are those of the start: a training_step may change some, such as a teacher's."""
        if self.fingerprint is None:
            return all(one.requires_grad for one in model.parameters())
        return all(map(torch.equal, self.fingerprint, first_values(model.parameters())))


def _checkpoint_of(trainer: Any, loader_states: list[dict[str, Any]], batch_idx: int) -> dict[str, Any]:
    """Return the checkpoint of the state between two steps; a collective call, except on a rank that has failed."""
    spot = _one_of(trainer, SpotCheckpoint)
    checkpoint: dict[str, Any] = spot.dump_between_steps(trainer, loader_states, is_epoch_start=batch_idx == 0)
    checkpoint[_CHECKPOINT_KEY] = trainer.global_step
    return checkpoint


def _checkpoint_before(trainer: Any, start: _StepStart) -> dict[str, Any]:
    """Return the checkpoint of the start of a step that has failed."""
    for progress, state in start.progress:
        progress.load_state_dict(state)
    if start.part is not None:
        _restore_buffers(trainer, start.part.buffers)
    checkpoint = _checkpoint_of(trainer, start.loader_states, start.batch_idx)
    if start.part is None:
        checkpoint[_APPROXIMATE_KEY] = True
        _say(
            "Steps are too short to record what each of them begins with: random numbers, buffers and values of the "
            "epoch are those after the forward pass of the step that failed."
        )
    else:
        checkpoint[RANDOM_STATES_KEY]["ranks"] = [start.part.orders.saved()]
        checkpoint[MID_EPOCH_KEY]["ranks"][0].update(start.part.of_epoch())
    return checkpoint


def _progress_of(trainer: Any) -> list[Any]:
    loop = trainer.fit_loop.epoch_loop
    return [
        *(loop.batch_progress, loop.scheduler_progress, loop.automatic_optimization.optim_progress),
        loop.val_loop.batch_progress,
    ]


def _buffers(trainer: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the buffers of the model, and those of the modules that callbacks hold (an average of the weights).

    Names of the latter begin with the callback, and have spaces, which no name in a module has.
    """
    model = trainer.lightning_module
    held: dict[str, torch.Tensor] = {}
    for number, callback in enumerate(trainer.callbacks):
        for name, value in vars(callback).items():
            if isinstance(value, torch.nn.Module) and value is not model:
                prefix = f"{type(callback).__name__} (callback {number}): {name}."
                held |= {f"{prefix}{inner}": one for inner, one in value.named_buffers()}
    return dict(model.named_buffers()), held


def _kept_buffers(trainer: Any) -> dict[str, torch.Tensor]:
    """Copy the buffers, the model's first, as far as they are not too large for a copy in each step."""
    own, held = _buffers(trainer)
    kept = next(
        (some for some in (own | held, own) if sum(one.nbytes for one in some.values()) <= _MAX_BUFFER_BYTES), {}
    )
    return {name: one.detach().clone() for name, one in kept.items()}


def _restore_buffers(trainer: Any, kept: dict[str, torch.Tensor]) -> None:
    own, held = _buffers(trainer)
    buffers = own | held
    with torch.no_grad():
        for name, one in kept.items():
            if name in buffers and buffers[name].shape == one.shape:
                buffers[name].copy_(one)
            else:
                logger.warning("The buffer %s of rank 0 is not restored: there is none of its shape now.", name)


def _is_failure(exception: BaseException) -> bool:
    """Return whether an exception is a failure, or the end of this rank because another one has failed."""
    if isinstance(exception, TrainingInterrupted):
        process = announce()
        return process is not None and process.are_peers_gone()
    return isinstance(exception, (Exception, SystemExit))


def _say(text: str) -> None:
    """Write a line of the log; not to stderr, of which the launcher leaves out what follows the traceback."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _one_of(trainer: Any, kind: type[Any]) -> Any:
    return next(one for one in trainer.callbacks if isinstance(one, kind))


@contextmanager
def _signals_held() -> Iterator[None]:
    """Hold the signals with which the launcher ends this process, until the block is done or SIGKILL follows."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []

    def hold(signum: int, _frame: FrameType | None) -> None:
        held.append(signum)

    handlers = {signum: signal.signal(signum, hold) for signum in STOP_SIGNALS}
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        for number in held[:1]:
            os.kill(os.getpid(), number)
