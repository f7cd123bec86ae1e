"""States that the ranks keep in memory every so many steps, from which a restart within the job resumes."""

from __future__ import annotations

import importlib
import itertools
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch

from lightning_sm._text import size
from lightning_sm.errors import CheckpointError
from lightning_sm.training.all_ranks import of_all_ranks
from lightning_sm.training.checkpoints.host_copy import (
    CopiedCheckpoint,
    HostCopy,
    PickledCheckpoint,
    num_bytes,
    tensors_of,
)
from lightning_sm.training.checkpoints.main_state import main_checkpoint
from lightning_sm.training.checkpoints.restart_files import RestartFiles
from lightning_sm.training.checkpoints.state_schedule import StateCosts, StateSchedule

logger = logging.getLogger(__name__)

# Of the job's hosts, so that one is left if the memory of the other is damaged.
_NUM_HOSTS = 2
# Expected of the first state, before any is measured: to copy it takes less.
_BYTES_PER_S = 1e9
_FIRST_S = 0.01


class PeriodicStates:
    """The states of one fit, for a strategy of which each rank has the whole model.

    All ranks make the checkpoint of a state together, as any other one: it has the random states and metrics of all of
    them. One rank on each of the first two hosts copies rank 0's, and a thread writes the copy.

    Args:
        trainer: The Trainer, whose training begins.
        files: Where the states are written.
    """

    def __init__(self, trainer: Any, files: RestartFiles) -> None:
        self._files = files
        self._schedule = StateSchedule()
        self._is_keeper = trainer.local_rank == 0 and trainer.node_rank < _NUM_HOSTS
        self._is_sent = trainer.num_nodes > 1
        self._device: torch.device = trainer.strategy.root_device
        self._began_at = time.monotonic()
        self._spent_s = 0.0
        self._last_s = 0.0
        self._exchange_s = 0.0
        self._num_bytes = 0
        self._copy = HostCopy(self._device)
        self._copying: tuple[CopiedCheckpoint, int] | None = None
        self._writer = ThreadPoolExecutor(1, "lightning_sm-restart-states")
        self._writing: Future[float] | None = None
        self._may_follow = trainer.lightning_module.automatic_optimization
        # Lightning imports it for its first checkpoint, which takes as long as many states.
        with suppress(ImportError):
            importlib.import_module("omegaconf")

    def on_step_start(self, trainer: Any, dump: Callable[[], dict[str, Any]]) -> None:
        """Keep the state between two steps, if it is time; a collective call.

        Args:
            trainer: The Trainer.
            dump: Returns the checkpoint of this moment; a collective call, too.
        """
        if not self._schedule.tick():
            return
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # what it still computes is no cost of a state
        self.before_optimizer_step()  # of a step without any
        began = time.perf_counter()
        of_ranks = of_all_ranks(self._costs(trainer))
        self._exchange_s = time.perf_counter() - began
        self._spent_s += min(one.exchange_s for one in of_ranks)
        is_due = self._schedule.plan(of_ranks)
        if is_due:
            self._last_s = 0.0
            began = time.perf_counter()
            self._keep(trainer, dump())
            self._charge(time.perf_counter() - began)

    def before_optimizer_step(self) -> None:
        """Wait for a copy, before an optimizer changes what is copied."""
        if self._copying is None:
            return
        if not self._copy.is_intact():
            logger.info(
                "Weights have changed since the start of the step, and not by an optimizer: from now on, the GPU waits "
                "while a state for a restart within the job is copied."
            )
            self._may_follow = False
            self._copying = None
        self._finish_copy()

    def stop(self) -> None:
        """Wait until the last state has been written, and drop one that is still copied."""
        self._copying = None
        self._writer.shutdown(wait=True)

    def _costs(self, trainer: Any) -> StateCosts:
        is_writing = self._writing is not None and not self._writing.done()
        self._num_bytes = self._num_bytes or _num_state_bytes(trainer)
        if self._is_keeper and not is_writing:
            self._take_result()
            if not self._last_s:  # else the thread looks, once it has removed the older of two states
                self._check_room()
        next_s = self._last_s or _FIRST_S + (self._num_bytes / _BYTES_PER_S if self._is_keeper else 0.0)
        elapsed_s = time.monotonic() - self._began_at
        return StateCosts(
            elapsed_s,
            self._spent_s,
            next_s,
            can_keep=self._is_keeper,
            is_writing=is_writing,
            exchange_s=self._exchange_s,
        )

    def _take_result(self) -> None:
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            seconds = writing.result()
        except Exception as error:  # noqa: BLE001 - as above; and torch.save reports a full disk as a RuntimeError
            self._give_up(error)
        else:
            if self._device.type == "cpu":  # the thread has taken the time from the training
                self._charge(seconds)

    def _check_room(self) -> None:
        try:
            self._files.check_room(self._num_bytes)
        except CheckpointError as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._is_keeper = False
        logger.warning(
            "This host keeps no further states in memory for a restart within the job: %s.", str(error) or repr(error)
        )

    def _keep(self, trainer: Any, checkpoint: dict[str, Any]) -> None:
        pickled: PickledCheckpoint | None = None
        if self._is_keeper or (trainer.global_rank == 0 and self._is_sent):
            try:
                pickled = PickledCheckpoint.of(checkpoint)
            except Exception as error:  # noqa: BLE001 - the user's objects may raise anything when they are pickled
                self._give_up(error)
        try:
            if self._is_sent:
                pickled = main_checkpoint(trainer, pickled)
            if pickled is None or not self._is_keeper:
                return
            copied = self._copy.take(pickled, _changed_by_optimizers(trainer) if self._may_follow else frozenset())
        except CheckpointError as error:
            self._give_up(error)
            return
        self._num_bytes = copied.num_bytes
        self._copying = copied, trainer.global_step
        if self._device.type == "cpu":
            self._finish_copy()

    def _finish_copy(self) -> None:
        copying, self._copying = self._copying, None
        if copying is not None:
            self._charge(self._copy.wait())
            self._writing = self._writer.submit(self._write, *copying)

    def _write(self, copied: CopiedCheckpoint, step: int) -> float:
        """Write a copy; return the seconds of computing that this has taken."""
        began = time.thread_time()
        path = self._files.keep(copied.load(), copied.num_bytes, step)
        logger.debug("Kept step %d in %s (%s).", step, path, size(copied.num_bytes))
        return time.thread_time() - began

    def _charge(self, seconds: float) -> None:
        self._spent_s += seconds
        self._last_s += seconds


def _num_state_bytes(trainer: Any) -> int:
    """Return roughly how many bytes a checkpoint has."""
    model = trainer.lightning_module
    states = (tensors_of(dict(optimizer.state)) for optimizer in trainer.optimizers)
    return num_bytes([*model.parameters(), *model.buffers(), *itertools.chain(*states)])


def _changed_by_optimizers(trainer: Any) -> frozenset[int]:
    """Return the addresses of the tensors that only the optimizers change."""
    weights = (one for optimizer in trainer.optimizers for group in optimizer.param_groups for one in group["params"])
    states = (one for optimizer in trainer.optimizers for one in tensors_of(dict(optimizer.state)))
    return frozenset(one.data_ptr() for one in (*weights, *states))
