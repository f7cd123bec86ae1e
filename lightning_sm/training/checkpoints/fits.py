"""Which of a script's fits a checkpoint is from, so that a script with several Trainers resumes each from its own.

A restarted script need not make the Trainers that it made before: it may skip one whose result it finds. So a Trainer
is known by the place in the script that makes it, with the variables of the ``for`` loops around; only Trainers that
share both are numbered.
"""

from __future__ import annotations

import ast
import inspect
import os
import site
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from lightning_sm.errors import CheckpointError

_LIBRARIES = tuple(folder + os.sep for folder in (os.path.dirname(os.__file__), *site.getsitepackages()))
_OWN_PACKAGE = str(Path(__file__).parents[2]) + os.sep
_SHOWN_CHARACTERS = 60
# How many Trainers this process has made at each place.
_made: Counter[str] = Counter()


@dataclass(frozen=True)
class MadeTrainer:
    """A Trainer of a script.

    Attributes:
        place: The lines of the script that made it, the outermost first, and the variables of the loops around them.
        repeat: Its number among the Trainers that were made at this place, from 1.
        order: Its number among all Trainers of the script, from 1.
    """

    place: str
    repeat: int
    order: int

    @classmethod
    def here(cls) -> MadeTrainer:
        """Register the Trainer that the script is making."""
        place = _place(inspect.currentframe())
        _made[place] += 1
        return cls(place, _made[place], _made.total())

    def __str__(self) -> str:
        number = f", number {self.repeat} there" if self.repeat > 1 else ""
        return f"the Trainer of {self.place}{number}"


@dataclass(frozen=True)
class Fit:
    """A fit of a script.

    Attributes:
        trainer: Its Trainer.
        number: Its number among the fits of this Trainer, from 1.
        model: Class and size of the model.
    """

    trainer: MadeTrainer
    number: int
    model: str

    def saved(self) -> dict[str, Any]:
        """Convert to plain values, for a checkpoint."""
        return asdict(self)

    @classmethod
    def of(cls, saved: Any) -> Fit | None:
        """Return the fit that a checkpoint states; None if it states none."""
        try:
            return cls(**{**saved, "trainer": MadeTrainer(**saved["trainer"])})
        except (KeyError, TypeError):
            return None

    def __str__(self) -> str:
        return f"fit {self.number} of {self.trainer}"


def model_size(model: torch.nn.Module) -> str:
    """Return the class and the size of a model, to tell models apart."""
    parameters = [one for one in model.parameters() if not torch.nn.parameter.is_lazy(one)]
    return f"{type(model).__qualname__} with {sum(one.numel() for one in parameters)} parameters"


@dataclass(frozen=True)
class StatedFit:
    """What a checkpoint states about its origin.

    Attributes:
        path: The checkpoint.
        job: The name of the job that wrote it.
        fit: Its fit.
    """

    path: Path
    job: str | None
    fit: Fit | None


def are_of_fit(candidates: Sequence[StatedFit], own: Fit, job: str | None) -> list[bool]:
    """Return for each checkpoint whether a fit may resume from it; one that states no fit is for any.

    In the same job, the script is the same: the place of the Trainer decides. The script of an earlier job may have
    been edited since, which moves its lines: there the order of the Trainers decides, unless the place is found.

    Args:
        candidates: The checkpoints, none of which is of a job with another S3 address.
        own: The fit that is to resume.
        job: The name of its job.

    Raises:
        CheckpointError: The checkpoints do not show which of them is of this fit.
    """
    of_fit = []
    for one in candidates:
        if one.fit is None:
            of_fit.append(True)
        elif one.fit.number != own.number:
            of_fit.append(False)
        elif one.job == job is not None:
            is_own = _is_same_trainer(one.fit, own)
            if is_own:
                _check_model(one, one.fit, own, candidates)
            of_fit.append(is_own)
        else:
            of_fit.append(_is_same_after_edit(one, one.fit, own, candidates))
    return of_fit


def is_unknown_here(fit: Fit | None) -> bool:
    """Return whether this process has not made the Trainer of a fit: an earlier attempt has."""
    return fit is not None and _made[fit.trainer.place] < fit.trainer.repeat


def _is_same_trainer(fit: Fit, own: Fit) -> bool:
    return (fit.trainer.place, fit.trainer.repeat) == (own.trainer.place, own.trainer.repeat)


def _check_model(one: StatedFit, fit: Fit, own: Fit, candidates: Sequence[StatedFit]) -> None:
    """Refuse a checkpoint of another model if one of this model is from another Trainer of the same place."""
    if fit.model == own.model:
        return
    for other in candidates:
        if other.job != one.job or other.fit is None or other.fit.model != own.model:
            continue
        if other.fit.trainer.place == own.trainer.place:
            raise CheckpointError(
                f"{own} trains {own.model}, but its checkpoint {one.path} is of {fit.model}, and {other.path}, of "
                f"{other.fit}, is of {own.model}: an earlier attempt made these Trainers in another order. Make all of "
                "them in each attempt (a fit that has ended does not train again), or each on a line of its own."
            )


def _is_same_after_edit(one: StatedFit, fit: Fit, own: Fit, candidates: Sequence[StatedFit]) -> bool:
    others = [other.fit for other in candidates if other.job == one.job and other.fit is not None]
    if any(_is_same_trainer(other, own) for other in others):
        return _is_same_trainer(fit, own)
    if fit.trainer.order != own.trainer.order:
        return False
    if len({(other.trainer.place, other.trainer.repeat) for other in others}) > 1:
        raise CheckpointError(
            f"{one.path} is from {fit} in job {one.job!r}, whose script made several Trainers; this is {own}. If they "
            "are the same, name the checkpoint as ckpt_path. If not, give this job a checkpoint_s3_uri of its own."
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
    shown = ", ".join(f"{name}={value}" for name, value in variables.items())
    return f"{lines} with {shown}" if shown else lines


def _loop_variables(frame: FrameType) -> Iterator[tuple[str, str]]:
    """Yield the plain variables of the loops and comprehensions that a frame is in."""
    for first, last, names in _loops(frame.f_code.co_filename):
        if first <= frame.f_lineno <= last:
            for name in names:
                value = frame.f_locals.get(name)
                if name in frame.f_locals and _is_plain(value):
                    text = repr(value)
                    is_long = len(text) > _SHOWN_CHARACTERS
                    yield name, f"{text[:_SHOWN_CHARACTERS]}... ({zlib.crc32(text.encode()):08x})" if is_long else text


@cache
def _loops(file: str) -> list[tuple[int, int, list[str]]]:
    """Return the first line, the last line and the variables of each loop in a file."""
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):  # compiled, typed in, or deleted since
        return []
    loops = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.For, ast.AsyncFor)):
            targets = [node.target]
        elif isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            targets = [one.target for one in node.generators]
        else:
            continue
        names = [one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]
        loops.append((node.lineno, node.end_lineno or node.lineno, names))
    return loops


def _is_plain(value: Any) -> bool:
    """Return whether the text of a value is the same in every attempt."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (str, int, float))
