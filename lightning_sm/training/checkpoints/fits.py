"""Which of a script's fits a checkpoint is from, so that a script with several Trainers resumes each from its own.

A restarted script need not make the Trainers that it made before: it may skip one whose result it finds. So a Trainer
is known by the place in the script that makes it, with the variables of the ``for`` loops and comprehensions around;
only Trainers that share both are numbered.
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
# How many Trainers this process has made at each place.
_made: Counter[str] = Counter()


@dataclass(frozen=True)
class Fit:
    """A fit of a script.

    Attributes:
        place: The lines of the script that made its Trainer, the outermost first, and the variables of the loops
            around them.
        repeat: Number of the Trainer among those that were made at this place, from 1.
        order: Number of the Trainer among all of the script, from 1.
        number: Number of the fit among those of its Trainer, from 1.
    """

    place: str
    repeat: int
    order: int
    number: int

    @classmethod
    def before_first(cls) -> Fit:
        """Register the Trainer that the script is making, which has no fit yet."""
        place = _place(inspect.currentframe())
        _made[place] += 1
        return cls(place, _made[place], _made.total(), number=0)

    @classmethod
    def of(cls, saved: Any) -> Fit | None:
        """Return the fit that a checkpoint states; None if it states none."""
        try:
            return cls(**saved)
        except TypeError:
            return None

    @property
    def trainer(self) -> tuple[str, int]:
        """What tells its Trainer from the others of the script."""
        return self.place, self.repeat

    def __str__(self) -> str:
        repeat = f", number {self.repeat} there" if self.repeat > 1 else ""
        return f"fit {self.number} of the Trainer of {self.place}{repeat}"


def may_resume(own: Fit, saved: Fit, of_job: Sequence[Fit], *, is_own_job: bool) -> bool:
    """Return whether a fit may resume from the checkpoint of another one.

    In the same job, the script is the same: the place of the Trainer decides. The script of an earlier job may have
    been edited since, which moves its lines: there the order of the Trainers decides, unless the place is found.

    Args:
        own: The fit that is to resume.
        saved: The fit of the checkpoint.
        of_job: The fits of all checkpoints of the same job.
        is_own_job: Whether that is the job of this process.

    Raises:
        CheckpointError: The checkpoints do not show which of them is of this fit.
    """
    if saved.number != own.number:
        return False
    if is_own_job or any(one.trainer == own.trainer for one in of_job):
        return saved.trainer == own.trainer
    if saved.order != own.order:
        return False
    if len({one.trainer for one in of_job}) > 1:
        raise CheckpointError(
            f"An earlier job of the same checkpoint_s3_uri has a checkpoint of {saved}, and its script made several "
            f"Trainers; this is {own}. If they are the same, name the checkpoint as ckpt_path. If not, give this job a "
            "checkpoint_s3_uri of its own."
        )
    return True


def _place(frame: FrameType | None) -> str:
    frames = []
    while frame is not None:
        if not frame.f_code.co_filename.startswith(("<frozen ", _OWN_PACKAGE)):
            frames.append(frame)
        frame = frame.f_back
    # A program may be installed like a library.
    scripts = [one for one in frames if not one.f_code.co_filename.startswith(_LIBRARIES)] or frames
    lines = " > ".join(f"{os.path.basename(one.f_code.co_filename)}:{one.f_lineno}" for one in reversed(scripts))
    variables = {name: value for one in reversed(scripts) for name, value in _loop_variables(one)}
    shown = ", ".join(f"{name}={value!r}" for name, value in variables.items())
    return f"{lines} with {shown}" if shown else lines


def _loop_variables(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """Yield the plain variables of the loops that a frame is in."""
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
    except (OSError, SyntaxError, ValueError):  # compiled, typed in, or deleted since
        return []
    loops = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.For, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            targets = [one.target for one in getattr(node, "generators", [node])]
            names = [one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]
            loops.append((node.lineno, node.end_lineno or node.lineno, names))
    return loops


def _is_plain(value: Any) -> bool:
    """Return whether the text of a value is the same in every attempt."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (str, int, float, type))
