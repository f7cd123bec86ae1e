"""SpotCheckpoint: save a checkpoint when training is interrupted, and resume from exactly there in the next attempt."""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import threading
import time
from collections import deque
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset

from lightning_sm._lightning import Checkpoint, LightningModule, MultiProcessingLauncher, Trainer, WeightAveraging
from lightning_sm.job.control_folder import GENTLE_SIGNAL, OwnProcess, announce
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.failure_file import report_failures
from lightning_sm.job.outcomes import INTERRUPTED_EXIT_CODE
from lightning_sm.job.rank_starter import RankStart, RankStarter
from lightning_sm.job.uploads import files_of
from lightning_sm.training.checkpoints.auto_resume import CheckpointLoader
from lightning_sm.training.checkpoints.find_newest import JOB_KEY, job_facts, optimizer_names
from lightning_sm.training.checkpoints.finder_results import save_searched
from lightning_sm.training.checkpoints.fits import Fit
from lightning_sm.training.checkpoints.sharded import object_stores, remove_folder
from lightning_sm.training.stop_flag_pace import Pace

logger = logging.getLogger(__name__)

# SIGUSR2 from our launcher; SIGTERM from launchers that send nothing else (torchrun, mpirun, the stock toolkit).
STOP_SIGNALS = (GENTLE_SIGNAL, signal.SIGTERM)
# Target time between two exchanges of flags, in seconds; longer if a step takes longer.
_CHECK_EVERY_S = 1.0
_NAME = re.compile(r"interrupted-epoch=(?P<epoch>\d+)-step=(?P<step>\d+)\.ckpt")


class TrainingInterrupted(SystemExit):  # not an error: the interpreter exits with the exception's code
    """The exception that all ranks raise at the same step, after the checkpoint has been saved."""


class _SavedMoment(Enum):
    """The moment at which a checkpoint is saved, which determines how its progress is corrected."""

    OTHER = "when another callback saves one"
    EPOCH_START = "between two epochs, after the next one has fetched its first batch"
    STEP_START = "between two steps, after the next one has fetched its batch"
    VALIDATION = "during a validation"


class _Run(Enum):
    """The kind of run that a stop signal interrupts; the value is the log message on what happens next."""

    TRAINING = "training will save a checkpoint and exit."
    ENDING = "training has ended, so there is no checkpoint to save. The script continues."
    NONE = "not training, so there is no checkpoint to save. The script continues until SIGTERM."
    EVALUATION = "the script exits."


