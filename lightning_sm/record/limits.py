"""The limits of a run: one list of what costs it time and could be changed, each with its seconds. Pure rules."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from lightning_sm._text import count, duration, percent, size, step_time
from lightning_sm.record.bottleneck import NOT_INPUT_BOUND, WORKERS_ARE_BUSY

# A limit that costs a smaller share of the job is not shown.
WORTH_SHOWING = 0.05
# From this share of the job on, what a change could remove is named before the work of the training itself.
_REMOVABLE = 0.2
# The means of fewer steps say nothing.
MIN_STEPS = 50
# Starting Python and importing torch take up to this on a busy or small host, whatever the script does.
_USUAL_START_S = 30.0
# Linux begins to reclaim and to kill near the end.
_NEARLY_FULL = 0.95
# A rank counts as slower than the others from this factor on.
_SLOWER = 2.0
# What takes less is not worth a word, whatever its share.
_MIN_SECONDS = 1.0


@dataclass(frozen=True)
class Limit:
    """Something that a run would be shorter without.

    Attributes:
        name: It in a few words, such as ``checkpoints``.
        seconds: What it costs of the whole job.
        finding: What was measured, in a sentence or two.
        change: What to do about it, as an imperative; empty if ``finding`` says it.
        is_work: Whether it is the work of the training itself, which a change can shorten, but not remove.
    """

    name: str
    seconds: float
    finding: str
    change: str = ""
    is_work: bool = False


@dataclass(frozen=True)
class WaitCause:
    """Why training waits for its data.

    Attributes:
        name: The cause in a few words, such as ``the network``.
        text: The cause, in a sentence.
        change: What would help; empty if that is not known.
        host: The data host that is the cause; empty if none is.
    """

    name: str
    text: str
    change: str = ""
    host: str = ""


@dataclass(frozen=True)
class RankPace:
    """How fast a rank is by itself.

    Attributes:
        name: Its name, for people.
        num_steps: Number of its steps.
        step_s: Seconds of a step.
        own_s: Seconds of a step in which no other rank can have made it wait.
        wait_s: Seconds of a step in which it waited for data.
    """

    name: str
    num_steps: int
    step_s: float
    own_s: float
    wait_s: float


@dataclass(frozen=True)
class SlowRank:
    """A rank whose own code is so slow that the others wait for it in the backward pass.

    Attributes:
        text: Which, and how slow, in a sentence.
        extra_s: The seconds by which it makes each step longer.
    """

    text: str
    extra_s: float


@dataclass(frozen=True)
class JobTimes:
    """What the time of a job, or of a Trainer's run so far, went into.

    Attributes:
        seconds: All of its time.
        num_steps: Number of training steps whose time was measured.
        parts: Seconds of these steps by part (``events.PARTS``), of the rank that sets the pace.
        spans: Seconds of each span outside the steps, by what people read for it (``events.SPANS``).
        on_gpu: Whether the GPU measured its parts, so that the rest is time in which it idled.
        cause: Why training waits for data, if it does and that is known.
        advice: What would shorten this wait, if more is known than the cause says of it.
        slow_rank: The rank that holds up the others, if there is one.
        restarts: What restarts cost, with the reason, if there were any.
        memory: The host whose memory is the fullest, the most it had in use, and all that it has, if known.
        num_untimed: Number of training steps besides.
    """

    seconds: float
    num_steps: int
    parts: Mapping[str, float]
    spans: Mapping[str, Sequence[float]] = field(default_factory=dict)
    on_gpu: bool = False
    cause: WaitCause | None = None
    advice: str = ""
    slow_rank: SlowRank | None = None
    restarts: Limit | None = None
    memory: tuple[str, int, int] | None = None
    num_untimed: int = 0

    @property
    def num_trained(self) -> int:
        """Number of all training steps."""
        return self.num_steps + self.num_untimed


# The parts of a step in which no other rank can make a rank wait.
_OWN = ("to_device", "forward", "other")
# By spans outside the steps: what to change.
_SPANS = {
    "validation": "Validate less often (check_val_every_n_epoch, val_check_interval), or on less data.",
    "checkpoints": "Save less often (every_n_train_steps, train_time_interval), or less.",
    "first batches": "Keep a local loader's workers between epochs (persistent_workers=True), or compile less.",
    "model export": "Export a smaller model, or only its weights.",
    "ends of epochs": "Look at what callbacks and loggers do at the end of an epoch.",
}
# By part of a step: the limit, whether it is the work of the training itself, and what to change.
_PARTS = {
    "forward": (
        "the forward pass",
        True,
        "Look at training_step: Python that runs per sample, values read from the GPU, or a model that could be "
        "compiled.",
    ),
    "backward": (
        "the backward pass",
        True,
        "Lower precision or a compiled model make it shorter, and less exchange of gradients "
        "(accumulate_grad_batches).",
    ),
    "optimizer": (
        "the optimizer",
        True,
        "Choose a fused or simpler optimizer, or step less often (accumulate_grad_batches).",
    ),
    "to_device": (
        "the transfer to the device",
        False,
        "Pin memory (pin_memory=True), send smaller types (uint8), and look at the hooks for batches.",
    ),
    "other": ("Python between the steps", False, "Look at callbacks, loggers, and how often they run."),
}


def limits(times: JobTimes) -> list[Limit]:
    """Return what limits a job, the most seconds first, without what is not worth a change.

    Nearly full memory costs nothing until it ends the job: it comes last, with 0 seconds.

    Returns:
        Nothing for fewer than ``MIN_STEPS`` steps.
    """
    if times.num_steps == 0 or times.num_trained < MIN_STEPS:
        return []
    found = [*_of_steps(times), *_of_spans(times), *([] if times.restarts is None else [times.restarts])]
    worth = [limit for limit in found if limit.seconds >= max(_MIN_SECONDS, WORTH_SHOWING * times.seconds)]
    worth.sort(key=lambda limit: -limit.seconds)
    return [*worth, *_of_memory(times)]


def leading(found: Sequence[Limit], seconds: float) -> Limit | None:
    """Return the limit that a headline names: the largest one.

    The forward pass of a healthy training is its largest part, so something that could be removed comes before it if
    it is a fifth of the job.

    Args:
        found: The limits, the largest one first.
        seconds: The time of the whole job.
    """
    removable = [limit for limit in found if not limit.is_work and limit.seconds >= _REMOVABLE * seconds]
    return next(iter((*removable, *found)), None)


def headline(times: JobTimes) -> str:
    """Return in a few sentences what limits a job.

    Args:
        times: What its time went into.
    """
    if times.num_trained == 0:
        return "No training step is recorded."
    if times.num_trained < MIN_STEPS:
        return f"{count(times.num_trained, 'step')}: too few for a verdict, which takes {MIN_STEPS}."
    limit = leading(limits(times), times.seconds)
    if limit is None:
        return "Nothing takes a large part of the time."
    share = f", {cost_of(limit, times.seconds)}" if limit.seconds else ""
    return f"Limited by {limit.name}{share}. {limit.finding}".rstrip()


def cost_of(limit: Limit, seconds: float) -> str:
    """Return what a limit costs of a job that took so many seconds, in words."""
    return f"{percent(limit.seconds / max(1e-9, seconds))} of the time ({duration(limit.seconds)})"


def slow_rank(ranks: Iterable[RankPace]) -> SlowRank | None:
    """Return the rank that holds up the others; None if there is none.

    Ranks may wait for each other in the forward pass, too, where DistributedDataParallel sends the buffers of rank 0.
    A rank that seems slow, but no slower than others with their waiting for data, may have waited for these.
    """
    timed = [rank for rank in ranks if rank.num_steps]
    if len(timed) <= 1:
        return None
    slow = max(timed, key=lambda rank: rank.own_s)
    others = [rank for rank in timed if rank is not slow]
    others_s = median(rank.own_s for rank in others)
    others_with_waits_s = median(rank.own_s + rank.wait_s for rank in others)
    extra_s = slow.own_s - others_with_waits_s
    is_trivial = extra_s * slow.num_steps < _MIN_SECONDS or extra_s < WORTH_SHOWING * slow.step_s
    if is_trivial or slow.own_s < _SLOWER * others_with_waits_s:
        return None
    name = f"{slow.name[:1].upper()}{slow.name[1:]}"
    text = (
        f"{name} holds up the others: apart from the backward pass and the optimizer, its own code takes "
        f"{duration(slow.own_s)} a step, compared with {duration(others_s)} on the others."
    )
    return SlowRank(text, extra_s)


def local_wait(share: float, workers: int, cpu: float | None = None, cpus: int = 0) -> WaitCause | None:
    """Return why a training waits for a loader on its own host; None if it hardly waits.

    Args:
        share: The share of the time that it waits, 0 to 1, without the first batches.
        workers: Worker processes of the loader of each rank.
        cpu: The share of the host's CPUs in use, 0 to 1; None if unknown.
        cpus: CPUs of the host; 0 if unknown.
    """
    if share < NOT_INPUT_BOUND:
        return None
    waits = f"Training waits {percent(share)} of the time for the transforms"
    if workers == 0:
        text = f"{waits}: the training process builds its batches itself."
        return WaitCause("the training process builds its own batches", text, "Set num_workers of the DataLoader.")
    own = f"the loader's {workers} workers are" if workers > 1 else "the loader's only worker is"
    text, change = f"{waits}: {own} too slow.", "Set a larger num_workers of the DataLoader."
    if cpu is not None and cpu >= WORKERS_ARE_BUSY:
        owners = f"the host's {cpus} CPUs are" if cpus > 1 else "the host's CPU is"
        text = f"{waits}: {own} too slow, and {owners} {percent(cpu)} busy."
        change = "More workers need more CPUs, such as those of data hosts."
    elif cpu is not None:
        text += f" The host's CPUs are {percent(cpu)} busy."
    return WaitCause("transforms", text, change)


def _of_steps(times: JobTimes) -> Iterator[Limit]:
    """Yield the waiting for data, the rank that holds up the others, and the parts of a step."""
    wall_s = sum(times.parts.values())
    wait_s = times.parts["data_wait"]
    cause = times.cause
    name = f"waiting for data{'' if cause is None else f' ({cause.name})'}"
    waits = f"Training waits {percent(wait_s / max(1e-9, wall_s))} of the time for data."
    change = times.advice or ("" if cause is None else cause.change)
    yield Limit(name, wait_s, waits if cause is None else cause.text, change)
    parts = {part: times.parts[part] for part in _PARTS}
    if times.slow_rank is not None:
        extra_s = times.slow_rank.extra_s * times.num_steps
        yield Limit(
            "a slow rank", extra_s, times.slow_rank.text, "Look at what else its host runs, and at its samples."
        )
        # The slow rank spends them in its own code, and the others wait for it in the backward pass.
        own_s = sum(parts[part] for part in _OWN)
        held_up = _OWN if own_s >= extra_s else ("backward",)
        left = max(0.0, 1.0 - extra_s / max(1e-9, sum(parts[part] for part in held_up)))
        parts |= {part: left * parts[part] for part in held_up}
    step_s = wall_s / times.num_steps
    for part, seconds in parts.items():
        name, is_work, change = _PARTS[part]
        finding = f"It takes {step_time(seconds / times.num_steps)} of the {step_time(step_s)} of a step."
        if times.on_gpu and part == "other":
            name, change = "Python, for which the GPU idles", f"{change} Look at Python in training_step, too."
        yield Limit(name, seconds, finding, change, is_work)


def _of_spans(times: JobTimes) -> Iterator[Limit]:
    for name, change in _SPANS.items():
        seconds = times.spans.get(name, ())
        each = f"{count(len(seconds), 'time')}, {duration(fmean(seconds))} each." if seconds else ""
        yield Limit(name, math.fsum(seconds), each, change)
    start_s = math.fsum(times.spans.get("start-up", ()))
    yield Limit(
        "start-up",
        start_s - _USUAL_START_S,
        f"It took {duration(start_s)} until training began, of which {duration(_USUAL_START_S)} are usual.",
        "Use an image that has all requirements, and look at prepare_data and setup.",
    )


def _of_memory(times: JobTimes) -> Iterator[Limit]:
    if times.memory is not None and times.memory[1] >= _NEARLY_FULL * times.memory[2]:
        host, used, total = times.memory
        finding = f"{host} had {size(used)} of {size(total)} in use. A job that needs more is killed."
        yield Limit("memory near its limit", 0.0, finding, "Use smaller batches or fewer workers, or a larger host.")
