"""SpotCheckpoint: an interrupted training leaves with a checkpoint from which it goes on exactly there."""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
import signal
import threading
import time
from collections import deque
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset

from lightning_sm._lightning import Checkpoint, LightningModule, Trainer, WeightAveraging
from lightning_sm.errors import CheckpointError
from lightning_sm.job.process_launcher import Launch, Launcher
from lightning_sm.job.stopping import GENTLE_SIGNAL, INTERRUPTED_EXIT_CODE
from lightning_sm.training.callbacks.pace import Pace
from lightning_sm.training.checkpoints.newest import JOB_KEY

logger = logging.getLogger(__name__)

# The launcher's gentle signal first; SIGTERM where there is none (torchrun, mpirun, the stock toolkit).
STOP_SIGNALS = (GENTLE_SIGNAL, signal.SIGTERM)
_NAME = re.compile(r"interrupted-epoch=(\d+)-step=(\d+)\.ckpt")


class TrainingInterrupted(SystemExit):  # it is no error: the interpreter leaves with its exit code
    """Raised in all ranks at the same step, after the checkpoint was saved."""


class _Moment(Enum):
    """When the checkpoint is saved that is being saved."""

    ANY = "whenever another callback saves one"
    EPOCH_START = "between two epochs, when the next one has its first batch"
    STEP_START = "between two steps, when the next one has its batch"
    VALIDATION = "within a validation"


