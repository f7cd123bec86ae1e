"""The number of rows of a batch."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass

import pytest
import torch

from lightning_sm.errors import StrategyError
from lightning_sm.training.strategies.pipeline.rows import num_rows

Pair = namedtuple("Pair", "x y")


@dataclass
class Sample:
    """A batch as a dataclass."""

    x: torch.Tensor
    name: str


X = torch.arange(12).reshape(4, 3)
Y = torch.arange(4)


@pytest.mark.parametrize(
    "batch",
    [
        X,
        (X, Y),
        Pair(X, Y),
        {"x": X, "scale": torch.tensor(2.0)},
        UserDict(x=X),
        Sample(X, "train"),
        ({"deep": [Y]}, 7),
    ],
)
def test_rows_are_found_in_any_structure(batch):
    """All tensors with dimensions have the same number of rows."""
    assert num_rows(batch) == 4


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