class SpotCheckpoint(Checkpoint):
    """A callback that saves a checkpoint and exits when the job is interrupted or stopped (SIGUSR2 or SIGTERM).

    In a SageMaker job, every call of ``fit`` resumes from the latest valid checkpoint in the job's checkpoint directory
    (or in ``dirpath``, if the job has none), including periodic checkpoints. A checkpoint of this job takes precedence
    over ``ckpt_path``, and ``ckpt_path`` over a checkpoint of an earlier job with the same S3 address. If a script
    calls ``fit`` several times, each call resumes from the checkpoints of the same call in earlier attempts: a
    checkpoint records the script line that made its Trainer, and the number of the fit with that Trainer.

    It is enough to signal one rank. The signal handler only sets a flag. About every second, the ranks add up their
    flags (a SUM, which every backend supports), so that all ranks save at the same step and exit together, with code
    143 (or 0 if Lightning started them). A collective call inside the handler, as in Lightning itself, deadlocks
    whenever the signal reaches the ranks at different moments (Lightning issue 20806).

    The checkpoint always holds the state after a completed step. If a validation was interrupted, the resumed run
    repeats it from the start, with the same weights. With automatic optimization, training continues until the
    gradients of a step are complete.

    ``SageMakerCLI`` and ``SageMakerTrainer`` add this callback to every job. If the job has no checkpoint directory,
    the checkpoint is saved next to the logs.

    Args:
        dirpath: Folder for the checkpoint.

    Attributes:
        saved: The checkpoint of the interruption; None until all ranks have saved it.
    """

    def __init__(self, dirpath: str | Path) -> None:
        super().__init__()
        self._dirpath = Path(dirpath)
        self._job = SageMakerJob.from_environment()
        self._fit = Fit.before_first()
        self._owner = os.getpid()
        self._process: OwnProcess | None = None
        self._is_fit = True
        self._run = _Run.NONE
        self._exit_code = INTERRUPTED_EXIT_CODE
        self._is_worker = False
        self._signalled_at: float | None = None
        self.saved: Path | None = None
        self._is_stopping = False  # any rank was signalled; the same on all ranks
        # One pace per moment, because steps and validation batches differ in duration.
        self._paces: dict[_SavedMoment, Pace] = {}
        self._can_stop_in_validation = False
        self._loader_states: deque[list[dict[str, Any]]] = deque(maxlen=2)
        self._moment = _SavedMoment.OTHER

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Install signal handlers for good, so that a late signal does not disrupt the end of the run; resume a fit."""
        self._owner = os.getpid()
        self._is_fit = stage == "fit"
        self._run = _Run.TRAINING if self._is_fit else _Run.EVALUATION
        # Processes that Lightning started must exit with code 0. Otherwise, Lightning kills local rank 0, or the parent
        # of spawned workers (ddp_spawn) raises an error.
        self._is_worker = isinstance(trainer.strategy.launcher, MultiProcessingLauncher)
        is_child = self._is_worker or RankStart.detect(os.environ, os.getppid()).launcher is RankStarter.LIGHTNING
        self._exit_code = 0 if is_child else INTERRUPTED_EXIT_CODE
        self._handle_signals(trainer)
        if self._is_fit:
            self._resume(trainer)

    def _handle_signals(self, trainer: Trainer) -> None:
        if threading.current_thread() is not threading.main_thread():
            logger.warning("SpotCheckpoint is inactive: only the main thread handles signals. Run the Trainer there.")
            return
        for signum in STOP_SIGNALS:
            signal.signal(signum, self._on_signal)
        self._process = announce()
        # Lightning 2.6 broadcasts in every step whether its SIGTERM handler was called on rank 0. Skip the broadcast,
        # because our handler replaces Lightning's.
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
        # Lightning calls this method before our SIGTERM handler; Lightning's own version would make a collective call.
        trainer._signal_connector._sigterm_notifier_fn = self._on_signal  # type: ignore[method-assign,assignment]

    def _resume(self, trainer: Any) -> None:
        """Resume the fit that is starting from its latest checkpoint, if checkpoints survive between attempts."""
        self._fit = replace(self._fit, number=self._fit.number + 1)
        if self._job is None or trainer.fast_dev_run:
            return
        for address in object_stores(trainer):
            logger.warning(
                "The job does not resume from %s, the dirpath of a callback. Remove dirpath: checkpoints then go "
                "to the job's checkpoint folder, which SageMaker uploads.",
                address,
            )
        folder = self._job.checkpoint_dir or self._dirpath
        # Skip a host's output folder: it starts empty in each attempt, and its name differs between hosts.
        if not folder.is_relative_to(self._job.host_output_dir):
            CheckpointLoader.of(trainer, self._job).resume_from_latest(folder, self._fit)

    def _on_signal(self, signum: int, _frame: object) -> None:
        if os.getpid() != self._owner:
            # A forked child has inherited this handler. Restore the default action, or Process.terminate() would have
            # no effect on the child, and the interpreter would wait forever for multiprocessing's daemon processes.
            if signum == signal.SIGTERM:
                signal.signal(signum, signal.SIG_DFL)
                os.kill(os.getpid(), signum)
            return
        # Exit at once if another host has failed: this rank can no longer save, because its next collective call would
        # hang. Between runs, nothing reads the flag that this handler sets. So let the script continue after the first
        # signal, and exit at a later SIGTERM.
        is_repeated = signum == signal.SIGTERM and self._signalled_at is not None
        are_peers_gone = self._process is not None and self._process.are_peers_gone()
        if are_peers_gone or self._run is _Run.EVALUATION or (self._run is _Run.NONE and is_repeated):
            reporter = report_failures()
            if reporter is not None:  # this rank's failure may be the cause of the others'
                reporter.keep()
            raise TrainingInterrupted(self._exit_code)
        if self._signalled_at is None:
            self._signalled_at = time.monotonic()
            # Do not use a logger: the signal may arrive while the main thread holds the logger's lock.
            os.write(2, f"{signal.Signals(signum).name}: {self._run.value}\n".encode())

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make Lightning resume correctly from a checkpoint that was saved before an epoch's first batch."""
        epoch_loop = trainer.fit_loop.epoch_loop
        if trainer.fit_loop.restarted_mid_epoch and epoch_loop.batch_progress.current.ready == 0:
            epoch_loop.restarting = False  # otherwise, Lightning would validate or end the epoch, as after a step

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that the ranks can no longer stop, because no further step follows."""
        self._run = _Run.ENDING

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Note that the run is over, unless this process is exiting."""
        if not isinstance(exception, TrainingInterrupted):
            self._run = _Run.NONE

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Note that the run is over."""
        self._run = _Run.NONE

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """If signalled, stop between two steps: at the start of the second, as the first may end with a validation.

        If an epoch has only one step, stop between two epochs.
        """
        if batch_idx == 0:
            self._loader_states.clear()
            if trainer.current_epoch > 0 and trainer.num_training_batches <= trainer.accumulate_grad_batches:
                self._stop_if_signalled(trainer, _SavedMoment.EPOCH_START)
        elif batch_idx % trainer.accumulate_grad_batches == 0:
            self._stop_if_signalled(trainer, _SavedMoment.STEP_START)

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, *_: Any) -> None:
        """Record the states of stateful loaders once a stop is certain."""
        if self._is_stopping:
            self._loader_states.append(trainer.fit_loop._combined_loader._state_dicts())

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Clear ``_restarting``, so that Lightning steps ReduceLROnPlateau at the end of a resumed epoch.

        Training must not stop here. Lightning steps ReduceLROnPlateau only after this hook, and a resumed run would not
        make up for it; with max_steps, a resumed run would end the epoch twice.
        """
        if trainer.fit_loop.restarted_mid_epoch:
            trainer.fit_loop._restarting = False

    def on_validation_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Determine whether all ranks validate on the same number of batches, so that they can exchange flags."""
        if not self._is_fit:
            return
        self._paces.pop(_SavedMoment.VALIDATION, None)
        if trainer.world_size == 1:
            self._can_stop_in_validation = True
            return
        loaders = trainer.fit_loop.epoch_loop.val_loop._combined_loader.flattened
        # The length of a stream is not reliable, because the stream may end earlier.
        has_streams = any(isinstance(getattr(loader, "dataset", None), IterableDataset) for loader in loaders)
        num_batches = trainer.num_val_batches
        is_different = num_batches != trainer.strategy.broadcast(num_batches)
        (num_unsuited,) = self._sums(trainer, has_streams or is_different or math.inf in num_batches)
        self._can_stop_in_validation = num_unsuited == 0

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """If signalled, stop during a validation, which the resumed run then repeats."""
        if not self._can_stop_in_validation or not self._is_fit:
            return
        num_accumulated = trainer.fit_loop.epoch_loop.batch_progress.current.ready % trainer.accumulate_grad_batches
        is_step_done = num_accumulated == 0 or trainer.is_last_batch
        # Do not stop after the last of max_steps: a resumed run would end at once, without the rest of the validation.
        is_last_step = trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps
        if trainer.sanity_checking or (is_step_done and not is_last_step):
            self._stop_if_signalled(trainer, _SavedMoment.VALIDATION)

    def _stop_if_signalled(self, trainer: Any, moment: _SavedMoment) -> None:
        """Exchange flags if an exchange is due; if any rank was signalled, save a checkpoint and exit."""
        num_signalled = float(self._signalled_at is not None)
        if trainer.world_size > 1:
            pace = self._paces.setdefault(moment, Pace(_CHECK_EVERY_S, trainer.world_size))
            if not pace.tick():
                return
            num_signalled, sum_ms = self._sums(trainer, num_signalled, pace.ms_per_tick(time.monotonic()))
            pace.plan_next(sum_ms)
        self._is_stopping = num_signalled > 0
        if not self._is_stopping:
            return
        # At the start of a step, stateful loaders have already yielded the step's batch, but the checkpoint needs their
        # earlier states. Continue until these are recorded.
        needs_states = moment is _SavedMoment.STEP_START and any(trainer.fit_loop._combined_loader._state_dicts())
        if needs_states and len(self._loader_states) <= _num_prefetched(trainer):
            return
        if trainer.sanity_checking:
            logger.info("Interrupted before the first step, so there is nothing to save.")
            self._note_saved(trainer, [])
        else:
            self._save(trainer, moment)
        if self._is_worker:
            # Terminate the workers' parent process, which would wait for their results forever. It has no handlers, and
            # all of its state is saved. As the parent exits, it sends SIGINT to the workers, which ignore it because
            # they exit anyway.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            if trainer.local_rank == 0:
                os.kill(os.getppid(), signal.SIGTERM)
        raise TrainingInterrupted(self._exit_code)

    @staticmethod
    def _sums(trainer: Trainer, *values: float) -> list[float]:
        """Sum each value over all ranks; a collective call."""
        tensor = torch.tensor(values, dtype=torch.float32, device=trainer.strategy.root_device)
        # Do not use strategy.reduce: it adds a barrier, and PipelineParallelStrategy's sums over the replicas only.
        if trainer.world_size > 1:
            torch.distributed.all_reduce(tensor)
        sums: list[float] = tensor.tolist()
        return sums

    def _save(self, trainer: Trainer, moment: _SavedMoment) -> None:
        if moment is _SavedMoment.VALIDATION:
            # WeightAveraging has swapped in the averaged weights for the validation. Swap them out, or they would be
            # saved as the current weights.
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, WeightAveraging):
                    callback.on_validation_epoch_end(trainer, trainer.lightning_module)
        self._moment = moment
        path = self._dirpath / f"interrupted-epoch={trainer.current_epoch}-step={trainer.global_step}.ckpt"
        trainer.save_checkpoint(path)
        # Wait for the thread in which AsyncCheckpointIO writes; this raises the thread's exception.
        trainer.strategy.checkpoint_io.teardown()
        trainer.strategy.barrier("interrupted")  # otherwise, ranks that write nothing would exit too early
        self._note_saved(trainer, files_of(path))
        self.saved = path
        if self._signalled_at is not None:
            seconds = time.monotonic() - self._signalled_at
            logger.info(
                "Interrupted: step %d is saved in %s, %.1f s after the signal.", trainer.global_step, path, seconds
            )
        elif trainer.is_global_zero:
            logger.info("Interrupted: step %d is saved in %s.", trainer.global_step, path)
        if trainer.local_rank == 0:  # on each host, because each has the shards of its own ranks
            self._remove_older_than(trainer.global_step, trainer.current_epoch)

    def _note_saved(self, trainer: Trainer, files: list[Path]) -> None:
        """Tell the launcher that this host is ready to exit, and which of the checkpoint's files it has."""
        if self._process is not None and trainer.local_rank == 0:
            self._process.note_saved(files)

    def _remove_older_than(self, step: int, epoch: int) -> None:
        """Remove older checkpoints except the latest of them, because the new one may not be uploaded yet.

        The names determine which checkpoints are older, because after a restart, file times are those of the download.
        Checkpoints beyond this step are kept, because they come from another job, or from before a rollback.
        """
        older = []
        for path in self._dirpath.glob("interrupted-*.ckpt"):
            match = _NAME.fullmatch(path.name)
            # Compare epochs, too: the end of an epoch and the start of the next have the same step.
            if match is not None and (int(match["step"]), int(match["epoch"])) < (step, epoch):
                older.append((int(match["step"]), int(match["epoch"]), path))
        for _, _, path in sorted(older)[:-1]:
            # Ignore missing files: hosts with a shared folder remove the same ones.
            remove_folder(path) if path.is_dir() else path.unlink(missing_ok=True)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Record the job that saves the checkpoint, and correct the progress within the interrupted epoch."""
        if self._job is not None:
            checkpoint[JOB_KEY] = job_facts(
                self._job,
                self._fit,
                optimizers=optimizer_names(trainer),
                is_ending=trainer.should_stop,
                is_interruption=self._moment is not _SavedMoment.OTHER,
            )
        save_searched(trainer, checkpoint)
        if self._moment is _SavedMoment.OTHER:
            return
        loop = checkpoint["loops"]["fit_loop"]
        if self._moment is _SavedMoment.EPOCH_START:
            _rewind_to_epoch_start(loop)
        elif self._moment is _SavedMoment.STEP_START:
            _rewind_to_step_end(loop)
            if "combined_loader" in loop["state_dict"] and self._loader_states:
                loop["state_dict"]["combined_loader"] = self._loader_states[-1 - _num_prefetched(trainer)]
        elif self._moment is _SavedMoment.VALIDATION:
            _rewind_to_validation_start(loop)


def _num_prefetched(trainer: Any) -> int:
    """Return how many batches Lightning fetches ahead: 0, unless it must detect the last batch of an unknown length."""
    fetcher = trainer.fit_loop._data_fetcher
    return getattr(fetcher, "prefetch_batches", 0) if fetcher.length is None else 0


def _rewind_to_epoch_start(loop: dict[str, Any]) -> None:
    """Rewind the progress from the start of an epoch's first step to before the epoch's first batch."""
    progress = loop["epoch_loop.batch_progress"]
    for count in (progress["total"], progress["current"]):
        count["ready"] -= 1
    progress["is_last_batch"] = False
    # The stateful loader has already yielded that batch; without a state, it starts over.
    loop["state_dict"].pop("combined_loader", None)


def _rewind_to_step_end(loop: dict[str, Any]) -> None:
    """Rewind the progress from the start of a step to the end of the previous one.

    From the end of a step, Lightning resumes without repeating a validation, a scheduler step or a count. From the
    start of a step, it cannot resume correctly.
    """
    progress = loop["epoch_loop.batch_progress"]
    for count in (progress["total"], progress["current"]):
        count["ready"] -= 1
        count["completed"] -= 1
    progress["is_last_batch"] = False  # the next batch may be the last
    loop["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1


def _rewind_to_validation_start(loop: dict[str, Any]) -> None:
    """Rewind the progress from anywhere in a validation to before its first batch, to repeat the whole validation."""
    progress = loop["epoch_loop.val_loop.batch_progress"]
    total = progress["total"]
    current = progress["current"]
    before = total["completed"] - current["completed"]
    for count, done in ((total, before), (current, 0)):
        count.update(ready=done + 1, started=done + 1, processed=done, completed=done)
    progress["is_last_batch"] = False
