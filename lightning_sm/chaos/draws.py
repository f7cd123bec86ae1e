"""Which faults a draw has. Rules without I/O: the same seed draws the same faults for the same cluster and course."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_sm.emulator.faults import AT_START, LOSSES, Fault, Kind, Moment, parse

# How often a draw has one fault, two, and three.
_NUM_FAULTS = (5, 3, 2)
# Long enough that other hosts notice, and far below the 30 s after which a silent host counts as lost.
_SILENT_S = (0.5, 8.0)
_SKEW_S = 3.0
_AFTER = re.compile(r"@after=[\d.]+")
# A job that loses a host fails, and starts again.
MAX_RETRIES = 1


@dataclass(frozen=True)
class Course:
    """The course of an undisturbed run.

    Attributes:
        steps: Global steps; 0 if the script does not report them.
        epochs: Epochs that began; 0 if the script does not report them.
        seconds: From the start of the hosts to the end of rank 0's last step or span.
        spans: When what is not a step began and ended, such as a validation or a checkpoint, in the same seconds.
    """

    steps: int
    epochs: int
    seconds: float
    spans: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True)
class Targets:
    """The hosts and processes that faults can hit.

    Attributes:
        trainers: Positions of trainer hosts in their groups, such as ``trainer-1``.
        data_hosts: Those of data hosts.
        devices: Processes on each trainer host.
        max_restarts: How many restarts within the job are allowed.
        kinds: The kinds of faults that the system can inject.
    """

    trainers: Sequence[str]
    data_hosts: Sequence[str]
    devices: int
    max_restarts: int
    kinds: frozenset[Kind]


def draw(seed: int, number: int, course: Course, targets: Targets) -> tuple[str, ...]:
    """Draw the faults of one run, as values of ``--fault``.

    Args:
        seed: Seed of all draws.
        number: Number of the draw: it can be repeated without the others.
        course: What the undisturbed run was like.
        targets: What can be hit.
    """
    # The seed is a text because the first draws of similar numbers are similar.
    rng = random.Random(f"{seed} {number}")  # noqa: S311 - no secret
    (how_many,) = rng.choices((1, 2, 3), _NUM_FAULTS)
    faults: list[str] = []
    while len(faults) < how_many:
        fault = _fault(rng, course, targets)
        if _is_survivable(list(map(parse, [*faults, fault])), targets):
            faults.append(fault)
    return tuple(faults)


def at_step(fault: str, moment: Moment | None) -> str:
    """Return a fault that happens at the step at which it has happened, if it was due after some seconds.

    Args:
        fault: Value of ``--fault``.
        moment: When it happened; None if it did not.
    """
    return fault if moment is None or not moment.step else _AFTER.sub(f"@step={moment.step}", fault)


def _is_survivable(faults: Sequence[Fault], targets: Targets) -> bool:
    """Return whether a job can end well with these faults, and each of them says something of its own."""
    kinds = [fault.kind for fault in faults]
    delays = [(fault.kind, fault.host) for fault in faults if fault.kind in AT_START]
    return (
        # Of a data host, too: its launcher has a limit of its own, which is not lower than what a draw can have.
        kinds.count(Kind.KILL_RANK) <= targets.max_restarts
        and sum(kind in LOSSES for kind in kinds) <= MAX_RETRIES
        and len(delays) == len(set(delays))
    )


def _fault(rng: random.Random, course: Course, targets: Targets) -> str:
    kind = rng.choice(sorted(targets.kinds - {Kind.STOP}, key=lambda kind: kind.value))
    host = rng.choice([*targets.trainers, *targets.data_hosts])
    when = _moment(rng, course)
    silent_s = f"{rng.uniform(*_SILENT_S):.1f}"
    match kind:
        case Kind.LATE | Kind.SLOW_DNS:
            return f"{kind.value}:{host}={silent_s}"
        case Kind.HANG:
            return f"hang:{host},for={silent_s}@{when}"
        case Kind.INTERRUPT:
            whom = rng.choice(["", "", f":{host}"])
            return f"interrupt{whom}@{rng.choice([when, when, when, 'start'])},skew={rng.uniform(0, _SKEW_S):.1f}"
        case Kind.RESTART:
            return f"restart@{when}"
        case Kind.KILL_RANK if host in targets.trainers and targets.devices > 1:
            return f"kill-rank:{host}/{rng.randrange(targets.devices)}@{when}"
        case _:
            return f"{kind.value}:{host}@{when}"


def _moment(rng: random.Random, course: Course) -> str:
    """Draw a step, an epoch, any moment, or one in a validation, a checkpoint, the start or the end."""
    choices: Mapping[str, bool] = {
        "step": course.steps > 0,
        "epoch": course.epochs > 0,
        "span": bool(course.spans),
        "any": True,
    }
    weights = [weight for weight, name in zip((5, 1, 3, 2), choices, strict=True) if choices[name]]
    (chosen,) = rng.choices([name for name, is_possible in choices.items() if is_possible], weights)
    if chosen == "step":
        return f"step={rng.randint(1, course.steps)}"
    if chosen == "epoch":
        return f"epoch={rng.randint(1, course.epochs)}"
    begin, end = rng.choice(course.spans) if chosen == "span" else (0.0, course.seconds)
    return f"after={max(0.0, rng.uniform(begin, end)):.2f}"
