"""Problems of a job: each names the key that has to change, from which file and line of the job file follow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_sm._log import command_logger
from lightning_sm._text import count
from lightning_sm.errors import SubmitError

_LOG = command_logger(__name__)


class FilePosition(NamedTuple):
    """Where a value is written.

    Attributes:
        source: Path of the job file, or the option.
        line: Line of the file, from 1; None for an option, and for what the file lacks.
    """

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(frozen=True)
class JobProblem:
    """Why a job cannot be submitted.

    Attributes:
        key: Key of the job file that has to change, with dots between its parts; empty for the whole file.
        text: What is wrong, and what to change.
        also: Other keys that the text is about.
        position: Where that is; None for where the key is.
    """

    key: str
    text: str
    also: tuple[str, ...] = ()
    position: FilePosition | None = None


@dataclass
class JobSource:
    """What the values of a job were read from.

    Attributes:
        positions: Where each value is written, by key; that of the file by the empty key.
        problems: What the reader found. The job has defaults in place of the values that these are about.
        unread: Keys whose values could not be read.
    """

    positions: dict[str, FilePosition] = field(default_factory=dict)
    problems: list[JobProblem] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)

    def position(self, key: str) -> FilePosition | None:
        """Return where a key is written; if it is not, where the nearest key around it is."""
        while key and key not in self.positions:
            key = key.rpartition(".")[0]
        return self.positions.get(key)

    def is_consequence(self, problem: JobProblem) -> bool:
        """Return whether a problem is about a value that could not be read, or about what depends on it."""
        return any(_is_related(key, other) for key in (problem.key, *problem.also) for other in self.unread)


@dataclass
class Findings:
    """Result of the checks.

    Attributes:
        problems: Why the job cannot be submitted, each with what to change.
        warnings: What is allowed but rarely intended.
        source: What the job was read from.
    """

    problems: list[JobProblem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    source: JobSource = field(default_factory=JobSource)

    def add(self, problems: Iterable[JobProblem]) -> None:
        """Add problems, except for those that only follow from a value that could not be read."""
        self.problems += [problem for problem in problems if not self.source.is_consequence(problem)]

    def report(self) -> None:
        """Log the warnings, and raise all problems as one error.

        Raises:
            SubmitError: There are problems.
        """
        for warning in self.warnings:
            _LOG.warning("warning: %s", warning)
        raise_problems(self.problems, self.source)


def raise_problems(problems: Iterable[JobProblem], source: JobSource) -> None:
    """Raise all problems as one error, in the order of the file.

    Raises:
        SubmitError: There are problems.
    """
    found = [(problem.position or source.position(problem.key), problem.text) for problem in problems]
    ordered = dict.fromkeys(sorted(found, key=lambda one: _order(one[0])))
    if ordered:
        lines = [text if position is None else f"{position}: {text}" for position, text in ordered]
        # What is not indented is a problem, for people and for editors that open its place.
        listed = "\n".join(line.replace("\n", "\n    ") for line in lines)
        raise SubmitError(f"{count(len(ordered), 'problem')}; nothing was sent:\n{listed}")


def _order(position: FilePosition | None) -> tuple[bool, int]:
    """Of the file, by line; then what is missing there or in an option."""
    line = None if position is None else position.line
    return line is None, line or 0


def _is_related(key: str, other: str) -> bool:
    """Return whether two keys are the same, or one is below the other; the whole file is that of the empty key."""
    return not key or not other or f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")
