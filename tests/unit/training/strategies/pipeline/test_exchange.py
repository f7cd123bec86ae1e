"""Which process group carries which part of a value."""

import pytest
import torch

from lightning_sm.errors import StrategyError
from lightning_sm.training.strategies.pipeline import exchange


class Done:
    """A transfer that is done."""

    def wait(self):
        """Do nothing."""


@pytest.fixture
def calls(monkeypatch):
    """Stubs of the collective calls, and the names and groups of the calls made."""
    made = []

    def fake(name):
        def call(*arguments, group=None, **keywords):
            assert "device" not in keywords
            made.append((name, group))
            return Done()

        return call

    monkeypatch.setattr(exchange.dist, "get_rank", lambda: 4)
    names = ("broadcast", "broadcast_object_list", "isend", "all_reduce", "all_gather_object")
    for name in names:
        monkeypatch.setattr(exchange.dist, name, fake(name))
    return made


def replica():
    """The replica of rank 4, which is the first of two ranks."""
    return exchange.Replica("tensors", "objects", [4, 5], torch.device("cpu"))


def test_structures_are_sent_over_the_group_on_cpus_and_tensors_over_their_own(calls):
    """Structures are sent over the CPU group, as NCCL would copy each one to the device and back."""
    batch = {"x": torch.ones(2), "name": "a", "more": [torch.ones(1), 7]}
    received = replica().broadcast(batch, 0)
    assert (received["x"].tolist(), received["name"], received["more"][1]) == ([1, 1], "a", 7)
    assert calls == [("broadcast_object_list", "objects"), ("broadcast", "tensors"), ("broadcast", "tensors")]
    calls.clear()
    replica().send(batch, 1)
    assert calls == [("isend", "objects"), ("isend", "objects"), ("isend", "tensors"), ("isend", "tensors")]


def test_an_error_of_a_block_is_raised_on_all_ranks_once(calls):
    """Nested blocks exchange an error only once."""
    ranks = replica()
    with pytest.raises(StrategyError, match="mine"), ranks.together(), ranks.together():
        raise StrategyError("mine")
    assert calls == [("all_reduce", "objects"), ("all_gather_object", "objects")]


def test_whether_a_rank_has_an_error_is_asked_on_cpus(calls):
    """Ranks exchange errors over the CPU group in each step, without waiting for the device."""
    with replica().together():
        pass
    assert calls == [("all_reduce", "objects")]
    calls.clear()
    with pytest.raises(StrategyError, match="mine"), replica().together():
        raise StrategyError("mine")
    assert calls == [("all_reduce", "objects"), ("all_gather_object", "objects")]
