"""A step in the record of a run: the batches that it had, and all that decides what they contain. Pure rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_sm._text import count, listed
from lightning_sm.errors import ReplayError
from lightning_sm.record.batch_log import steps_of, unpack
from lightning_sm.record.events import LAUNCHER, Line, LocalPass, ReplacedSample, TrainedBatches, TrainingPass
from lightning_sm.record.runs import ProcessRecord, RunRecord


@dataclass(frozen=True)
class RecordedBatch:
    """A batch of one training loader.

    Attributes:
        begun: The pass that it is from.
        number: Its number in the pass, as ``begun.first_step`` counts.
        content_hash: Hash of its content.
        shard: Virtual shard and number in the shard, if the dataset is iterable.
        shard_pass: Index of the pass over the shards, which may restart within a pass.
        replacements: The index that replaced a sample, by the sample's number in the batch.
    """

    begun: TrainingPass
    number: int
    content_hash: int
    shard: tuple[int, int] | None = None
    shard_pass: int = 0
    replacements: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class RecordedStep:
    """A step of one rank.

    Attributes:
        run: Name of the run.
        attempt: The attempt of the job that trained on it, from 1.
        rank: The rank.
        fit: Which fit of the script.
        epoch: The epoch, from 0.
        step: Its number as loggers count it, from 0.
        numbers: Numbers in the epoch, from 0, of the Trainer's batches whose gradients it accumulated.
        batches: Those of the training loaders, for each of these numbers.
        local: The passes over the training loaders of the rank itself, if no data hosts served it.
        command: Command line of the script; empty if it is not known.
        packages: Versions of packages by name, on the rank's host.
        notes: What the reader should know of it.
    """

    run: str
    attempt: int
    rank: int
    fit: str
    epoch: int
    step: int
    numbers: Sequence[int]
    batches: Sequence[Sequence[RecordedBatch]]
    local: Sequence[LocalPass] = ()
    command: Sequence[str] = ()
    packages: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class _TrainersBatch:
    """A batch of the Trainer: the process that trained on it, the line that says so, and its place in the line."""

    process: ProcessRecord
    line: TrainedBatches
    place: int

    @property
    def number(self) -> int:
        return self.line.first + self.place


def find_step(
    run: RunRecord,
    step: int,
    *,
    rank: int = 0,
    epoch: int | None = None,
    attempt: int | None = None,
    fit: str | None = None,
) -> RecordedStep:
    """Find a step in the record of a run, that of the last attempt that trained on it unless another one is named.

    Args:
        run: The record, with its batches.
        step: Number of the step, as loggers count it, from 0.
        rank: The rank.
        epoch: The epoch, from 0; None: any.
        attempt: The attempt of the job, from 1; None: the last one that has the step.
        fit: Which fit of the script, by the name in the record; None: the only one that has the step.

    Raises:
        ReplayError: The record does not have the step, or not what is needed to rebuild it.
    """
    own = [record for record in run.records if record.head.rank == rank]
    if not own:
        ranks = sorted({record.head.rank for record in run.records if record.head.rank is not None})
        raise ReplayError(
            f"{run.source} has no record of rank {rank}, only of: {listed(list(map(str, ranks))) or 'no rank'}. Each "
            "rank writes its own: collect those of all hosts."
        )
    found = [
        one
        for process in own
        for one in _batches(process, step)
        if epoch in (None, one.line.epoch) and attempt in (None, process.attempt) and fit in (None, one.line.fit)
    ]
    if not found:
        raise ReplayError(_missing(run, rank, step, own))
    fits = sorted({one.line.fit for one in found})
    if len(fits) > 1:
        raise ReplayError(
            f"Step {step} was trained in {len(fits)} fits of the script: {listed(fits)} (number of the Trainer, and of "
            "its fit). Name one with --fit."
        )
    last = max(found, key=lambda one: (one.process.attempt, one.process.head.t))
    same = [one for one in found if one.process is last.process and one.line.epoch == last.line.epoch]
    numbers = sorted({one.number: one for one in same}.items())
    notes = []
    starts = len({(one.process.attempt, one.process.head.t) for one in found})
    if starts > 1:
        notes.append(
            f"{count(starts, 'start')} of the job trained on step {step}, because the state that the next one resumed "
            f"from was before it: this is attempt {last.process.attempt}, the last one."
        )
    later = [process.attempt for process in _skipped_in(own, step) if process.head.t > last.process.head.t]
    if later:
        notes.append(f"Attempt {later[-1]} left out step {step} (data_service.skip_steps), so it is not in the model.")
    launchers = [one for one in run.records if one.head.who == LAUNCHER and one.head.host == last.process.head.host]
    commands = [one.head.command for one in launchers if one.head.command and one.attempt <= last.process.attempt]
    return RecordedStep(
        run=run.name,
        attempt=last.process.attempt,
        rank=rank,
        fit=last.line.fit,
        epoch=last.line.epoch,
        step=step,
        numbers=[number for number, _ in numbers],
        batches=[list(_of_loaders(one, own)) for _, one in numbers],
        local=[
            line
            for line in _lines_beside(last, own)
            if isinstance(line, LocalPass) and (line.fit, line.epoch) == (last.line.fit, last.line.epoch)
        ],
        command=commands[-1] if commands else (),
        packages=list(last.process.head.packages.items()),
        notes=notes,
    )


def _skipped_in(own: Sequence[ProcessRecord], step: int) -> list[ProcessRecord]:
    """Return the processes that left out a step, in the order in which they ran."""
    found = [process for process in own if any(_leaves_out(line, step) for line in process.lines)]
    return sorted(found, key=lambda process: process.head.t)


def _leaves_out(line: Line, step: int) -> bool:
    if not isinstance(line, TrainingPass) or not line.num_skipped:
        return False
    first, last = line.skipped_steps
    return first <= step <= last


def _batches(process: ProcessRecord, step: int) -> Iterator[_TrainersBatch]:
    """Yield the batches of a step on which a process has trained."""
    for line in process.lines:
        if isinstance(line, TrainedBatches):
            steps = steps_of(line)
            if step in steps:
                yield from (_TrainersBatch(process, line, place) for place in range(line.num) if steps[place] == step)


def _lines_beside(found: _TrainersBatch, own: Sequence[ProcessRecord]) -> Iterator[Line]:
    """Yield all lines that the process of a batch has written."""
    head = found.process.head
    for record in own:
        if (record.attempt, record.head.t, record.head.host) == (found.process.attempt, head.t, head.host):
            yield from record.lines


def _of_loaders(found: _TrainersBatch, own: Sequence[ProcessRecord]) -> Iterator[RecordedBatch]:
    """Yield the batches of the training loaders that make up one of the Trainer's.

    Raises:
        ReplayError: The record does not say what a loader read.
    """
    line, head = found.line, found.process.head
    passes = [
        begun
        for begun in _lines_beside(found, own)
        if isinstance(begun, TrainingPass)
        and (begun.fit, begun.epoch) == (line.fit, line.epoch)
        and not begun.num_skipped
    ]
    for text, packed in line.hashes.items():
        loader = int(text)
        hashes = unpack(packed)
        of_loader = [begun for begun in passes if begun.index == loader]
        if not of_loader or found.place >= len(hashes):
            raise ReplayError(
                f"The record has batch {found.number} of epoch {line.epoch + 1}, but not the start of the pass over "
                f"training loader {loader} that it is from: the file {head.host}-{head.who}.jsonl is incomplete."
            )
        content_hash = hashes[found.place]
        if places := line.shards.get(text):
            pass_index, shard, offset = places[found.place]
            begun = next((one for one in reversed(of_loader) if one.pass_index == pass_index), of_loader[-1])
            yield RecordedBatch(begun, found.number, content_hash, (shard, offset), pass_index)
            continue
        num_steps = of_loader[0].num_steps
        # A CombinedLoader that cycles restarts a short loader: the Trainer counts on.
        pass_index, number = (0, found.number) if not num_steps else divmod(found.number, num_steps)
        begun_before = [one for one in of_loader if one.pass_index == pass_index and one.first_step <= number]
        if not begun_before:
            raise ReplayError(
                f"The record has batch {found.number} of epoch {line.epoch + 1}, but no pass over "
                f"{of_loader[0].loader} that reaches it."
            )
        replaced = {
            one.item: one.by
            for one in _lines_beside(found, own)
            if isinstance(one, ReplacedSample)
            and (one.fit, one.epoch, one.index) == (line.fit, line.epoch, loader)
            and (one.pass_index, one.step) == (pass_index, number)
        }
        yield RecordedBatch(begun_before[-1], number, content_hash, replacements=replaced)


def _missing(run: RunRecord, rank: int, step: int, own: Sequence[ProcessRecord]) -> str:
    skipped = _skipped_in(own, step)
    if skipped:
        return (
            f"Attempt {skipped[-1].attempt} of {run.name} left out step {step} (data_service.skip_steps), and the "
            "record has none that trained on it and fits what was asked for."
        )
    written: dict[int, list[int]] = {}  # first and last steps by attempt
    for process in own:
        for line in process.lines:
            if isinstance(line, TrainedBatches):
                written.setdefault(process.attempt, []).extend((steps_of(line)[0], steps_of(line)[-1]))
    if not written:
        return (
            f"{run.source} does not say which batches rank {rank} trained on: there is no file "
            f"HOST-rank-{rank}.batches.jsonl beside the others of its record."
        )
    ranges = [f"attempt {one} has steps {min(steps)} to {max(steps)}" for one, steps in sorted(written.items())]
    return (
        f"The record of {run.name} has no step {step} of rank {rank} that fits what was asked for: "
        f"{'; '.join(ranges)}. Steps count from 0, as in loggers. A process that was killed has not written its last "
        "seconds."
    )
