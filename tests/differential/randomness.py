"""What is promised of random numbers: each is drawn once, and neither hosts nor workers change it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple, TypeAlias

from tests.differential.cases import Case, case
from tests.differential.comparison import Place
from tests.differential.deviation import Deviation
from tests.differential.draws import Draw
from tests.differential.fits import Noted, Pass, Seen


class _Batch(NamedTuple):
    """Where a number was drawn.

    Attributes:
        key: What the batch is for.
        position: Its number among those of its loader in the epoch, or in the validation.
        noted: The batch.
    """

    key: Pass
    position: int
    noted: Noted


# By call of a Trainer and number: the batches in which it is, and for which samples it was drawn.
_Drawn: TypeAlias = dict[tuple[int, int, int], list[tuple[_Batch, Draw]]]


def changes(ours: Sequence[Seen], again: Sequence[Seen]) -> Iterator[Deviation]:
    """Yield what other data hosts, with other numbers of workers, change: nothing may.

    Args:
        ours: What each rank saw with data hosts.
        again: What each rank saw with the others.
    """
    for rank, (one, other) in enumerate(zip(ours, again, strict=True)):
        if [*one.errors] != [*other.errors]:
            yield Deviation(f"rank {rank}", "one of two runs with data hosts fails", one.errors, other.errors)
        for key in sorted(one.batches.keys() | other.batches.keys()):
            was, now = one.batches.get(key), other.batches.get(key)
            if was != now and key.act not in one.errors | other.errors:
                yield Deviation(f"rank {rank}, {key}", "batches with other data hosts", was, now)


def repeated_draws(number: int, ours: Sequence[Seen]) -> Iterator[Deviation]:
    """Yield random numbers that were drawn twice in one call of a Trainer, though nothing documented repeats them.

    Args:
        number: Number of the case.
        ours: What each rank saw with data hosts.
    """
    script = case(number)
    of_ranks = [_drawn(seen) for seen in ours]
    for rank, drawn in enumerate(of_ranks):
        for places in drawn.values():
            for (earlier, known), (later, draw) in combinations(places, 2):
                if known != draw or not _is_again(script, earlier, later, draw):
                    yield _deviation(earlier, later, known, draw, rank, rank)
                    return
    for first, second in combinations(range(len(of_ranks)), 2):
        for value in of_ranks[first].keys() & of_ranks[second].keys():
            there, here = of_ranks[first][value], of_ranks[second][value]
            if not _may_be_of_both(script, there, here):
                yield _deviation(*(there[0][0], here[0][0]), *(there[0][1], here[0][1]), first, second)
                return


def _drawn(seen: Seen) -> _Drawn:
    drawn: _Drawn = defaultdict(list)
    for key, batches in seen.batches.items():
        positions: Counter[tuple[int, int]] = Counter()
        for noted in batches:
            own = noted.validation, noted.dataloader_idx
            batch = _Batch(key, positions[own], noted)
            positions[own] += 1
            for draw in noted.draws:
                drawn[key.act, draw.shard, draw.value].append((batch, draw))
    return drawn


def _is_again(script: Case, earlier: _Batch, later: _Batch, draw: Draw) -> bool:
    """Whether a later pass draws as an earlier one did: the validations of an epoch do."""
    place = _place(script, later, draw)
    is_later = later.noted.validation > earlier.noted.validation if place.is_validation else later.key > earlier.key
    # With overfit_batches, a batch sampler yields the batches of the first epoch in all epochs.
    is_overfit = place.is_overfit and place.part.has("batch sampler")
    is_documented = is_overfit or (place.is_validation and earlier.key.epoch == later.key.epoch)
    if not (is_later and is_documented and earlier.position == later.position):
        return False
    was, now = (_draws_in(place, batch) for batch in (earlier, later))
    # The first step of a run may be padded.
    return was == now or (place.may_repeat and was > now)


def _draws_in(place: Place, batch: _Batch) -> set[Draw]:
    """What was drawn for a loader: a batch may be of several."""
    return {draw for draw in batch.noted.draws if place.loaders.index_of(draw.index) == place.index}


def _may_be_of_both(script: Case, there: list[tuple[_Batch, Draw]], here: list[tuple[_Batch, Draw]]) -> bool:
    """Whether two ranks may have a number: one has repeated the sample of the other, in the same step."""
    place = _place(script, *here[0])
    steps = [{(one.key, one.position, known) for one, known in places} for places in (there, here)]
    # The first step of a run may be padded.
    return (place.may_repeat or not place.is_split) and (steps[0] <= steps[1] or steps[0] >= steps[1])


def _place(script: Case, batch: _Batch, draw: Draw) -> Place:
    loaders = script.loaders(batch.key.act, batch.key.stage)
    index = loaders.index_of(draw.index)
    return Place(script, batch.key, loaders.parts[index], index)


def _deviation(earlier: _Batch, later: _Batch, known: Draw, draw: Draw, first: int, second: int) -> Deviation:
    places = [f"rank {rank}, {one.key}, batch {one.position}" for rank, one in ((first, earlier), (second, later))]
    return Deviation(" and ".join(places), "a number is drawn twice", known, draw)
