"""Whether each sample was trained on exactly once: what the passes in a run's record add up to. Pure rules.

The model at the end has seen what its last process trained on, and what each earlier one did up to the state from which
the next one resumed. A step that was trained on after that state was not lost and is not repeated: the state from which
its successor resumed lacks it. So a run is a chain of stretches of epochs, each of which ends where the next begins.
Positions count samples in the order of an epoch (batches, where the user's code makes them): all ranks together read a
contiguous part of it in each step, see ``lightning_sm.data.plan``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lightning_sm._text import count, listed
from lightning_sm.data.plan.order import SequentialOrder, ShuffledOrder
from lightning_sm.record.events import End, Reached, ReplacedSample, TrainingPass
from lightning_sm.record.runs import ProcessRecord, RunRecord

_NUM_SHOWN = 5


@dataclass
class RecordedPass:
    """A pass of one rank, as far as its process has recorded it.

    Attributes:
        begun: Its start.
        attempt: The attempt of the job, from 1.
        process: When its process began to write, in seconds since the Unix epoch; tells restarts apart.
        process_rank: Global rank of the process.
        reached: Batches of the epoch on which it has trained by the last line that says so.
        is_complete: Whether the process was not killed in it: it has trained on no more than that.
        replaced: Samples that could not be read, in the order of their batches.
    """

    begun: TrainingPass
    attempt: int
    process: float
    process_rank: int
    reached: int
    is_complete: bool = False
    replaced: list[ReplacedSample] = field(default_factory=list)

    @property
    def unit(self) -> int:
        """Positions in the order that all ranks together read in a step."""
        return (self.begun.batch_size or 1) * self.begun.world_size

    @property
    def start(self) -> int:
        """Its first position."""
        return self.position(self.begun.first_step)

    @property
    def stop(self) -> int:
        """The position behind the last one that it is recorded to have trained on."""
        return self.position(self.reached)

    @property
    def end(self) -> int | None:
        """The position at which the epoch is complete; None if that is unknown."""
        steps = [number for number in (self.begun.num_steps, self.begun.stop_step) if number is not None]
        return self.position(min(steps)) if steps else None

    @property
    def size(self) -> int | None:
        """Positions in the order of the epoch; None if that is unknown."""
        if self.begun.order in ("sequential", "shuffled"):
            return self.begun.num_samples
        return None if self.begun.num_steps is None else self.position(self.begun.num_steps)

    def position(self, step: int) -> int:
        """Return the position before a step."""
        begun = self.begun
        if begun.order in ("sequential", "shuffled") and begun.num_samples is not None and not begun.drop_last:
            return min(step * self.unit, begun.num_samples)
        return step * self.unit

    @property
    def order(self) -> dict[str, Any]:
        """All that decides which sample has which position."""
        begun = self.begun
        names = ["data", "order", "pass_index"]
        if begun.order == "shuffled":
            names += ["seed"]
        elif begun.order in ("sampler", "batch_sampler"):
            names += ["digest"]
        elif begun.order == "shards":
            names += ["world_size", "batch_size"]
        return {name: getattr(begun, name) for name in names}

    @property
    def has_batches(self) -> bool:
        """Whether positions are those of batches, which the user's code makes."""
        return self.begun.batch_size is None or self.begun.order == "shards"

    def samples(self, start: int, stop: int) -> str:
        """Name the samples at some positions of the order."""
        begun = self.begun
        are_batches = self.has_batches
        many = count(stop - start, "batch", "batches") if are_batches else count(stop - start, "sample")
        where = f"{many} at positions {start} to {stop - 1} of the order"
        if stop - start == 1:
            where = f"the {'batch' if are_batches else 'sample'} at position {start} of the order"
        if begun.num_samples is None or begun.order not in ("sequential", "shuffled"):
            return where
        order: Any = SequentialOrder(begun.num_samples)
        if begun.order == "shuffled":
            order = ShuffledOrder(
                begun.num_samples,
                seed=begun.seed,
                epoch=begun.epoch,
                pass_index=begun.pass_index,
                salt=f"train {begun.index}",
            )
        positions = np.arange(start, min(stop, start + _NUM_SHOWN, begun.num_samples))
        indices = ", ".join(map(str, order[positions].tolist()))
        more = ", ..." if stop - start > len(positions) else ""
        return f"{where} (indices {indices}{more})"


