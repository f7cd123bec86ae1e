"""Rebuild the batches of a recorded step: start the user's script, and compare what it builds with the record."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Union

import msgspec

from lightning_sm._log import command_logger
from lightning_sm._version import installed_version
from lightning_sm.errors import ReplayError
from lightning_sm.job.hash_seed import hash_seed
from lightning_sm.job.redaction import HIDDEN
from lightning_sm.rebuild.messages import RebuildRequest, Rebuilt, RebuiltBatch, Refused, WantedBatch
from lightning_sm.rebuild.recorded_step import RecordedBatch, RecordedStep
from lightning_sm.record.events import to_json

_LOG = command_logger(__name__)

_ANSWER = msgspec.json.Decoder(Union[Rebuilt, Refused])  # noqa: UP007
# Notebooks replace sys.stderr by what has no descriptor.
_STDERR = 2
_COMPARED_PACKAGES = ("lightning-sm", "torch", "numpy", "pytorch-lightning", "lightning")
USUAL_CAUSES = (
    "Usual causes: other files than in the run, or another version of them; other arguments of the script, or code "
    "that has changed since; other package versions; random numbers that cannot be seeded (os.urandom, the time, a "
    "generator made in __getitem__); floating-point operations that differ between CPUs; attributes that the script "
    "has changed during the run."
)


@dataclass(frozen=True)
class ComparedBatch:
    """A batch of the record, and what was built for it.

    Attributes:
        recorded: The batch of the record.
        rebuilt: What was built.
    """

    recorded: RecordedBatch
    rebuilt: RebuiltBatch

    @property
    def is_equal(self) -> bool:
        """Whether both have the same content, bit for bit."""
        return self.recorded.content_hash == self.rebuilt.content_hash


@dataclass(frozen=True)
class RebuiltStep:
    """A step whose batches were built again.

    Attributes:
        step: The step of the record.
        output: The file with its batches, for ``torch.load``.
        batches: For each of the Trainer's batches, those of the training loaders.
        notes: What may be why a batch is another one than in the run.
    """

    step: RecordedStep
    output: Path
    batches: Sequence[Sequence[ComparedBatch]]
    notes: Sequence[str]

    @property
    def is_equal(self) -> bool:
        """Whether all batches are those of the run, bit for bit."""
        return all(batch.is_equal for of_batch in self.batches for batch in of_batch)


def rebuild(step: RecordedStep, output: Path, command: Sequence[str] = ()) -> RebuiltStep:
    """Build the batches of a step again, and write them to a file.

    Args:
        step: The step.
        output: The file, which ``torch.load`` reads.
        command: The script and its arguments; empty: those of the run.

    Raises:
        ReplayError: The script cannot be run, or the record or the script lacks what is needed.
    """
    if not all(step.batches):
        raise ReplayError(
            "The record does not say what the batches of this step contain: no data hosts built them, or training_step "
            "takes them from an iterator by itself (dataloader_iter). Without data hosts, --samples may list the "
            "samples. See docs/replay.md."
        )
    program, notes = _program(step, command)
    with tempfile.TemporaryDirectory(prefix="lightning_sm-") as folder:
        request = RebuildRequest(
            fit=step.fit,
            batches=[[_wanted(batch) for batch in of_batch] for of_batch in step.batches],
            output=str(output.absolute()),
            answer=str(Path(folder) / "answer.json"),
        )
        path = Path(folder) / "request.json"
        path.write_bytes(request.encode())
        own = [sys.executable, "-m", "lightning_sm.rebuild.script", str(path), *program]
        env = {**os.environ, **hash_seed(os.environ)}
        # What the script prints is not part of the answer.
        exit_code = subprocess.run(own, env=env, stdout=_STDERR, check=False).returncode
        try:
            answer = _ANSWER.decode(Path(request.answer).read_bytes())
        except FileNotFoundError as error:
            raise ReplayError(
                f"The script ended with exit code {exit_code} before it had built the batches (see above): "
                f"{shlex.join(program)}"
            ) from error
    if isinstance(answer, Refused):
        raise ReplayError(f"{answer.text}\nThe script: {shlex.join(program)}")
    batches = [
        [ComparedBatch(*pair) for pair in zip(recorded, rebuilt, strict=True)]
        for recorded, rebuilt in zip(step.batches, answer.batches, strict=True)
    ]
    found = [note for of_batch in answer.batches for one in of_batch for note in one.notes]
    return RebuiltStep(step, output, batches, list(dict.fromkeys([*notes, *_other_versions(step), *found])))


def _program(step: RecordedStep, command: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the script with its arguments, and what is to be said of them.

    Raises:
        ReplayError: The record has no command line of a Python script that exists here.
    """
    given = list(command) or _without_interpreter(list(step.command))
    if not given:
        raise ReplayError(
            "The record does not say which Python script ran. Give it with its arguments: lightning-sm replay RUN "
            f"--step {step.step} -- train.py --batch_size=32"
        )
    if given[0] != "-m" and not Path(given[0]).is_file():
        raise ReplayError(
            f"The script {given[0]} does not exist here. Call lightning-sm replay from the folder in which the job "
            f"was started, or give the script: lightning-sm replay RUN --step {step.step} -- train.py ..."
        )
    hidden = [argument for argument in given if HIDDEN in argument] if not command else []
    note = f"The record hides the values of secret arguments, which the script got as {HIDDEN}: {', '.join(hidden)}."
    return given, [note] if hidden else []


def _without_interpreter(command: list[str]) -> list[str]:
    if command and Path(command[0]).name.startswith("python"):
        command = command[1:]
        while command and command[0].startswith("-") and command[0] != "-m":
            command = command[1:]
    is_python = command[:1] == ["-m"] or (bool(command) and command[0].endswith(".py"))
    return command if is_python else []


def _wanted(batch: RecordedBatch) -> WantedBatch:
    return WantedBatch(to_json(batch.begun), batch.number, batch.shard, batch.shard_pass, dict(batch.replacements))


def _other_versions(step: RecordedStep) -> list[str]:
    recorded = dict(step.packages)
    own = {name: installed_version(name) for name in _COMPARED_PACKAGES if name in recorded}
    different = [f"{name} {own[name]} here, {recorded[name]} in the run" for name in own if own[name] != recorded[name]]
    return [f"Package versions differ: {'; '.join(different)}."] if different else []
