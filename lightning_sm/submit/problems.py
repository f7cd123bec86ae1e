"""The problems with a job. Each names the key to change, which determines the file and line to show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_sm._log import command_logger
from lightning_sm._text import count
from lightning_sm.errors import SubmitError

_LOG = command_logger(__name__)


class Position(NamedTuple):
    """The position of a key.

    Attributes:
        source: The job file, or an option.
        line: The line in the file; 0 for the whole file or an option.
    """

    source: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


class JobProblem(NamedTuple):
    """A reason why a job cannot be submitted.

    Attributes:
        key: The key of the job file to change, with dots between its parts; empty for the whole file.
        text: What is wrong, and what to change.
    """

    key: str
    text: str


@dataclass
class Findings:
    """The result of the checks.

    Attributes:
        problems: Reasons why the job cannot be submitted.
        warnings: Settings that are allowed but rarely intended.
        positions: The position of each key; the empty key stands for the file.
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
        raise_problems([(position_of(problem.key, self.positions), problem.text) for problem in self.problems])


def position_of(key: str, positions: Mapping[str, Position]) -> Position | None:
    """Return the position of a key, or of the nearest enclosing key if the key itself is not given."""
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
        # Indent continuation lines, so that readers and editors recognise the start of each problem.
        listed = "\n".join(text.replace("\n", "\n    ") for text in texts)
        raise SubmitError(f"{count(len(problems), 'problem')}; nothing was sent:\n{listed}")