@dataclass
class Stretch:
    """A contiguous part of an epoch's order that is in the model, or that the user has left out of it.

    Attributes:
        recorded: The pass of rank 0 that trained on it, or stands for what it left out.
        start: Its first position.
        stop: The position behind its last one.
    """

    recorded: RecordedPass
    start: int
    stop: int

    @property
    def epoch(self) -> int:
        """The epoch, from 0."""
        return self.recorded.begun.epoch

    @property
    def is_skipped(self) -> bool:
        """Whether the user has left it out (``data_service.skip_steps``)."""
        return self.recorded.begun.num_skipped > 0


@dataclass
class LoaderCoverage:
    """What a fit has read of one training loader.

    Attributes:
        fit: Which fit of the script.
        loader: Name of the loader.
        dataset: Description of its dataset.
        num_starts: Processes of rank 0 that trained on it.
        stretches: What the model has seen, and what the user has left out, in order.
        problems: Samples that were lost, repeated or read in another order; the first one first.
        notes: What is as it should be, but worth knowing.
        num_undone: Positions that were trained on once more, because the state that a restart resumed from lacks them.
        replaced: By epoch: indices of samples that could not be read, so that others took their places.
    """

    fit: str
    loader: str
    dataset: str
    num_starts: int = 0
    stretches: list[Stretch] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    num_undone: int = 0
    replaced: dict[int, list[int]] = field(default_factory=dict)

    @property
    def complete_epochs(self) -> list[int]:
        """The epochs, from 0, that were read to their end."""
        last = {stretch.epoch: stretch for stretch in self.stretches}
        return [epoch for epoch, stretch in last.items() if _is_at_end(stretch)]

    @property
    def num_skipped(self) -> int:
        """Positions that the user has left out."""
        return sum(stretch.stop - stretch.start for stretch in self.stretches if stretch.is_skipped)


def cover(run: RunRecord) -> list[LoaderCoverage]:
    """Return what the fits of a run have read of their training loaders; empty if data hosts served none.

    Args:
        run: The record of the run.
    """
    groups: defaultdict[tuple[str, str], list[RecordedPass]] = defaultdict(list)
    for record in run.records:
        for one in _passes(record):
            groups[one.begun.fit, one.begun.loader].append(one)
    return [_Chain(passes).coverage for passes in groups.values()]


def _passes(record: ProcessRecord) -> Iterator[RecordedPass]:
    """Yield the passes of a process, with what it has reached in each."""
    # Those of one epoch, of which each continues the one before.
    running: dict[tuple[str, str], list[RecordedPass]] = {}
    for line in record.lines:
        if isinstance(line, TrainingPass):
            reached = line.first_step + line.num_skipped
            one = RecordedPass(line, record.attempt, record.head.t, record.head.rank or 0, reached)
            earlier = running.setdefault((line.fit, line.loader), [])
            if earlier and not _continues(one, earlier[-1]):
                yield from _completed(earlier)  # the process has lived on
                earlier.clear()
            earlier.append(one)
        elif isinstance(line, ReplacedSample):
            passes = running.get((line.fit, line.loader), ())
            of = next((one for one in reversed(passes) if one.begun.first_step <= line.step), None)
            if of is not None and (of.begun.epoch, of.begun.pass_index) == (line.epoch, line.pass_index):
                of.replaced.append(line)
        elif isinstance(line, Reached):
            for passes in running.values():
                _note_reached(passes, line)
        elif isinstance(line, End):
            for passes in running.values():
                yield from _completed(passes)
            running.clear()
    for passes in running.values():
        yield from passes


def _continues(one: RecordedPass, before: RecordedPass) -> bool:
    """Return whether a pass continues an epoch, as that over an uneven last step does."""
    same = (one.begun.epoch, one.begun.pass_index) == (before.begun.epoch, before.begun.pass_index)
    return same and one.begun.first_step >= before.begun.first_step


def _completed(passes: Iterable[RecordedPass]) -> Iterator[RecordedPass]:
    for one in passes:
        one.is_complete = True
        yield one


def _note_reached(passes: Sequence[RecordedPass], line: Reached) -> None:
    """Count an epoch's batches for the passes that they are of: one begins while the last step of the other runs."""
    stop = line.num_batches
    for one in reversed(passes):
        if (one.begun.fit, one.begun.epoch) == (line.fit, line.epoch):
            if not one.begun.num_skipped:
                one.reached = max(one.reached, stop)
            stop = min(stop, one.begun.first_step)


