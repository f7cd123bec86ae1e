"""The limits of a run: costs that changes could reduce, measured in seconds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from lightning_sm._text import count, duration, percent, size, step_time, times
from lightning_sm.record.thresholds import MIN_SECONDS, MIN_STEPS, NOT_INPUT_BOUND, WORTH_SHOWING, WaitCause, slow_rank
from lightning_sm.record.waiting_reasons import paces, wait_cause
from lightning_sm.report.figures import RESTARTS, SHUTDOWN, Figures

# A removable limit that takes at least this share of the job ranks above the training work itself.
_REMOVABLE = 0.2
# On a busy or small host, starting Python and importing torch takes up to this long for any script.
_USUAL_START_S = 30.0
# Launchers wait for each other, and the last results are written.
_USUAL_END_S = 10.0
# When memory is nearly full, Linux reclaims it and kills processes.
_NEARLY_FULL = 0.95


@dataclass(frozen=True)
class Limit:
    """A cost that makes a run longer.

    Attributes:
        name: The limit in a few words, such as ``checkpoints``.
        seconds: Its cost in seconds, over the whole job.
        finding: The measurements, in a sentence or two.
        change: What to do about it, in the imperative; empty if ``finding`` already includes it.
        is_work: Whether it is part of the training work itself, which a change can shorten but not remove.
    """

    name: str
    seconds: float
    finding: str
    change: str = ""
    is_work: bool = False


# The parts of a step in which a rank never waits for other ranks.
_OWN = ("to_device", "forward", "other")
# What to change, by span outside the steps.
_SPANS = {
    "validation": "Validate less often (check_val_every_n_epoch, val_check_interval), or on less data.",
    "checkpoints": "Save less often (every_n_train_steps, train_time_interval), or save less each time.",
    "first step": "Start fewer workers, or compile less.",
    "model export": "Export only the weights, or a smaller model.",
    "between epochs": "Set persistent_workers=True for a local loader, and check what callbacks do between epochs.",
}
# By part of a step: name of the limit, whether it is part of the training work itself, and what to change.
_PARTS = {
    "forward": ("the forward pass", True, "Compile the model; avoid Python per sample, and values read from the GPU."),
    "backward": (
        "the backward pass",
        True,
        "Lower the precision, compile the model, or exchange gradients less often (accumulate_grad_batches).",
    ),
    "optimizer": ("the optimizer", True, "Use a fused or simpler one, or step less often (accumulate_grad_batches)."),
    "to_device": ("the transfer to the device", False, "Pin memory (pin_memory=True), and send smaller types (uint8)."),
    "other": ("Python between the steps", False, "Check callbacks and loggers, and how often they run."),
}


def limits(run: Figures, advice: str = "") -> list[Limit]:
    """Return the limits of a run that are worth a change, largest first.

    Nearly full memory and idle GPUs come last, with 0 seconds: memory costs nothing until it runs out, which ends the
    job, and idle GPUs do not make the job longer.

    Args:
        run: The run.
        advice: How to shorten the wait for data. If empty, use the advice of the wait's cause.

    Returns:
        The limits; empty for fewer than ``MIN_STEPS`` steps.
    """
    if run.pace.num_steps == 0 or run.pace.num_trained < MIN_STEPS:
        return []
    found = [_of_waiting(run, advice), *_of_steps(run), *_of_spans(run), *_of_restarts(run)]
    worth = [limit for limit in found if limit.seconds >= max(MIN_SECONDS, WORTH_SHOWING * run.seconds)]
    worth.sort(key=lambda limit: -limit.seconds)
    return [*worth, *_of_memory(run), *_of_idle_gpus(run)]


def leading(found: Sequence[Limit], seconds: float) -> Limit | None:
    """Return the limit for the headline.

    This is the largest limit, except that removable limits of at least a fifth of the job rank above the training work
    itself: the forward pass is the largest part of any healthy training run.

    Args:
        found: The limits, largest first.
        seconds: Duration of the whole job, in seconds.
    """
    removable = [limit for limit in found if not limit.is_work and limit.seconds >= _REMOVABLE * seconds]
    return next(iter((*removable, *found)), None)


def cause_of_wait(run: Figures) -> WaitCause | None:
    """Return why training waits for data; None if it does not wait, or the cause is unknown."""
    ranks, hosts = run.data
    if ranks:
        return wait_cause(ranks, hosts, run.pace.waiting)
    if not run.loaders or run.pace.waiting < NOT_INPUT_BOUND:
        return None
    workers = next(iter(run.loaders.values())).workers
    waits = f"Training waits {percent(run.pace.waiting)} of the time for the transforms"
    if workers == 0:
        text = f"{waits}: the training process builds its batches itself."
        name, change = "the training process builds its own batches", "Set the DataLoader's num_workers."
        return WaitCause(name, text, change, is_building=True)
    text = f"{waits}: the workers of the loader ({workers} for each rank) are too slow."
    change = "Increase the DataLoader's num_workers if the host has idle CPUs."
    return WaitCause("transforms", text, change, is_building=True)


def _of_waiting(run: Figures, advice: str) -> Limit:
    cause = cause_of_wait(run)
    if cause is None:
        text = f"Training waits {percent(run.pace.waiting)} of the time for data."
        return Limit("waiting for data", run.pace.parts["data_wait"], text, advice)
    return Limit(f"waiting for data ({cause.name})", run.pace.parts["data_wait"], cause.text, advice or cause.change)


def _of_steps(run: Figures) -> Iterator[Limit]:
    """Yield a limit for a rank that slows down the others, if any, and one for each part of a step."""
    parts = {part: run.pace.parts[part] for part in _PARTS}
    # Use the ranks' records, or the data service's figures if they include more ranks.
    known, (ranks, _) = run.rank_paces, run.data
    slow = slow_rank(known if len(known) >= len(ranks) else paces(ranks))
    if slow is not None:
        extra_s = slow.extra_s * run.pace.num_steps
        yield Limit("a slow rank", extra_s, slow.text, "Check what else runs on its host, and the rank's samples.")
        # The slow rank spends these seconds in its own code; the others wait for it in the backward pass.
        own_s = sum(parts[part] for part in _OWN)
        held_up = _OWN if own_s >= extra_s else ("backward",)
        left = max(0.0, 1.0 - extra_s / max(1e-9, sum(parts[part] for part in held_up)))
        parts |= {part: left * parts[part] for part in held_up}
    unseen = run.world_size > max(1, len(known), len(ranks))
    for part, seconds in parts.items():
        name, is_work, change = _PARTS[part]
        if part == "backward" and unseen:
            name, change = f"{name}, or a slower rank", "A report from the records of all ranks shows which."
        finding = f"It takes {step_time(seconds / run.pace.num_steps)} of the {step_time(run.pace.step_s)} of a step."
        if run.on_gpu and part == "other":
            name, change = "Python, for which the GPU idles", f"{change} Check Python in training_step, too."
        yield Limit(name, seconds, finding, change, is_work)


def _of_spans(run: Figures) -> Iterator[Limit]:
    for name, change in _SPANS.items():
        seconds = run.spans.get(name, ())
        each = f"{count(len(seconds), 'time')}, {duration(fmean(seconds))} each." if seconds else ""
        yield Limit(name, math.fsum(seconds), each, change)
    start_s = math.fsum(run.spans.get("start-up", ()))
    yield Limit(
        "start-up",
        start_s - _USUAL_START_S,
        f"It took {duration(start_s)} until training began; up to {duration(_USUAL_START_S)} is usual.",
        "Use an image that has all requirements, and check prepare_data and setup.",
    )
    end_s = run.shares[SHUTDOWN]
    yield Limit(
        SHUTDOWN,
        end_s - _USUAL_END_S,
        f"The job ended {duration(end_s)} after training; up to {duration(_USUAL_END_S)} is usual.",
        "Check what the script does after training.",
    )


def _of_restarts(run: Figures) -> Iterator[Limit]:
    if not run.restarts:
        return
    apart_s = run.shares[RESTARTS]
    steps = sum(restart.num_repeated for restart in run.restarts)
    finding = f"Training was restarted {times(len(run.restarts))}: {duration(apart_s)} from the last step to the next"
    change = "Check what the script does at its start, and what it does and saves at its end."
    if steps:
        finding += f", and {count(steps, 'step')} were trained again ({duration(run.repeated_s)})"
        change += " Save checkpoints more often (every_n_train_steps)."
    yield Limit(RESTARTS, apart_s + run.repeated_s, f"{finding}.", change)


def _of_memory(run: Figures) -> Iterator[Limit]:
    if run.fullest_memory is not None and run.fullest_memory[1] >= _NEARLY_FULL * run.fullest_memory[2]:
        host, used, total = run.fullest_memory
        finding = f"{host} had {size(used)} of {size(total)} in use. A job that needs more is killed."
        yield Limit("memory near its limit", 0.0, finding, "Use smaller batches or fewer workers, or a larger host.")


def _of_idle_gpus(run: Figures) -> Iterator[Limit]:
    """Yield a limit for the first trainer host with GPUs on which nothing ran."""
    for host in run.hosts:
        uses = [use.gpus for use in host.uses if use.gpus]
        idle = sum(round(fmean(gpu.use for gpu in one), 2) == 0.0 for one in zip(*uses, strict=False))
        if idle and host.role == "trainer":
            finding = f"Nothing ran on {idle} of the {count(len(uses[0]), 'GPU')} of {host.name}."
            yield Limit("an idle GPU", 0.0, finding, "Use all of them (devices=auto), or an instance type with fewer.")
            return
