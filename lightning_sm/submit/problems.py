"""Problems of a job: each names the key that has to change, from which file and line of the job file follow."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_sm._log import command_logger
from lightning_sm._text import count
from lightning_sm.errors import SubmitError

_LOG = command_logger(__name__)


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
        positions: Where each key is written, as in ``job.yaml:4``; that of the file by the empty key.
    """

    problems: list[JobProblem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    positions: Mapping[str, str] = field(default_factory=dict)

    def report(self) -> None:
        """Log the warnings, and raise all problems as one error.

        Raises:
            SubmitError: There are problems.
        """
        for warning in self.warnings:
            _LOG.warning("warning: %s", warning)
        raise_problems([located(one.text, one.key, self.positions) for one in self.problems])


def located(text: str, key: str, positions: Mapping[str, str]) -> str:
    """Put before a text where its key is written; if it is not, where the nearest key around it is."""
    while key and key not in positions:
        key = key.rpartition(".")[0]
    return f"{positions[key]}: {text}" if key in positions else text


def raise_problems(problems: Sequence[str]) -> None:
    """Raise all problems as one error, in the order of their lines in the job file.

    Raises:
        SubmitError: There are problems.
    """
    if problems:
        # What is not indented is a problem, for people and for editors that open its place.
        listed = "\n".join(text.replace("\n", "\n    ") for text in sorted(problems, key=_line))
        raise SubmitError(f"{count(len(problems), 'problem')}; nothing was sent:\n{listed}")


def _line(problem: str) -> int:
    """Return the line that a problem is about; 0 for options, and for what concerns the whole file."""
    position = re.match(r".*?:(\d+): ", problem)
    return 0 if position is None else int(position[1])
