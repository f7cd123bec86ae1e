"""Copies of checkpoints in memory. That of a GPU is in tests/gpu."""

from __future__ import annotations

import collections

import pytest
import torch

from lightning_sm.training.checkpoints.host_copy import HostCopy, PickledCheckpoint, num_bytes

CPU = torch.device("cpu")


def _checkpoint():
    shared = torch.arange(6.0).reshape(2, 3)
    weights = collections.OrderedDict(a=shared, tied=shared.view(2, 3), t=torch.arange(6.0).reshape(2, 3).t())
    model = torch.nn.Linear(2, 2)
    model.weight.data.fill_(1)
    weights._metadata = {"": {"version": 2}}
    return {
        "state_dict": weights,
        "optimizer_states": [{"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(2, 3)}}}],
        "callbacks": {"best": {"paths": ["a"]}},
        "empty": [torch.empty(0), torch.empty(0)],
        "sparse": torch.eye(2).to_sparse(),
        "odd": (torch.full((2,), 2.0), torch.ones(2, requires_grad=True)),
        "model": model,
    }


def test_a_copy_is_that_of_its_moment():
    """Later changes in place do not reach it: neither of tensors, also in objects, nor of other values."""
    checkpoint = _checkpoint()
    taken = HostCopy(CPU).take(PickledCheckpoint.of(checkpoint))
    checkpoint["state_dict"]["a"].add_(1)
    checkpoint["optimizer_states"][0]["state"][0]["step"].add_(1)
    checkpoint["callbacks"]["best"]["paths"].append("b")
    checkpoint["model"].weight.data.add_(1)
    copied, expected = taken.load(), _checkpoint()
    for name in ("a", "tied", "t"):
        assert torch.equal(copied["state_dict"][name], expected["state_dict"][name])
    assert copied["state_dict"]["t"].stride() == (1, 3)
    assert copied["state_dict"]._metadata == {"": {"version": 2}}
    assert type(copied["state_dict"]) is collections.OrderedDict
    assert copied["optimizer_states"][0]["state"][0]["step"] == 3
    assert copied["callbacks"] == {"best": {"paths": ["a"]}}
    assert torch.equal(copied["sparse"].to_dense(), torch.eye(2))
    assert torch.equal(copied["odd"][0], torch.full((2,), 2.0))
    assert [one.requires_grad for one in copied["odd"][:2]] == [False, True]
    weight, _ = copied["model"].parameters()
    assert isinstance(weight, torch.nn.Parameter)
    assert torch.equal(weight, torch.ones(2, 2))


def test_weights_that_layers_share_are_copied_once():
    """They share their copy, too, so that it takes no more memory."""
    copied = HostCopy(CPU).take(PickledCheckpoint.of(_checkpoint())).load()["state_dict"]
    assert copied["a"].data_ptr() == copied["tied"].data_ptr() != copied["t"].data_ptr()


def test_the_next_copy_uses_the_same_memory():
    """Only what has another shape gets other memory."""
    copies = HostCopy(CPU)
    first = copies.take(PickledCheckpoint.of({"a": torch.zeros(3), "b": torch.zeros(4)})).load()
    places = [one.data_ptr() for one in first.values()]
    taken = copies.take(PickledCheckpoint.of({"a": torch.ones(3), "b": torch.ones(5)}))
    assert taken.num_bytes == 32
    second = taken.load()
    assert second["a"].data_ptr() == places[0]
    assert second["b"].shape == (5,)
    assert torch.equal(second["a"], torch.ones(3))
    assert copies.wait() == 0.0


@pytest.mark.parametrize(("value", "expected"), [({"a": [torch.zeros(3)], "b": (torch.zeros(2),)}, 20), ("text", 0)])
def test_the_bytes_of_a_checkpoint_are_those_of_its_tensors(value, expected):
    """In dicts, lists and tuples."""
    assert num_bytes(value) == expected
