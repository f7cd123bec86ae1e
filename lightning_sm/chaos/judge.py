"""What a disturbed run ended with, against the undisturbed ones."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lightning_sm._text import count, listed
from lightning_sm.chaos.runs import LOG, RunEnding
from lightning_sm.errors import JobConfigError

# On more than two ranks a restart adds gradients up in another order (docs/lifecycle.md).
_EXACT_RANKS = 2
_ROUNDING = 1e-3
_MAX_SHOWN = 3
_MAX_LINES = 15


@dataclass(frozen=True)
class Difference:
    """A difference between what two runs have saved.

    Attributes:
        text: The difference in words.
        size: How large it is, relative to the largest absolute value of a tensor; infinity for what has no size.
        is_missing: Whether one of the runs lacks the file.
    """

    text: str
    size: float = math.inf
    is_missing: bool = False


@dataclass
class Judge:
    """The two undisturbed runs, and hence what can be compared.

    Args:
        first: One of them.
        second: The other.
        compare: Compares the files of two folders, as ``lightning_sm.chaos.models.differences`` does.

    Attributes:
        ignored: Keys of the model that differ between them.
        compares_names: Whether both have saved the same files: else a file that only one run has says nothing.
        metrics: The metrics that do not.
    """

    first: RunEnding
    second: RunEnding
    compare: Callable[[Path, Path], Mapping[str, Difference]]
    ignored: frozenset[str] = field(init=False)
    compares_names: bool = field(init=False)
    metrics: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        differing = self.compare(self.first.model, self.second.model)
        self.ignored = frozenset(differing)
        self.compares_names = not any(one.is_missing for one in differing.values())
        names = self.first.metrics.keys() & self.second.metrics.keys()
        self.metrics = frozenset(
            name for name in names if _is_same(self.first.metrics[name], self.second.metrics[name], 0.0)
        )

    @property
    def tolerance(self) -> float:
        """How far numbers may be apart, relative to their size."""
        return 0.0 if self.first.world_size <= _EXACT_RANKS else _ROUNDING

    def check(self) -> None:
        """Check that there is something to compare.

        Raises:
            JobConfigError: The undisturbed runs fail, or leave nothing that a disturbed one could have otherwise.
        """
        for ending in (self.first, self.second):
            if ending.exit_code != 0:
                raise JobConfigError(
                    f"The script fails without any fault, with exit code {ending.exit_code}. The end of "
                    f"{ending.folder / LOG}:\n{_last_lines(ending.folder / LOG)}"
                )
        if self.first.problems:
            raise JobConfigError(
                f"Without any fault, lightning-sm verify says: {self.first.problems[0]} See {self.first.folder}."
            )
        if not self.first.steps and not any(self.first.model.iterdir()):
            raise JobConfigError(
                "The script reports no steps (SageMakerCLI and SageMakerTrainer do) and saves nothing in SM_MODEL_DIR: "
                f"there is nothing that faults could change. See {self.first.folder}/log.txt."
            )

    def describe(self) -> str:
        """Say what the undisturbed runs have in common."""
        one = self.first
        same = [
            "steps" if one.steps else "",
            "samples" if one.was_served else "",
            f"{count(len(self.metrics), 'metric')} of {len(one.metrics)}" if one.metrics else "",
            ("what else is in the model" if self.ignored else "model") if any(one.model.iterdir()) else "",
        ]
        text = f"Twice the same, undisturbed, in {one.seconds:.0f} s: {listed([word for word in same if word])}."
        if self.ignored:
            text += (
                f" Not compared, because they differ between these runs: {listed(sorted(self.ignored), _MAX_SHOWN)}. "
                "For tensors, use seed_everything and trainer.deterministic."
            )
        if not self.compares_names:
            text += " Not all files have the same names in both, so that only those are compared that two runs have."
        if one.steps and not one.was_served:
            text += " No data hosts serve the training loaders, so that samples cannot be compared."
        if self.tolerance:
            text += (
                f" On {one.world_size} ranks, numbers may differ by rounding, up to {self.tolerance:g} of their size."
            )
        return text

    def differences(self, ending: RunEnding) -> list[str]:
        """Return what a disturbed run ended with otherwise, the most telling first.

        Where a restart lacked the random numbers of its step, metrics and model cannot be those of the other runs.
        """
        if ending.exit_code is None:
            return [f"did not end within {ending.seconds:.0f} s"]
        if ending.exit_code != 0:
            return [f"failed with exit code {ending.exit_code}" + (f": {ending.reason}" if ending.reason else "")]
        found = list(ending.problems)
        if ending.steps != self.first.steps:
            found.append(f"ends at step {ending.steps} instead of {self.first.steps}")
        if ending.was_served != self.first.was_served:
            found.append(f"data hosts served {'no' if self.first.was_served else 'its'} training loaders")
        if ending.is_approximate:
            return found
        for name in sorted(self.metrics):
            expected, value = self.first.metrics[name], ending.metrics.get(name)
            if name not in ending.metrics or not _is_same(expected, value, self.tolerance):
                found.append(f"metric {name} is {value} instead of {expected}")
        # Of a tensor, how far; of anything else, any difference counts.
        far = [
            f"{key}: {one.text}"
            for key, one in self.compare(self.first.model, ending.model).items()
            if key not in self.ignored and one.size > self.tolerance and (self.compares_names or not one.is_missing)
        ]
        found += far[:_MAX_SHOWN]
        if len(far) > _MAX_SHOWN:
            found.append(f"and {len(far) - _MAX_SHOWN} more differences between the models")
        return found


def compare_in_process(reference: Path, other: Path) -> dict[str, Difference]:
    """Compare the files of two folders in a process of its own, which loads torch.

    Raises:
        JobConfigError: It fails.
    """
    compared = subprocess.run(
        [sys.executable, "-m", "lightning_sm.chaos.models", str(reference), str(other)],
        capture_output=True,
        text=True,
        check=False,
    )
    if compared.returncode != 0:
        raise JobConfigError(f"The models {reference} and {other} cannot be compared:\n{compared.stderr}")
    return {key: Difference(**one) for key, one in json.loads(compared.stdout).items()}


def _last_lines(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-_MAX_LINES:])


def _is_same(value: float | None, other: float | None, tolerance: float) -> bool:
    if value is None or other is None:
        return value is other
    return math.isclose(value, other, rel_tol=tolerance, abs_tol=0.0)
