"""Scripts that differ from stock Lightning's outcome in nothing but what is documented."""

import pytest

from tests.differential.__main__ import runner
from tests.differential.cases import case
from tests.differential.comparison import deviations
from tests.differential.draws import Draw
from tests.differential.fits import Noted, Pass, Seen
from tests.differential.randomness import changes, repeated_draws

pytestmark = [pytest.mark.processes, pytest.mark.proof]

# Chosen so that together they have as many kinds of loaders and settings as a dozen cases can have; the last three
# have two ranks. `python -m tests.differential` runs others.
CASES = (538, 486, 242, 737, 1358, 144, 939, 1202, 65, 175, 959, 319)


def test_a_dozen_scripts_see_the_batches_of_stock_lightning():
    """Each difference has a documented reason, which the comparison checks; other data hosts change nothing."""
    with runner() as run:
        found = {number: run(number).deviations(number) for number in CASES}
    unexplained = {
        f"case {number} ({case(number).words})": one
        for number, deviations in found.items()
        for one in deviations
        if one.reason is None
    }
    assert not unexplained
    assert [case(number).world_size for number in CASES] == [1] * 9 + [2] * 3


def wrong(batches, kind):
    """The batches of a pass after each of the mistakes that must not go unnoticed."""
    yield batches[1:]
    yield [*batches, batches[0]]
    if kind != "WeightedRandomSampler":  # that draws with replacement
        yield [batches[0], *batches[:-1]]


KINDS = (
    *("batch_size=3", "shuffle", "own sampler", "own batch sampler", "stream", "batch_size=None"),
    *(
        "own sampler that repeats",
        "reversed DistributedSampler",
        "WeightedRandomSampler",
        "DistributedSampler that drops",
    ),
)
TEST = Pass(1, "test", 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_batch_has_no_reason(kind):
    """What is missing, additional, or there twice in place of another, in a loader of any kind."""
    number = next(number for number in range(4000) if is_about(case(number), kind))
    batches = [Noted.of(batch) for batch in case(number).loaders(1, "test").value]
    right = Seen({TEST: batches})
    assert not list(deviations(number, [right], [right]))
    for mistake in wrong(batches, kind):
        found = list(deviations(number, [right], [Seen({TEST: mistake})]))
        assert [one.reason for one in found] == [None]


def is_about(script, kind):
    """Whether one rank tests by one loader of a kind, with several batches and no limit."""
    if script.world_size > 1 or script.acts[1].method != "test":
        return False
    evaluation = script.loaders(1, "test")
    (first, *others) = evaluation.parts
    has_batches = evaluation.shape == "one" and first.size > 8 and not first.has("drop_last")
    return has_batches and not others and first.has(kind) and "limit_test_batches" not in script.trainer


@pytest.fixture(scope="module")
def augmented():
    """The number of a case that trains for several epochs on one rank, and what it may see of random numbers.

    Each of the batches has two samples; two epochs, and a validation that repeats the sanity check.
    """
    number = next(n for n in range(100) if case(n).world_size == 1 and case(n).acts[0].method == "fit")
    values = iter(range(1000, 2000))

    def batch(*indices, validation=0):
        return Noted(0, list(indices), [Draw(index, -1, next(values)) for index in indices], validation)

    train = {Pass(0, "train", epoch): [batch(0, 1), batch(1, 2)] for epoch in (0, 1)}
    sanity = batch(10_000, 10_001, validation=1)
    validations = {Pass(0, "sanity", 0): [sanity], Pass(0, "val", 0): [sanity._replace(validation=2)]}
    return number, {**train, **validations, Pass(0, "val", 1): [batch(10_000, 10_001, validation=3)]}


def copied(seen, to, source):
    """What a rank saw, with the random numbers of one batch in another."""
    (key, position), (other, from_position) = to, source
    batches = [*seen[key]]
    values = [draw.value for draw in seen[other][from_position].draws]
    draws = [draw._replace(value=value) for draw, value in zip(batches[position].draws, values, strict=True)]
    batches[position] = batches[position]._replace(draws=draws)
    return {**seen, key: batches}


@pytest.mark.parametrize(
    ("to", "source"),
    [
        ((Pass(0, "train", 0), 1), (Pass(0, "train", 0), 0)),
        ((Pass(0, "train", 1), 0), (Pass(0, "train", 0), 0)),
        ((Pass(0, "val", 1), 0), (Pass(0, "val", 0), 0)),
        ((Pass(0, "val", 0), 0), (Pass(0, "train", 0), 0)),
    ],
    ids=["in a pass", "in another epoch", "in a validation of another epoch", "in another stage"],
)
def test_random_numbers_that_come_again_are_found(augmented, to, source):
    """A batch draws what another one has drawn; only the validations of one epoch may."""
    number, seen = augmented
    assert not list(repeated_draws(number, [Seen(seen)]))
    (found,) = repeated_draws(number, [Seen(copied(seen, to, source))])
    assert found.reason is None


def test_an_index_that_is_augmented_twice_alike_is_found(augmented):
    """As where random numbers follow the index of a sample instead of its position."""
    number, seen = augmented
    key = Pass(0, "train", 0)
    first, second = seen[key]
    alike = second._replace(draws=[first.draws[1], second.draws[1]])
    (found,) = repeated_draws(number, [Seen({**seen, key: [first, alike]})])
    assert found.reason is None


def test_ranks_that_draw_alike_are_found(augmented):
    """Each rank has its own part of the data."""
    number, seen = augmented
    (found,) = repeated_draws(number, [Seen(seen), Seen(seen)])
    assert found.reason is None


def test_what_other_data_hosts_change_is_found(augmented):
    """One random number, or one rank that fails."""
    _, seen = augmented
    key = Pass(0, "train", 0)
    assert not list(changes([Seen(seen)], [Seen(dict(seen))]))
    other = copied(seen, (key, 0), (Pass(0, "train", 1), 0))
    for again in (Seen(other), Seen(seen, {0: "an error"})):
        (found,) = changes([Seen(seen)], [again])
        assert found.reason is None
