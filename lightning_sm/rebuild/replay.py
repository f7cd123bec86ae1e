"""``lightning_sm.replay``: a batch of a recorded run, in Python."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_sm.errors import ReplayError
from lightning_sm.rebuild.recorded_step import find_step
from lightning_sm.rebuild.run import USUAL_CAUSES, rebuild
from lightning_sm.record.runs import read_run


class ReplayedStep(NamedTuple):
    """A step of a recorded run.

    Attributes:
        batch: What ``training_step`` got, before the hooks for its transfer to the device; a list of these, if the step
            accumulated the gradients of several batches.
        indices: Indices of its samples, a list; a dict of lists by name of the loader, if there are several training
            loaders; empty for an iterable dataset. A list of these, if the step has several batches.
    """

    batch: Any
    indices: Any


def replay(
    run: str | os.PathLike[str],
    step: int,
    *,
    rank: int = 0,
    epoch: int | None = None,
    attempt: int | None = None,
    command: Sequence[str] = (),
    must_match: bool = True,
) -> ReplayedStep:
    """Build a batch of a recorded run again, from its record, the script and its data.

    The script runs in another process, up to its ``fit``; see docs/replay.md. Classes of a batch that the script itself
    defines must exist under the same name here.

    Args:
        run: Folder or ``output.tar.gz`` of the run.
        step: The step as loggers count it, from 0.
        rank: The rank.
        epoch: The epoch, from 1, where the step is in several.
        attempt: The attempt of the job, from 1. Default: the last one that trained on the step.
        command: The script and its arguments. Default: those of the run.
        must_match: Whether it is an error if the batch is another one than in the run.

    Raises:
        ReplayError: The record or the script lacks what is needed, or the batch is another one.
        JobConfigError: The record cannot be read.
    """
    recorded = find_step(
        read_run(Path(run), with_batches=True),
        step,
        rank=rank,
        epoch=None if epoch is None else epoch - 1,
        attempt=attempt,
    )
    with tempfile.TemporaryDirectory(prefix="lightning_sm-") as folder:
        rebuilt = rebuild(recorded, Path(folder) / "batches.pt", command)
        batches = torch.load(rebuilt.output, weights_only=False)["batches"]  # written by the process that we started
    if must_match and not rebuilt.is_equal:
        raise ReplayError(
            f"The batch of step {step} that was built here is not what the run trained on. "
            f"{' '.join([*rebuilt.notes, USUAL_CAUSES])}"
        )
    indices = []
    for of_batch in rebuilt.batches:
        by_loader = {one.recorded.begun.loader: one.rebuilt.indices for one in of_batch}
        indices.append(by_loader if len(by_loader) > 1 else next(iter(by_loader.values())))
    return ReplayedStep(batches[0], indices[0]) if len(batches) == 1 else ReplayedStep(batches, indices)
