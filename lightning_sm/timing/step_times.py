"""StepTimes: measure where training time goes, and record the measurements while the job runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any

import psutil
import torch

from lightning_sm._lightning import LightningModule, Trainer
from lightning_sm._linux import usable_cpus
from lightning_sm._unlisted import UnlistedCallback
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.outcomes import INTERRUPTED_EXIT_CODE
from lightning_sm.record import events, step_clock
from lightning_sm.record.totals import Totals
from lightning_sm.timing.gpu_timer import GpuTimer

# Minimum seconds between two ``Steps`` lines in the record, except at the end of an epoch or a fit.
_STEPS_S = 1.0
_MAX_REASON_CHARS = 500
# This process's records, by file. All its Trainers continue the same one: another head would look like a restart.
_RECORDS: dict[Path, events.Recorder] = {}


class StepTimes(UnlistedCallback):
    """A callback that measures the parts of each training step, and the spans between steps.

    A step is one training batch. Its parts are waiting for data, the transfer to the device (with the batch's hooks),
    forward (with zeroing the gradients), backward (with the exchange of gradients, which overlaps with it), optimizer
    (with gradient clipping), and everything else: callbacks, logging, and code without a hook, such as code between the
    steps of several optimizers. The parts add up to the elapsed time. Start-up, the first step, the time between
    epochs, validations and checkpoints are separate spans.

    On a CUDA device, forward, backward and optimizer are measured on the device, in every tenth step and without
    waiting for the device. Waiting for data while the device is still busy does not count as waiting.

    Every ``log_every_n_steps`` batches, rank 0 logs means over the steps since the previous log to the Trainer's
    loggers: ``time/step_ms`` and its parts ``time/data_wait_ms``, ``time/to_device_ms``, ``time/forward_ms``,
    ``time/backward_ms``, ``time/optimizer_ms`` and ``time/other_ms``. It also logs ``time/input_bound``, the share of
    the time spent waiting for data, 0 to 1. In a SageMaker job, each rank writes its times to the record of the run
    (``lightning_sm.record.events``).

    ``SageMakerCLI`` and ``SageMakerTrainer`` add this callback to every job. With data hosts, any Trainer gets it.

    Args:
        job: The job to record; None outside a job.
    """

    def __init__(self, job: SageMakerJob | None = None) -> None:
        super().__init__()
        self._job = job
        self._record: events.Recorder | None = None
        self._clock = step_clock.StepClock()
        self._is_timing = False
        self._after_backward = step_clock.OPTIMIZER
        self._gpu: GpuTimer | None = None
        self._setup_at = 0.0
        self._has_stepped = False
        self._fetch_returns_to = step_clock.OTHER
        self._optimizer_depth = 0
        self._undo = ExitStack()
        # The clock's totals when last read, and the totals adjusted by the GPU's times.
        self._measured = Totals()
        self._totals = Totals()
        self._written = Totals()
        self._logged = Totals()
        self._began = 0.0
        self._next_line_at = 0.0

    def __getstate__(self) -> dict[str, Any]:
        """Omit the state of this process, because strategies that spawn processes pickle the Trainer."""
        return vars(StepTimes(self._job))

    @property
    def totals(self) -> Totals:
        """The sums over the steps of this Trainer run so far."""
        measured = self._clock.totals
        new = measured.plus(self._measured, -1)
        self._measured = measured
        gpu = None if self._gpu is None else self._gpu.read()
        if gpu is not None:
            waited_s = max(1e-9, new.parts["data_wait"])
            new.parts = step_clock.exposed(new.parts, {name: new.num_steps * each_s for name, each_s in gpu.items()})
            new.in_transit_s *= new.parts["data_wait"] / waited_s
        self._totals = self._totals.plus(new)
        return self._totals

    def write(self, line: events.Line) -> None:
        """Write a line to the record of the run, if one is open."""
        if self._record is not None:
            self._record.append(line)

    def note_wait(self, in_transit: float) -> None:
        """Attribute part of the wait that ends now to the network; see ``StepClock.note_wait``."""
        self._clock.note_wait(in_transit)

    # ---- hooks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Open the record, and discard the measurements of an earlier run."""
        self._undo.close()  # in case an earlier run of the Trainer ended without calling the hooks that do this
        own = vars(StepTimes(self._job))
        vars(self).update({name: own[name] for name in own if name not in ("_job", "_record")})
        self._setup_at = time.time()
        if self._job is not None and self._record is None and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            who = f"rank-{trainer.global_rank}"
            record = events.open_record(self._job, who)
            self._record = _RECORDS.setdefault(record.path, record)
            if self._record is record:
                rank, world_size = trainer.global_rank, trainer.world_size
                self.write(events.head_of(self._job, who, rank=rank, world_size=world_size, cpus=usable_cpus()))
                self._setup_at = psutil.Process().create_time()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._clock, self._is_timing = step_clock.StepClock(), True
        # With manual optimization, any user code may follow the backward pass.
        self._after_backward = step_clock.OPTIMIZER if pl_module.automatic_optimization else step_clock.OTHER
        self._gpu = GpuTimer() if trainer.strategy.root_device.type == "cuda" else None
        now = time.time()
        loop: Any = trainer.fit_loop.epoch_loop
        self.write(events.Span(now, "startup", self._setup_at, now - self._setup_at))
        workers, batch = _num_workers(trainer), loop.batch_progress.total.processed
        self.write(events.Loader(now, workers, usable_cpus(), ranks_of_host=trainer.num_devices, batch=batch))
        if trainer.global_step:
            self._event("resumed", f"from step {trainer.global_step} of {trainer.ckpt_path}")
        self._observe(trainer)
        self._clock.begin_span("first_batch")
        self._began = self._clock.last
        self._next_line_at = self._began + _STEPS_S

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin the forward pass; the batch is already on its device."""
        self._optimizer_depth = 0  # in case the user's code caught an exception of the last optimizer step
        self._clock.enter(step_clock.FORWARD)
        if self._gpu is not None:
            self._gpu.begin_step(step_clock.FORWARD)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        """Begin the backward pass."""
        self._enter(step_clock.BACKWARD)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the backward pass."""
        self._enter(self._after_backward)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the step. Write to the loggers and the record if a write is due."""
        clock = self._clock
        if self._gpu is not None:
            self._gpu.end_step(step_clock.OTHER)
        now = clock.end_step(_num_samples(batch))
        if not self._has_stepped:
            self._has_stepped = True
            self._end_span("first_batch")
        if trainer.is_last_batch:  # the next epoch's first batch cannot be prefetched: workers may have to start
            clock.begin_span("between")
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and clock.n and clock.n % every == 0 and trainer.is_global_zero:
            self._log(trainer)
        if now >= self._next_line_at:
            self._next_line_at = now + events.gap_s(now - self._began, _STEPS_S)
            self._write_steps(trainer)
            self._write_metrics(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the metrics of a validation during ``fit``."""
        if self._is_timing and not trainer.sanity_checking:
            self._write_metrics(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the metrics of the epoch."""
        if not self._clock.span:  # a limit ended the epoch before the last batch
            self._clock.begin_span("between")
        self._write_steps(trainer)
        self._write_metrics(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Charge the time from now on to the model export."""
        self._end_span("first_batch", "between")
        self._write_steps(trainer)
        self._clock.begin_span("export")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Close the record."""
        if self._is_timing:
            self._finish(trainer)
        elif stage != "fit":
            now = time.time()
            name = "validation" if stage == "validate" else stage
            self.write(events.Span(now, name, self._setup_at, now - self._setup_at))
        self._end(events.End(time.time(), "succeeded"))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Record the interruption or failure, and close the record."""
        # Ranks started by Lightning exit with code 0 after an interruption.
        is_interrupted = isinstance(exception, KeyboardInterrupt) or (
            isinstance(exception, SystemExit) and exception.code in (0, INTERRUPTED_EXIT_CODE)
        )
        text = " ".join(f"{type(exception).__name__}: {exception}".split())[:_MAX_REASON_CHARS]
        if is_interrupted:
            text = f"training was interrupted after step {trainer.global_step}"
        self._event("interruption" if is_interrupted else "failure", text)
        if self._is_timing:
            self._finish(trainer)
        self._end(events.End(time.time(), "interrupted" if is_interrupted else "failed", reason=text))

    # ---- measurements without Lightning hooks

    def _observe(self, trainer: Any) -> None:
        """Wrap methods to time batch fetching, optimizer steps, validations and checkpoints."""
        loop = trainer.fit_loop.epoch_loop
        begin_profile, end_profile, save = loop._on_before_fetch, loop._on_after_fetch, trainer.save_checkpoint

        def on_before_fetch() -> None:
            # A training_step that accepts an iterator fetches batches itself, so note the part to return to.
            current = self._clock.current
            self._fetch_returns_to = step_clock.TO_DEVICE if current == step_clock.OTHER else current
            self._clock.enter(step_clock.DATA_WAIT)
            begin_profile()

        def on_after_fetch() -> None:
            end_profile()
            self._clock.enter(self._fetch_returns_to)
            self._end_span("between")

        @wraps(save)
        def save_checkpoint(*args: Any, **kwargs: Any) -> None:
            with self._span("checkpoint"):
                save(*args, **kwargs)
            path = args[0] if args else kwargs.get("filepath", "")
            self._event("checkpoint_saved", f"step {trainer.global_step} in {path}")

        # The fetcher reads these two methods from the loop at the start of each epoch, so replacing them works.
        self._replace(loop, "_on_before_fetch", on_before_fetch)
        self._replace(loop, "_on_after_fetch", on_after_fetch)
        # Wrap run, because Lightning calls the validation hooks only after starting the validation loader's workers.
        self._replace(loop.val_loop, "run", self._span("validation")(loop.val_loop.run))
        self._replace(trainer, "save_checkpoint", save_checkpoint)
        is_automatic = trainer.lightning_module.automatic_optimization
        for optimizer in trainer.optimizers:
            if not isinstance(optimizer, torch.optim.Optimizer):
                continue
            before = optimizer.register_step_pre_hook(partial(self._begin_optimizer, is_automatic))
            after = optimizer.register_step_post_hook(partial(self._end_optimizer, is_automatic))
            self._undo.callback(before.remove)
            self._undo.callback(after.remove)

    def _begin_optimizer(self, is_automatic: bool, *_: Any) -> None:
        self._optimizer_depth += 1
        # With automatic optimization, forward and backward run within the optimizer's step.
        if not is_automatic and self._optimizer_depth == 1:
            self._enter(step_clock.OPTIMIZER)

    def _end_optimizer(self, is_automatic: bool, *_: Any) -> None:
        # If an optimizer's step calls its parent class's step, the hooks run twice: only the outer call counts.
        self._optimizer_depth -= 1
        if self._optimizer_depth == 0:
            self._enter(step_clock.OTHER if is_automatic else step_clock.FORWARD)

    def _replace(self, owner: Any, name: str, method: Callable[..., Any]) -> None:
        """Replace a method of an object until the run ends; if other code has replaced it since, do not restore it."""
        own = vars(owner).get(name)  # set by other code; None if this is still the class's method
        setattr(owner, name, method)

        def restore() -> None:
            if vars(owner).get(name) is method:
                delattr(owner, name)
                if own is not None:
                    setattr(owner, name, own)

        self._undo.callback(restore)

    @contextmanager
    def _span(self, name: str) -> Iterator[None]:
        self._clock.begin_span(name)
        try:
            yield
        finally:
            self._end_span(name)

    def _enter(self, part: str) -> None:
        self._clock.enter(part)
        if self._gpu is not None:
            self._gpu.mark(part)

    # ---- record and loggers

    def _write_steps(self, trainer: Trainer) -> None:
        totals = self.totals
        new = totals.plus(self._written, -1)
        self._written = totals
        if not new.num_trained:
            return
        self.write(
            events.Steps(
                t=time.time(),
                step=trainer.global_step,
                n=new.num_steps,
                samples=new.samples,
                parts=new.parts,
                gpu_parts=self._gpu is not None and self._gpu.read() is not None,
                untimed=new.num_untimed,
            )
        )

    def _write_metrics(self, trainer: Trainer) -> None:
        if self._record is None or not trainer.is_global_zero:
            return
        values: dict[str, float | None] = {name: float(value) for name, value in trainer.callback_metrics.items()}
        if values:
            self.write(events.Metrics(time.time(), trainer.global_step, trainer.current_epoch, values))

    def _log(self, trainer: Any) -> None:
        totals = self.totals
        new = totals.plus(self._logged, -1)
        self._logged = totals
        values = {f"time/{name}_ms": 1e3 * seconds / new.num_steps for name, seconds in new.parts.items()}
        values["time/step_ms"] = sum(values.values())
        values["time/input_bound"] = new.waiting
        for log in trainer.loggers:
            log.log_metrics(values, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    def _finish(self, trainer: Trainer) -> None:
        """Stop the clock, and write the remaining spans and steps."""
        self._is_timing = False
        self._undo.close()
        while self._end_span("first_batch", "validation", "checkpoint", "export", "between"):
            pass
        self._write_steps(trainer)

    def _end_span(self, *names: str) -> step_clock.OpenSpan | None:
        span = self._clock.end_span(*names)
        if span is not None:
            self.write(events.Span(time.time(), span.name, span.began_at, span.seconds))
        return span

    def _event(self, what: str, text: str) -> None:
        self.write(events.Event(time.time(), what, text))

    def _end(self, line: events.End) -> None:
        self.write(line)
        if self._record is not None:
            self._record.close()


def _num_workers(trainer: Any) -> int:
    """Return the total number of worker processes of the training loaders."""
    loader = trainer.fit_loop._combined_loader
    loaders = loader.flattened if loader is not None else ()
    return sum(getattr(loader, "num_workers", 0) or 0 for loader in loaders)


def _num_samples(batch: Any) -> int:
    """Return the length of the first tensor in a batch; 0 if the batch has no tensor."""
    while isinstance(batch, (list, tuple, Mapping)) and batch:
        batch = next(iter(batch.values() if isinstance(batch, Mapping) else batch))
    return batch.size(0) if isinstance(batch, torch.Tensor) and batch.dim() else 0
