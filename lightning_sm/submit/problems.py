"""Problems of a job: each names the key that has to change, from which file and line of the job file follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_sm._log import command_logger
from lightning_sm._text import count
from lightning_sm.errors import SubmitError

_LOG = command_logger(__name__)


class Position(NamedTuple):
    """Where something is written.

    Attributes:
        source: The job file, or an option.
        line: The line of the file; 0 for all of it, and for an option.
    """

    source: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


class JobProblem(NamedTuple):
    """A reason why a job cannot be submitted.

    Attributes:
        key: Key of the job file that has to change, with dots between its parts; empty for the whole file.
        text: What is wrong, and what to change.
    """

    key: str
    text: str


@dataclass
class Findings:
    """Result of the checks.

    Attributes:
        problems: Why the job cannot be submitted, each with what to change.
        warnings: What is allowed but rarely intended.
        positions: Where each key is written; that of the file by the empty key.
    """

    problems: list[JobProblem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    positions: Mapping[str, Position] = field(default_factory=dict)

    def report(self) -> None:
        """Log the warnings, and raise all problems as one error.

        Raises:
            SubmitError: There are problems.
        """
        for warning in self.warnings:
            _LOG.warning("warning: %s", warning)
        raise_problems([(position_of(one.key, self.positions), one.text) for one in self.problems])


def position_of(key: str, positions: Mapping[str, Position]) -> Position | None:
    """Return where a key is written; if it is not, where the nearest key around it is."""
    while key and key not in positions:
        key = key.rpartition(".")[0]
    return positions.get(key)


def raise_problems(problems: Sequence[tuple[Position | None, str]]) -> None:
    """Raise all problems as one error, in the order of their lines in the job file.

    Raises:
        SubmitError: There are problems.
    """
    if problems:
        by_line = sorted(problems, key=lambda problem: problem[0].line if problem[0] else 0)
        texts = [text if position is None else f"{position}: {text}" for position, text in by_line]
        # What is not indented is a problem, for people and for editors that open its place.
        listed = "\n".join(text.replace("\n", "\n    ") for text in texts)
        raise SubmitError(f"{count(len(problems), 'problem')}; nothing was sent:\n{listed}")