class _Chain:
    """The stretches of one loader in one fit, joined in the order in which its processes ran.

    Args:
        passes: Those of all ranks, at least one.
    """

    def __init__(self, passes: Sequence[RecordedPass]) -> None:
        first = passes[0].begun
        self.coverage = LoaderCoverage(first.fit, first.loader, first.dataset)
        self._passes = passes
        own = sorted((one for one in passes if one.process_rank == 0), key=lambda one: (one.process, one.begun.t))
        self.coverage.num_starts = len({one.process for one in own})
        if not own:
            self._problem(f"There is no record of rank 0, only of {_names(passes)}: collect those of all hosts.")
        for one in own:
            self._join(one)
        for stretch in self.coverage.stretches:
            self._check_ranks(stretch)
            self._note_replaced(stretch)
            if stretch.is_skipped and stretch.stop > stretch.start:
                self.coverage.notes.append(_skipped(stretch))
        for epoch, indices in self.coverage.replaced.items():
            self.coverage.notes.append(_replaced(epoch, indices))
        if self.coverage.stretches:
            self._describe_end(self.coverage.stretches[-1])

    def _problem(self, text: str) -> None:
        if text not in self.coverage.problems:
            self.coverage.problems.append(text)

    def _join(self, one: RecordedPass) -> None:
        stretches, epoch, start = self.coverage.stretches, one.begun.epoch, one.start
        while stretches and (stretches[-1].epoch, stretches[-1].start) >= (epoch, start):
            self._undo(stretches[-1], stretches[-1].start)
            stretches.pop()
        if stretches and stretches[-1].epoch == epoch and stretches[-1].stop > start:
            self._undo(stretches[-1], start)
            stretches[-1].stop = start
        if stretches:
            self._check_gap(stretches[-1], one)
        elif epoch or start:
            self._problem(
                f"The record begins in epoch {epoch + 1}, before {one.samples(start, start + 1)}: what was trained on "
                "until then is not in it. Collect the records of all attempts."
            )
        if one.begun.num_repeated:
            stop = start + one.begun.num_repeated
            self._problem(
                f"Epoch {epoch + 1}: trained on twice: {one.samples(start, stop)}. Attempt {one.attempt} has "
                f"{one.begun.world_size} x {one.begun.batch_size} samples a step, and the state that it resumed from "
                "ends within one of its steps."
            )
        stretches.append(Stretch(one, start, max(start, one.stop)))

    def _undo(self, stretch: Stretch, start: int) -> None:
        if not stretch.is_skipped:
            self.coverage.num_undone += max(0, stretch.stop - start)

    def _check_gap(self, last: Stretch, one: RecordedPass) -> None:
        """Check that a pass begins where the last stretch ends: in the same epoch, or in the next one."""
        epoch, before = one.begun.epoch, last.recorded
        if last.epoch == epoch:
            self._check_order(before, one)
            self._check_part(last, one.start, f"attempt {one.attempt} resumes behind them")
            return
        end = before.end
        if end is not None:
            self._check_part(last, end, f"epoch {last.epoch + 2} begins without them")
        for missing in range(last.epoch + 1, epoch):
            self._problem(f"Epoch {missing + 1} was not trained on: epoch {epoch + 1} follows epoch {last.epoch + 1}.")
        if one.start:
            self._problem(
                f"Epoch {epoch + 1}: never trained on: {one.samples(0, one.start)}. Attempt {one.attempt} begins "
                "behind them, and no record has them."
            )

    def _check_part(self, last: Stretch, stop: int, why: str) -> None:
        """Check that a stretch reaches a position; a process that was killed may have trained on more than it wrote."""
        if last.stop >= stop:
            return
        samples = last.recorded.samples(last.stop, stop)
        if self._is_recorded_whole(last.recorded):
            self._problem(f"Epoch {last.epoch + 1}: never trained on: {samples}; {why}.")
            return
        self.coverage.notes.append(
            f"Epoch {last.epoch + 1}: a process of attempt {last.recorded.attempt} was killed before it wrote how far "
            f"it came. Only the state from which the next one resumed shows that it was trained on {samples}."
        )
        last.stop = stop

    def _is_recorded_whole(self, one: RecordedPass) -> bool:
        """Return whether no rank that ran the pass was killed: each has recorded how far it came."""
        return all(other.is_complete for other in self._beside(one))

    def _check_order(self, before: RecordedPass, after: RecordedPass) -> None:
        if before.order != after.order:
            self._problem(_difference(f"attempt {before.attempt}", before, f"attempt {after.attempt}", after))

    def _beside(self, one: RecordedPass) -> list[RecordedPass]:
        """Return the passes of all ranks that ran together with one of rank 0, the last one of each."""
        found = {}
        for other in sorted(self._passes, key=lambda each: each.process):
            if _start_of(other) == _start_of(one):
                found[other.process_rank] = other
        return list({**found, one.process_rank: one}.values())

    def _check_ranks(self, stretch: Stretch) -> None:
        """Check that all ranks read their parts of a stretch."""
        one, epoch = stretch.recorded, stretch.epoch + 1
        beside = self._beside(one)
        missing = sorted(set(range(one.begun.world_size)) - {other.begun.rank for other in beside})
        if missing:
            self._problem(
                f"Epoch {epoch}: attempt {one.attempt} has no record of {_ranks(missing)} from batch "
                f"{one.begun.first_step} on, where rank 0 has one: collect the records of all hosts."
            )
        for other in beside:
            who, own = f"rank {one.process_rank}", f"rank {other.process_rank}"
            if other.order != one.order or other.unit != one.unit:
                self._problem(_difference(who, one, own, other))
            elif other.is_complete and other.stop < stretch.stop:
                self._problem(
                    f"Epoch {epoch}: {own} of attempt {one.attempt} ended after batch {other.reached}, but the run "
                    f"goes on behind it: never trained on by this rank: its part of "
                    f"{one.samples(other.stop, stretch.stop)}."
                )

    def _note_replaced(self, stretch: Stretch) -> None:
        """Note which samples of a stretch could not be read, on any rank."""
        for one in self._beside(stretch.recorded):
            own = (line for line in one.replaced if stretch.start <= one.position(line.step) < stretch.stop)
            # Of several lines for a sample, the first has its own index; the others have those that were to replace it.
            first = {(line.step, line.item): line.bad for line in reversed(list(own))}
            if first:
                self.coverage.replaced.setdefault(stretch.epoch, []).extend(sorted(first.values()))

    def _describe_end(self, last: Stretch) -> None:
        """Note what the end of the run and the ends of epochs leave out or repeat, as they are meant to."""
        one, notes = last.recorded, self.coverage.notes
        if not _is_at_end(last):
            of = "" if one.size is None else f" of {one.size}"
            notes.append(f"Epoch {last.epoch + 1} ended at position {last.stop}{of}.")
        begun, size = one.begun, one.size
        if size is None or begun.num_steps is None:
            return
        if begun.stop_step is not None and begun.stop_step < begun.num_steps:
            notes.append(f"The Trainer's limits end epochs at position {one.end} of {size}.")
        elif begun.drop_last and size > begun.num_steps * one.unit:
            notes.append(f"drop_last leaves out {count(size - begun.num_steps * one.unit, 'sample')} per epoch.")
        elif num_filled := self._num_filled(one, size):
            notes.append(f"The last step of an epoch repeats {count(num_filled, 'sample')} to give each rank its part.")

    @staticmethod
    def _num_filled(one: RecordedPass, size: int) -> int:
        """Return the samples that the last step repeats: as many as ranks lack, or to give all ranks equally many."""
        if one.begun.order not in ("sequential", "shuffled"):
            return 0
        rest, ranks = size % one.unit, one.begun.world_size
        return -rest % ranks if one.begun.tail == "pad" or one.begun.drop_last else max(0, ranks - rest) if rest else 0