class SpotCheckpoint(Checkpoint):
    """Save a checkpoint and leave when the job is interrupted or stopped: SIGUSR2 or SIGTERM to any rank.

    The signal handler only takes a note. About every second the ranks add up their notes (a SUM, which every backend
    has), so that all save at the same step and leave together, with exit code 143. A collective inside the handler, as
    in Lightning itself, deadlocks whenever the ranks get the signal at different moments (Lightning issue 20806).

    The checkpoint says "step n is done": where a validation was interrupted, the resumed run repeats it from its
    beginning, on the weights that it was interrupted with. Within an accumulation of gradients nothing is saved, as the
    gradients would be lost; it goes on to the next step.

    ``SageMakerCLI`` puts it into every job; without a checkpoint directory, the checkpoint goes beside the logs.

    Args:
        dirpath: Folder for the checkpoint.
        check_every_s: Seconds between two exchanges of notes, as far as steps allow.
        keep: Checkpoints of this callback to keep; at least two, as the newest may not be uploaded completely.
        job_facts: Put into every checkpoint of the Trainer, so that a later job knows whose it is.
    """

    def __init__(
        self,
        dirpath: str | Path,
        check_every_s: float = 1.0,
        keep: int = 2,
        job_facts: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._dirpath = Path(dirpath)
        self._check_every_s = check_every_s
        self._keep = max(2, keep)
        self._job_facts = dict(job_facts or {})
        self._noted: int | None = None
        self._noted_at = 0.0
        self._owner = os.getpid()
        self._leaves_at_once = False
        self._paces: dict[_Moment, Pace] = {}
        self._is_even_validation = False
        self._is_told = False
        self._loader_states: deque[list[dict[str, Any]]] = deque(maxlen=2)
        self._moment = _Moment.ANY
        self._exit_code = INTERRUPTED_EXIT_CODE

    # Signals

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take over the signals; they stay with this callback after the run, whose end a late one must not disturb."""
        self._owner = os.getpid()
        self._leaves_at_once = stage != "fit"
        # Lightning kills rank 0 of a host when another local rank of it leaves with another code than 0.
        is_child = Launch.detect(os.environ, os.getppid()).launcher is Launcher.LIGHTNING
        self._exit_code = 0 if is_child else INTERRUPTED_EXIT_CODE
        if threading.current_thread() is not threading.main_thread():
            logger.warning("SpotCheckpoint: the Trainer runs in a thread, where no signal can be handled.")
            return
        for signum in STOP_SIGNALS:
            signal.signal(signum, self._note)
        # Lightning puts its own handler over ours, with the collective in it: it asks for this name when it does.
        trainer._signal_connector._sigterm_notifier_fn = self._note  # type: ignore[method-assign,assignment]

    def _note(self, signum: int, _frame: object) -> None:
        if os.getpid() != self._owner:
            # A child that was forked with this handler. Left to it, Process.terminate() would have no effect, and the
            # interpreter would wait for ever for a daemon of multiprocessing.
            if signum == signal.SIGTERM:
                signal.signal(signum, signal.SIG_DFL)
                os.kill(os.getpid(), signum)
            return
        if self._leaves_at_once:
            raise TrainingInterrupted(self._exit_code)
        if self._noted is None:
            self._noted, self._noted_at = signum, time.monotonic()
            # Not a logger: the signal may have come while one holds its lock.
            os.write(2, f"{signal.Signals(signum).name}: the training will save a checkpoint and leave.\n".encode())

    # Moments at which the training may leave

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that all ranks go on from the same step, and begin the epoch of which nothing is done yet."""
        place = (trainer.current_epoch, trainer.global_step)
        main = trainer.strategy.broadcast(place)
        if self._sum(trainer, float(place != main)) > 0:
            raise CheckpointError(
                f"Rank {trainer.global_rank} goes on from epoch {place[0]}, step {place[1]}, rank 0 from epoch "
                f"{main[0]}, step {main[1]}. At least one host has other checkpoints in {self._dirpath} than rank 0: "
                "name the one to use with --ckpt_path."
            )
        epoch_loop = trainer.fit_loop.epoch_loop
        if trainer.fit_loop.restarted_mid_epoch and epoch_loop.batch_progress.current.ready == 0:
            epoch_loop.restarting = False  # else Lightning goes on as behind a step: with a validation, or its end

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Leave between two steps; here and not at a step's end, behind which a validation may be due.

        In epochs of a single step, that is between two epochs.
        """
        if batch_idx == 0:
            self._loader_states.clear()
            if trainer.current_epoch > 0 and trainer.num_training_batches <= trainer.accumulate_grad_batches:
                self._tick(trainer, _Moment.EPOCH_START)
        elif batch_idx % trainer.accumulate_grad_batches == 0:
            self._tick(trainer, _Moment.STEP_START)

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, *_: Any) -> None:
        """Note where loaders stand that keep a state, once it is known that the training leaves."""
        if self._is_told:
            self._loader_states.append(trainer.fit_loop._combined_loader._state_dicts())

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End a resumed epoch like any other.

        It is no moment to leave: Lightning steps a ReduceLROnPlateau only after this hook, and never again; with
        max_steps, it would end the epoch a second time when it goes on from here.
        """
        if trainer.fit_loop.restarted_mid_epoch:
            # The epoch is resumed, and that is over now: with the flag, Lightning does not step a ReduceLROnPlateau.
            trainer.fit_loop._restarting = False

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find out whether all ranks have the same number of batches, so that they can meet within the validation."""
        if self._leaves_at_once:
            return
        self._paces.pop(_Moment.VALIDATION, None)
        self._is_even_validation = trainer.world_size == 1 or self._has_even_validation(trainer)

    def _has_even_validation(self, trainer: Trainer) -> bool:
        lengths = _validation_lengths(trainer)
        num_batches = [min(pair) for pair in zip(lengths, trainer.num_val_batches, strict=True)]
        is_other = num_batches != trainer.strategy.broadcast(num_batches)
        return not self._sum(trainer, float(is_other or math.inf in lengths))

    def on_validation_batch_end(  # noqa: PLR0917  # Lightning's hook
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Leave within a validation, which the resumed run repeats."""
        if not self._is_even_validation or self._leaves_at_once:
            return
        num_accumulated = trainer.fit_loop.epoch_loop.batch_progress.current.ready % trainer.accumulate_grad_batches
        is_step_done = num_accumulated == 0 or trainer.is_last_batch
        # With max_steps, a run that goes on from the last step ends at once, without the rest of the validation.
        is_last_step = trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps
        if trainer.sanity_checking or (is_step_done and not is_last_step):
            self._tick(trainer, _Moment.VALIDATION)

    # The exchange of notes

    def _tick(self, trainer: Trainer, moment: _Moment) -> None:
        if trainer.world_size == 1 or self._pace(trainer, moment).is_due():
            self._ask(trainer, moment)

    def _pace(self, trainer: Trainer, moment: _Moment) -> Pace:
        """Steps and batches of a validation take different times."""
        return self._paces.setdefault(moment, Pace(self._check_every_s, trainer.world_size))

    def _ask(self, trainer: Trainer, moment: _Moment) -> None:
        """Leave if any rank was told to stop."""
        if trainer.world_size == 1:
            num_told = float(self._noted is not None)
        else:
            pace = self._pace(trainer, moment)
            question = [float(self._noted is not None), pace.tick_ms(time.monotonic())]
            num_told, sum_ms = self._reduced(trainer, question)
            pace.set_from(sum_ms)
        self._is_told = num_told > 0
        # At the start of a step, a loader that keeps a state has given one more batch: its state is taken before that.
        if self._is_told and (moment is not _Moment.STEP_START or self._has_loader_states(trainer)):
            self._moment = moment
            self._leave(trainer)

    def _has_loader_states(self, trainer: Any) -> bool:
        has_none = not any(trainer.fit_loop._combined_loader._state_dicts())
        return has_none or len(self._loader_states) > _num_fetched_ahead(trainer)

    def _sum(self, trainer: Trainer, value: float) -> float:
        return self._reduced(trainer, [value])[0]

    @staticmethod
    def _reduced(trainer: Trainer, values: list[float]) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float32, device=trainer.strategy.root_device)
        reduced: list[float] = trainer.strategy.reduce(tensor, reduce_op="sum").tolist()
        return reduced

    def _leave(self, trainer: Trainer) -> None:
        if trainer.sanity_checking:
            logger.info("Interrupted before the first step: there is nothing new to save.")
            raise TrainingInterrupted(self._exit_code)
        if self._moment is _Moment.VALIDATION:
            _swap_averaged_weights_back(trainer)
        path = self._dirpath / f"interrupted-epoch={trainer.current_epoch}-step={trainer.global_step}.ckpt"
        trainer.save_checkpoint(path)
        # AsyncCheckpointIO writes in a thread, which this waits for; it raises what went wrong there, too.
        trainer.strategy.checkpoint_io.teardown()
        trainer.strategy.barrier("interrupted")  # only rank 0 may have waited
        if trainer.is_global_zero or self._noted is not None:
            took = f", {time.monotonic() - self._noted_at:.1f} s after the signal" if self._noted is not None else ""
            logger.info("Interrupted: step %d is saved in %s%s.", trainer.global_step, path, took)
        if trainer.is_global_zero:
            self._remove_older_than((trainer.global_step, trainer.current_epoch))
        raise TrainingInterrupted(self._exit_code)

    def _remove_older_than(self, saved: tuple[int, int]) -> None:
        """Keep the furthest of those before it; times of files are, after a restart, those of their download.

        What is further than it was left by another job, or by this one before it was rolled back.
        """
        places = [(_place_of(path), path) for path in self._dirpath.glob("interrupted-*.ckpt")]
        older = sorted((place, path) for place, path in places if place is not None and place < saved)
        for _, path in older[: 1 - self._keep]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    # What a checkpoint says

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Note whose checkpoint it is, and what of the interrupted epoch is done."""
        if self._job_facts:
            checkpoint[JOB_KEY] = self._job_facts
        if self._moment is _Moment.EPOCH_START:
            _as_at_epoch_start(checkpoint["loops"]["fit_loop"])
        elif self._moment is _Moment.STEP_START:
            _as_at_step_end(checkpoint["loops"]["fit_loop"])
            if "combined_loader" in (state := checkpoint["loops"]["fit_loop"]["state_dict"]) and self._loader_states:
                state["combined_loader"] = self._loader_states[-1 - _num_fetched_ahead(trainer)]
        elif self._moment is _Moment.VALIDATION:
            _as_at_validation_start(checkpoint["loops"]["fit_loop"])


def _swap_averaged_weights_back(trainer: Trainer) -> None:
    """Undo what WeightAveraging does for the time of a validation; it would save either weights as the other."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, WeightAveraging):
            callback.on_validation_epoch_end(trainer, trainer.lightning_module)


