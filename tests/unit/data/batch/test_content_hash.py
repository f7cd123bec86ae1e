"""The hash of a batch's content."""

import numpy as np
import torch

from lightning_sm.data.batch.arena import Arena
from lightning_sm.data.batch.collate import collate_into
from lightning_sm.data.batch.content_hash import content_hash
from lightning_sm.data.batch.encode import encode


def hash_in_slot(make, fill, start=0):
    """The hash of a batch in a slot that was used before, at some place of it."""
    slot = np.full(1 << 16, fill, np.uint8)
    arena = Arena(slot[start:])
    structure = encode(make(arena), arena)
    return content_hash(structure, slot[start : start + arena.used])


def mixed(_arena=None, last=3):
    """A batch of parts between which a slot has space, and of plain values."""
    return {
        "image": torch.arange(35, dtype=torch.uint8).view(5, 7),
        "label": torch.tensor([1, 2, last]),
        "turned": torch.arange(6.0).view(2, 3).T,
        "names": ["a", "b"],
        "mask": np.array([True, False, True]),
    }


def stacked(arena):
    """A batch that is stacked in the slot itself, whose first attempt fails there."""
    samples = [{"odd": torch.tensor([float(number)] * 3), "id": number} for number in range(5)]
    return collate_into(torch.utils.data.default_collate, samples, arena)


def test_what_the_slot_had_before_does_not_matter():
    """Nor where in the slot the batch lies: workers use slots again, and several batches share one."""
    for make in (mixed, stacked):
        assert len({hash_in_slot(make, fill, start) for fill in (0, 255, 7) for start in (0, 64, 4096)}) == 1


def test_every_part_matters():
    """One value, one string, one shape."""
    others = [
        lambda _: mixed(last=4),
        lambda _: {**mixed(), "names": ["a", "c"]},
        lambda _: {**mixed(), "image": torch.arange(35, dtype=torch.uint8).view(7, 5)},
        lambda _: {**mixed(), "label": torch.tensor([1, 2, 3], dtype=torch.int32)},
    ]
    assert len({hash_in_slot(make, 0) for make in (mixed, *others)}) == 5
