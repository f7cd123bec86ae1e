"""How the rows of a batch are cut into microbatches."""

from __future__ import annotations

from collections import UserDict, defaultdict, namedtuple
from dataclasses import dataclass

import pytest
import torch

from lightning_sm.errors import StrategyError
from lightning_sm.training.strategies.pipeline.rows import (
    num_microbatches,
    num_rows,
    rows_of,
    same_tensors,
    versions_of,
)

Pair = namedtuple("Pair", "x y")


@dataclass
class Sample:
    """A batch as a dataclass."""

    x: torch.Tensor
    name: str


X = torch.arange(12).reshape(4, 3)
Y = torch.arange(4)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (X, X[1:3]),
        ((X, Y), (X[1:3], Y[1:3])),
        ([X, Y], [X[1:3], Y[1:3]]),
        (Pair(X, Y), Pair(X[1:3], Y[1:3])),
        ({"x": X, "scale": torch.tensor(2.0)}, {"x": X[1:3], "scale": torch.tensor(2.0)}),
        (UserDict(x=X), UserDict(x=X[1:3])),
        (Sample(X, "train"), Sample(X[1:3], "train")),
        ((X, ["a", "b", "c", "d"]), (X[1:3], ["b", "c"])),
        ((X, ("a", "b")), (X[1:3], ("a", "b"))),
        ((X, Y, Y, X), (X[1:3], Y[1:3], Y[1:3], X[1:3])),
        ([X, "a", "b", "c"], [X[1:3], "a", "b", "c"]),
        (({"deep": [Y, (X,)]}, 7), ({"deep": [Y[1:3], (X[1:3],)]}, 7)),
    ],
)
def test_rows_keep_the_structure(batch, expected):
    """Tensors, and lists with one text per row, are cut along dimension 0; everything else is unchanged."""
    assert num_rows(batch) == 4
    taken = rows_of(batch, 4, slice(1, 3))
    assert type(taken) is type(expected)
    torch.testing.assert_close(_plain(taken), _plain(expected))


def test_a_mapping_keeps_its_type():
    """A defaultdict keeps its type and its factory."""
    taken = rows_of(defaultdict(list, x=X), 4, slice(0, 1))
    assert taken["missing"] == []


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        ((X, torch.zeros(3)), "tensors of 3, 4 rows"),
        (["text"], "no tensor with rows"),
        (torch.zeros(0, 3), "tensors of 0 rows"),
        (torch.tensor(1.0), "no tensor with rows"),
    ],
)
def test_a_batch_without_rows_is_refused(batch, found):
    """A batch without tensors or with unequal ones is refused, and the error describes what was found."""
    with pytest.raises(StrategyError, match=found):
        num_rows(batch)


def test_a_step_takes_nothing_out_of_the_kept_batch():
    """A step may pop an entry of its batch; a tensor that it changes in place has another version."""
    batch = {"x": torch.ones(2), "more": [torch.zeros(2)]}
    kept = same_tensors(batch)
    before = versions_of(kept)
    changed = batch.pop("more")[0]
    assert kept["more"][0] is changed
    assert versions_of(kept) == before
    changed.add_(1)
    assert versions_of(kept) != before


@pytest.mark.parametrize(
    ("rows", "wanted", "number"), [(16, 4, 4), (6, 4, 3), (7, 4, 1), (2, 4, 2), (1, 4, 1), (12, 8, 6)]
)
def test_microbatches_are_equal(rows, wanted, number):
    """A batch is cut into as many equal parts as possible, up to the requested number."""
    assert num_microbatches(rows, wanted) == number


def _plain(value):
    if isinstance(value, Sample):
        return [value.x, _plain(value.name)]
    if isinstance(value, UserDict):
        return dict(value)
    if isinstance(value, str):
        return ord(value[0])
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