def _place_of(path: Path) -> tuple[int, int] | None:
    """Step and epoch: the last step of an epoch is also that at the beginning of the next."""
    match = _NAME.fullmatch(path.name)
    return (int(match[2]), int(match[1])) if match else None


def _validation_lengths(trainer: Trainer) -> list[float]:
    """Batches of each loader; inf for a stream, which may end anywhere, even before the length that it states."""
    combined = trainer.fit_loop.epoch_loop.val_loop._combined_loader
    return [_length_of(loader) for loader in (combined.flattened if combined is not None else ())]


def _length_of(loader: Any) -> float:
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        return math.inf
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # those which Lightning takes for "no length", too
        return math.inf


def _num_fetched_ahead(trainer: Any) -> int:
    """Batches that Lightning keeps in order to know the last one; it does so where the length is unknown."""
    fetcher = trainer.fit_loop._data_fetcher
    return getattr(fetcher, "prefetch_batches", 0) if fetcher.length is None else 0


def _as_at_epoch_start(loop: dict[str, Any]) -> None:
    """Turn the progress at the start of an epoch's first step into that before its first batch."""
    progress = loop["epoch_loop.batch_progress"]
    for count in (progress["total"], progress["current"]):
        count["ready"] -= 1
    progress["is_last_batch"] = False
    loop["state_dict"].pop("combined_loader", None)  # it has given that batch; without a state, a loader begins anew


def _as_at_step_end(loop: dict[str, Any]) -> None:
    """Turn the progress at the start of a step into that at the end of the one before.

    Lightning knows how to go on from there without validating, stepping schedulers or counting twice; the start of a
    step is no moment at which it expects a checkpoint.
    """
    progress = loop["epoch_loop.batch_progress"]
    for count in (progress["total"], progress["current"]):
        count["ready"] -= 1
        count["completed"] -= 1
    progress["is_last_batch"] = False  # the next one may be
    loop["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1


def _as_at_validation_start(loop: dict[str, Any]) -> None:
    """Turn the progress within a validation into that of one whose first batch is under way: it is repeated."""
    progress = loop["epoch_loop.val_loop.batch_progress"]
    total, current = progress["total"], progress["current"]
    before = total["completed"] - current["completed"]
    for count, done in ((total, before), (current, 0)):
        count.update(ready=done + 1, started=done + 1, processed=done, completed=done)
    progress["is_last_batch"] = False
