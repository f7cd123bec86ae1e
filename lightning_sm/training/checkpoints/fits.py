"""The identity of a script's fits, so that a script with several Trainers resumes each from the right checkpoint.

A restarted script may not create all Trainers again, because it may skip those whose results exist. So a Trainer is
identified by the place in the script that creates it, and by the variables of the ``for`` loops and comprehensions
around that place. Only Trainers that share both are numbered.
"""

from __future__ import annotations

import ast
import inspect
import os
import site
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from lightning_sm.errors import CheckpointError

_LIBRARIES = tuple(folder + os.sep for folder in (os.path.dirname(os.__file__), *site.getsitepackages()))
_OWN_PACKAGE = str(Path(__file__).parents[2]) + os.sep
# Number of Trainers that this process has created at each place.
_made: Counter[str] = Counter()


@dataclass(frozen=True)
class Fit:
    """One of a script's fits.

    Attributes:
        place: The script lines that created the fit's Trainer, outermost first, and the variables of the loops around
            them.
        repeat: The Trainer's number among those created at this place, from 1.
        order: The Trainer's number among all Trainers of the script, from 1.
        number: The fit's number among the fits of its Trainer, from 1; 0 before the first.
    """

    place: str
    repeat: int
    order: int
    number: int

    @classmethod
    def before_first(cls) -> Fit:
        """Register the Trainer that the script is creating, and return its identity as a fit with number 0."""
        place = _place(inspect.currentframe())
        _made[place] += 1
        return cls(place, _made[place], _made.total(), number=0)

    @classmethod
    def of(cls, saved: Any) -> Fit | None:
        """Return the fit recorded in a checkpoint, or None."""
        try:
            return cls(**saved)
        except TypeError:
            return None

    @property
    def trainer(self) -> tuple[str, int]:
        """Key that identifies the Trainer; unique within the script."""
        return self.place, self.repeat

    def __str__(self) -> str:
        repeat = f", number {self.repeat} there" if self.repeat > 1 else ""
        return f"fit {self.number} of the Trainer at {self.place}{repeat}"


def may_resume(own: Fit, saved: Fit, of_job: Sequence[Fit], *, is_own_job: bool) -> bool:
    """Return whether a fit may resume from a checkpoint, given the fit that saved it.

    Within a job, the script does not change, so the Trainer's place decides. Between jobs, lines may move as the script
    is edited. For an earlier job's checkpoints, the order of the Trainers therefore decides, unless one of these
    checkpoints has the same place.

    Args:
        own: The fit that is to resume.
        saved: The fit that saved the checkpoint.
        of_job: The fits of all checkpoints of the job that saved this checkpoint.
        is_own_job: Whether that job is the current job.

    Raises:
        CheckpointError: The checkpoints do not show which of them belongs to this fit.
    """
    if saved.number != own.number:
        return False
    if is_own_job or any(fit.trainer == own.trainer for fit in of_job):
        return saved.trainer == own.trainer
    if saved.order != own.order:
        return False
    if len({fit.trainer for fit in of_job}) > 1:
        raise CheckpointError(
            f"An earlier job with the same checkpoint_s3_uri has a checkpoint of {saved}, and its script made several "
            f"Trainers; this is {own}. If both are the same fit, pass the checkpoint as ckpt_path. If not, use another "
            "checkpoint_s3_uri for this job."
        )
    return True


def _place(frame: FrameType | None) -> str:
    frames = []
    while frame is not None:
        if not frame.f_code.co_filename.startswith(("<frozen ", _OWN_PACKAGE)):
            frames.append(frame)
        frame = frame.f_back
    # If all frames are in libraries, the script itself is installed as one.
    scripts = [item for item in frames if not item.f_code.co_filename.startswith(_LIBRARIES)] or frames
    lines = " > ".join(f"{os.path.basename(item.f_code.co_filename)}:{item.f_lineno}" for item in reversed(scripts))
    variables = {name: value for item in reversed(scripts) for name, value in _loop_variables(item)}
    shown = ", ".join(f"{name}={value!r}" for name, value in variables.items())
    return f"{lines} with {shown}" if shown else lines


def _loop_variables(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """Yield the plain variables of the loops around a frame's current line."""
    for first, last, names in _loops(frame.f_code.co_filename):
        if first <= frame.f_lineno <= last:
            for name in names:
                if name in frame.f_locals and _is_plain(frame.f_locals[name]):
                    yield name, frame.f_locals[name]


@cache
def _loops(file: str) -> list[tuple[int, int, list[str]]]:
    """Return the first line, the last line and the variables of each loop and comprehension in a file."""
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):  # compiled, interactive, or deleted since
        return []
    loops = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.For, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            targets = [loop.target for loop in getattr(node, "generators", [node])]
            names = [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
            loops.append((node.lineno, node.end_lineno or node.lineno, names))
    return loops


def _is_plain(value: Any) -> bool:
    """Return whether the repr of a value is the same in every attempt."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (str, int, float, type))
