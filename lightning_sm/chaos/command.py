"""``lightning-sm local --chaos N``: a script undisturbed, and under faults that are drawn."""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path

from lightning_sm._arguments import CommandParser, positive_whole_number
from lightning_sm._text import count
from lightning_sm.chaos.draws import Course, Targets, at_step, draw
from lightning_sm.chaos.judge import Judge, compare_in_process
from lightning_sm.chaos.runs import LOG, RunCommand, RunEnding, course_of
from lightning_sm.emulator import options as local
from lightning_sm.emulator.container_hosts import ContainerRuntime
from lightning_sm.emulator.faults import Kind
from lightning_sm.emulator.run_folders import create_run_folder, default_parent, run_name
from lightning_sm.emulator.spec import ClusterSpec
from lightning_sm.errors import JobConfigError, OutputDirectoryError
from lightning_sm.job.redaction import shown_arguments
from lightning_sm.job.variables import MAX_RESTARTS

# Where the user has set none: as many as a draw can need.
_RESTARTS = 3
# How draws end: with the model of the undisturbed run, with its steps and samples, without any fault, or otherwise.
_SAME, _SAME_STEPS, _NO_FAULT, _FAILED = "same", "same steps", "no fault", "FAILED"
# Interruptions wait for uploads, and each attempt imports and loads everything again.
_PATIENCE = 4
_PATIENCE_S = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the option to the parser of ``lightning-sm local``."""
    parser.add_argument(
        "--chaos",
        type=positive_whole_number,
        metavar="N",
        help="run the script twice undisturbed, then N times with faults drawn at random (from --seed), and check that "
        "it always ends with the same steps, samples, metrics and model",
    )


def main(options: argparse.Namespace, parser: CommandParser) -> int:
    """Run the draws, and return the exit code: 0 if all of them ended as the undisturbed run did, else 1.

    Args:
        options: The options of ``lightning-sm local``.
        parser: Their parser.

    Raises:
        JobConfigError: Options contradict each other, or the script cannot be compared.
    """
    for name in ("fault", "clean", "discard", "max_attempts", "retries", "checkpoints"):
        if getattr(options, name):
            raise JobConfigError(
                f"--chaos draws the faults, gives each run folders of its own, and keeps those that differ: leave out "
                f"--{name.replace('_', '-')}."
            )
    spec = local.job_of(options).spec
    seed = secrets.randbelow(10**6) if options.seed is None else options.seed
    parent = Path(options.base_dir).expanduser() if options.base_dir else default_parent()
    folder = parent / run_name("chaos")
    variables = {MAX_RESTARTS.name: str(_RESTARTS), **spec.environment}
    own = {
        "chaos": None,
        "seed": None,
        "base_dir": None,
        "env": [f"{name}={value}" for name, value in variables.items()],
        "command": [],
    }
    command = RunCommand(
        parser.words(argparse.Namespace(**{**vars(options), **own})),
        options.command,
    )
    try:
        lock = create_run_folder(folder)
    except OSError as error:
        raise OutputDirectoryError(f"{error.filename or folder}: cannot be written ({error.strerror}).") from error
    try:
        chaos = _Chaos(command, folder, seed)
        targets = _targets(spec, chaos.undisturbed, MAX_RESTARTS.read(variables), is_image=bool(options.image))
        for number in range(1, options.chaos + 1):
            chaos.run(number, targets, options.chaos)
    except KeyboardInterrupt:
        _say(f"Interrupted. Folders and logs until now: {folder}")
        raise
    finally:
        os.close(lock)
    _say(chaos.describe())
    if not chaos.num_failed:
        shutil.rmtree(folder)
    return 1 if chaos.num_failed else 0


class _Chaos:
    """The runs of one script.

    Args:
        command: Its command.
        folder: Folder of all runs.
        seed: Seed of the draws.

    Attributes:
        undisturbed: The first undisturbed run.

    Raises:
        JobConfigError: It fails without faults, or leaves nothing to compare.
    """

    def __init__(self, command: RunCommand, folder: Path, seed: int) -> None:
        self._command = command
        self._folder = folder
        self._seed = seed
        self._verdicts = Counter[str]()
        _say(f"Chaos with seed {seed}, in {folder}")
        first, second = (command.run(folder / f"undisturbed-{number}", seed, ()) for number in (1, 2))
        self.undisturbed: RunEnding = first
        self._judge = Judge(first, second, compare_in_process)
        self._judge.check()
        self._course: Course = course_of(first)
        _say(self._judge.describe())

    @property
    def num_failed(self) -> int:
        """How many draws did not end as the undisturbed run did."""
        return self._verdicts[_FAILED]

    def run(self, number: int, targets: Targets, of: int) -> None:
        """Run one draw, and say how it ended."""
        faults = draw(self._seed, number, self._course, targets)
        folder = self._folder / f"draw-{number}"
        ending = self._run(faults, folder, number)
        differences = self._judge.differences(ending)
        verdict = _SAME
        if differences:
            verdict = _FAILED
        elif not ending.happened:
            verdict = _NO_FAULT
        elif ending.is_approximate:
            verdict = _SAME_STEPS
        self._verdicts[verdict] += 1
        shown = [fault if fault in ending.happened or not ending.happened else f"({fault})" for fault in faults]
        _say(f"{number:{len(str(of))}} of {of}  {ending.seconds:5.1f} s  {verdict}  {' '.join(shown)}")
        if differences:
            _say("\n".join(f"  {difference}" for difference in differences))
            self._shrink(faults, ending, number)
        else:
            shutil.rmtree(folder)

    def describe(self) -> str:
        """Say how the draws ended."""
        num_draws, without_fault = sum(self._verdicts.values()), self._verdicts[_NO_FAULT]
        draws = f"{count(num_draws, 'draw')} (seed {self._seed})"
        lines = []
        if self._verdicts[_SAME_STEPS]:
            lines.append(
                f"{_SAME_STEPS}: a restart lacked the random numbers of its step, because steps are short "
                '(docs/lifecycle.md, "The last step"), so that only steps and samples could be compared. Make steps '
                "last 0.1 s for this test."
            )
        if without_fault:
            lines.append(f"{_NO_FAULT}: {count(without_fault, 'draw')} ended before the faults were due.")
        if self.num_failed:
            lines.append(f"{self.num_failed} of {draws} ended otherwise. Folders and logs: {self._folder}")
        else:
            lines.append(f"{num_draws - without_fault} of {draws} ended as the undisturbed run did.")
        return "\n".join(lines)

    def _run(self, faults: Sequence[str], folder: Path, number: int) -> RunEnding:
        limit_s = _PATIENCE_S + _PATIENCE * self.undisturbed.seconds * (1 + len(faults))
        return self._command.run(folder, self._seed_of(number), faults, limit_s)

    def _shrink(self, faults: tuple[str, ...], ending: RunEnding, number: int) -> None:
        """Find the fewest faults of a draw with which it still does not end as it should, and say how to repeat it."""
        # At the steps at which they happened: that repeats better than seconds do.
        fixed = tuple(at_step(fault, ending.happened.get(fault)) for fault in faults)
        tries = dict.fromkeys([*_smaller(fixed), fixed, faults])
        for attempt, tried in enumerate(tries, 1):
            folder = self._folder / f"draw-{number}-again-{attempt}"
            differences = self._judge.differences(self._run(tried, folder, number))
            if differences:
                found = "Again:" if len(tried) == len(faults) else "With fewer faults, too:"
                _say(f"  {found} {' '.join(tried)}: {differences[0]}")
                self._say_command(tried, number)
                return
            shutil.rmtree(folder)
        _say("  It did not happen again, neither with the same faults nor with fewer: it depends on timing.")
        self._say_command(faults, number)

    def _say_command(self, faults: Sequence[str], number: int) -> None:
        words = self._command.arguments(self._folder / "repeated", self._seed_of(number), faults)
        _say(f"  The log is {self._folder / f'draw-{number}' / LOG}. To repeat it:")
        _say(f"    {shlex.join(['lightning-sm', *shown_arguments(words)])}")

    def _seed_of(self, number: int) -> int:
        # So that each draw assigns the hosts otherwise.
        return self._seed * 10_000 + number


def _smaller(faults: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for how_many in range(1, len(faults)):
        yield from combinations(faults, how_many)


def _targets(spec: ClusterSpec, undisturbed: RunEnding, restarts: int, *, is_image: bool) -> Targets:
    positions = {
        f"{group.name}-{number}": group.name for group in spec.groups for number in range(1, group.num_hosts + 1)
    }
    unsupported = set(ContainerRuntime.unsupported_faults) if is_image else set()
    return Targets(
        trainers=[position for position, group in positions.items() if group not in undisturbed.data_groups],
        data_hosts=[position for position, group in positions.items() if group in undisturbed.data_groups],
        devices=spec.devices or 1,
        max_restarts=restarts,
        kinds=frozenset(set(Kind) - unsupported),
    )


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