def _start_of(one: RecordedPass) -> tuple[int, ...]:
    """Return what passes of several ranks that run together have in common."""
    begun = one.begun
    return one.attempt, begun.epoch, begun.pass_index, begun.first_step, begun.num_skipped


def _skipped(stretch: Stretch) -> str:
    first, last = stretch.recorded.begun.skipped_steps
    samples = stretch.recorded.samples(stretch.start, stretch.stop)
    return (
        f"Epoch {stretch.epoch + 1}: left out by data_service.skip_steps: {samples}, in steps {first} to {last} of "
        f"attempt {stretch.recorded.attempt}."
    )


def _replaced(epoch: int, indices: Sequence[int]) -> str:
    named = ", ".join(map(str, indices[:_NUM_SHOWN])) + (", ..." if len(indices) > _NUM_SHOWN else "")
    return (
        f"Epoch {epoch + 1}: {count(len(indices), 'sample')} could not be read, and others of the batch took the place "
        f"(data_service.max_bad_samples): {'index' if len(indices) == 1 else 'indices'} {named}."
    )


def _is_at_end(stretch: Stretch) -> bool:
    return stretch.recorded.end is not None and stretch.stop >= stretch.recorded.end


def _difference(who: str, one: RecordedPass, other_who: str, other: RecordedPass) -> str:
    """Say in what two passes of one epoch differ."""
    own, theirs = {**one.order, "samples a step": one.unit}, {**other.order, "samples a step": other.unit}
    names = [name for name in {**own, **theirs} if own.get(name) != theirs.get(name)]
    parts = ", ".join(f"{name} {own.get(name)!r} in {who} and {theirs.get(name)!r} in {other_who}" for name in names)
    return f"Epoch {one.begun.epoch + 1} was read in two orders: {parts}. Samples may repeat, and others be missing."


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed(list(map(str, ranks)))}"


