"""Scripts that differ from stock Lightning's outcome in nothing but what is documented."""

import pytest

from tests.differential.__main__ import compared
from tests.differential.cases import case
from tests.differential.comparison import deviations
from tests.differential.fits import Seen, plain

pytestmark = [pytest.mark.processes, pytest.mark.proof]

# Chosen so that together they have as many kinds of loaders and settings as a dozen cases can have; the last three
# have two ranks. `python -m tests.differential` runs others.
CASES = (373, 339, 209, 555, 249, 163, 74, 558, 59, 183, 87, 591)


def test_a_dozen_scripts_see_the_batches_of_stock_lightning():
    """Fit, and validate, test or predict: each difference has a documented reason, which the comparison checks."""
    with compared() as compare:
        found = {number: compare(number) for number in CASES}
    unexplained = {
        f"case {number} ({case(number).words})": one
        for number, deviations in found.items()
        for one in deviations
        if one.reason is None
    }
    assert not unexplained
    assert [case(number).world_size for number in CASES] == [1] * 9 + [2] * 3


def wrong(batches):
    """The batches of a pass after each of the mistakes that must not go unnoticed."""
    yield batches[1:]
    yield [*batches, batches[0]]
    yield [batches[0], *batches[:-1]]


@pytest.mark.parametrize(
    "kind", ["batch_size=3", "shuffle", "own sampler", "own batch sampler", "stream", "batch_size=None"]
)
def test_a_wrong_batch_has_no_reason(kind):
    """What is missing, additional, or there twice in place of another, in a loader of any kind."""
    numbers = (number for number in range(2000) if case(number).world_size == 1)
    number = next(number for number in numbers if is_about(case(number), kind))
    batches = [(0, plain(batch)) for batch in case(number).evaluation.value]
    right = Seen({"test test": batches})
    assert not list(deviations(number, [right], [right]))
    for mistake in wrong(batches):
        found = list(deviations(number, [right], [Seen({"test test": mistake})]))
        assert [one.reason for one in found] == [None]


def is_about(script, kind):
    """Whether the evaluation of a case is by one loader of a kind, with several batches and no limit."""
    (first, *others) = script.evaluation.parts
    has_batches = script.evaluation.shape == "one" and first.size > 8 and not first.has("drop_last")
    return has_batches and not others and first.has(kind) and not {"limit_test_batches"} & {*script.trainer}
