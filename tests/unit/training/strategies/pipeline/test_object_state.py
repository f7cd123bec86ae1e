"""The digest that tells whether an object has been changed in place."""

import sys

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

from lightning_sm.training.strategies.pipeline.object_state import object_state


class _Holder:
    """An object that holds something.

    Args:
        held: What.
    """

    def __init__(self, held):
        self.held = held


@pytest.mark.parametrize(
    ("held", "change"),
    [
        ([1, [2]], lambda held: held[1].append(3)),
        ({"a": 1}, lambda held: held.update(a=2)),
        (np.zeros(3), lambda held: held.__setitem__(1, 1)),
        (torch.zeros(3), lambda held: held.add_(1)),
        (MeanMetric(), lambda held: held.update(1.0)),
        (_Holder([1]), lambda held: held.held.append(2)),
    ],
)
def test_a_change_in_place_changes_the_digest(held, change):
    """At any depth; without a change it stays the same."""
    holder = _Holder(held)
    before = object_state(holder)
    assert before is not None
    assert object_state(holder) == before
    change(held)
    assert object_state(holder) not in (before, None)


@pytest.mark.parametrize("held", [sys.stdout, np.zeros(1 << 20), [bytes(1 << 20)] * 5 + [bytes(5 << 20)]])
def test_what_cannot_be_read_quickly_has_no_digest(held):
    """An open file, and what is larger than a few megabytes."""
    assert object_state(_Holder(held)) is None


def test_a_module_is_not_read():
    """The layers of a network, which an object may refer to, are as large as the model."""
    holder = _Holder(nn.Linear(3000, 3000))
    before = object_state(holder)
    assert before is not None
    with torch.no_grad():
        holder.held.weight.add_(1)
    assert object_state(holder) == before