def _names(passes: Iterable[RecordedPass]) -> str:
    return _ranks(sorted({one.process_rank for one in passes}))


def as_text(run: RunRecord, covered: Sequence[LoaderCoverage]) -> str:
    """Return the outcome in words, the verdict first."""
    if not covered:
        return f"{run.name}: {NOT_SERVED}"
    lines = []
    for one in covered:
        where = one.loader if len({other.fit for other in covered}) == 1 else f"fit {one.fit}, {one.loader}"
        lines.append(f"{run.name}: {where}, {one.dataset}: {_verdict(one)}")
        lines += [f"  problem: {text}" for text in one.problems]
        lines += [f"  note: {text}" for text in one.notes]
    return "\n".join(lines)


def as_json(run: RunRecord, covered: Sequence[LoaderCoverage]) -> dict[str, Any]:
    """Return the outcome as JSON values."""
    return {
        "run": run.name,
        "verified": is_verified(covered),
        "loaders": [
            {
                "fit": one.fit,
                "loader": one.loader,
                "dataset": one.dataset,
                "starts": one.num_starts,
                "complete_epochs": [epoch + 1 for epoch in one.complete_epochs],
                "trained": [_part(stretch) for stretch in one.stretches if not stretch.is_skipped],
                "skipped": [_part(stretch) for stretch in one.stretches if stretch.is_skipped],
                "replaced": [
                    {"epoch": epoch + 1, "indices": indices} for epoch, indices in sorted(one.replaced.items())
                ],
                "undone": one.num_undone,
                "problems": one.problems,
                "notes": one.notes,
            }
            for one in covered
        ],
    }


def _part(stretch: Stretch) -> dict[str, Any]:
    recorded = stretch.recorded
    part = {"epoch": stretch.epoch + 1, "attempt": recorded.attempt, "from": stretch.start, "to": stretch.stop}
    if stretch.is_skipped:
        return {**part, "steps": list(recorded.begun.skipped_steps)}
    return {**part, "of": recorded.size}


def is_verified(covered: Sequence[LoaderCoverage]) -> bool:
    """Return whether the record shows that no sample was lost, repeated or read in another order."""
    return bool(covered) and not any(one.problems for one in covered)


NOT_SERVED = (
    "its record does not say which samples its steps had, because no data hosts served its training loaders. What a "
    "local DataLoader reads after a resume depends on its sampler and workers: see docs/lifecycle.md."
)


def _verdict(one: LoaderCoverage) -> str:
    if one.problems:
        return f"NOT verified, {count(len(one.problems), 'problem')}."
    last = one.stretches[-1]
    done = one.complete_epochs
    whole = f"in {count(len(done), 'complete epoch')}" if done else "so far"
    if done and not _is_at_end(last):
        whole += f", and in epoch {last.epoch + 1} up to position {last.stop}"
    exceptions = []
    if one.num_skipped:
        noun = ("batch", "batches") if last.recorded.has_batches else ("sample", "samples")
        exceptions.append(f"{count(one.num_skipped, *noun)} that data_service.skip_steps leaves out")
    if one.replaced:
        num = sum(map(len, one.replaced.values()))
        exceptions.append(f"{count(num, 'sample')} that data_service.max_bad_samples replaces")
    if exceptions:
        whole += f", except for {' and '.join(exceptions)}"
    undone = f", {one.num_undone} of its steps' samples undone by restarts" if one.num_undone else ""
    return f"each sample was trained on exactly once {whole} ({count(one.num_starts, 'start')} of rank 0{undone})."
