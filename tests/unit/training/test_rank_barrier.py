"""All ranks wait for each other through the store of their process group."""

from __future__ import annotations

import threading

import pytest
from torch import distributed

from lightning_sm.training import rank_barrier
from lightning_sm.training.rank_barrier import wait_for_all_ranks


@pytest.fixture
def ranks(monkeypatch):
    """Two ranks as threads of this process, with one store."""
    store, own = distributed.HashStore(), threading.local()
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(distributed, "get_rank", lambda: own.rank)
    monkeypatch.setattr(distributed.distributed_c10d, "_get_default_store", lambda: store)
    # Each thread needs the first number, like separate processes.
    monkeypatch.setattr(rank_barrier, "_numbers", iter([1, 1]))
    return own


def test_a_single_process_does_not_wait():
    """A process without a group does not wait."""
    wait_for_all_ranks()


def test_rank_0_leaves_last(ranks):
    """No rank leaves before both have arrived, and rank 0, which has the store, leaves last."""
    left = []

    def come(rank):
        ranks.rank = rank
        wait_for_all_ranks()
        left.append(rank)

    first = threading.Thread(target=come, args=(0,))
    first.start()
    first.join(0.5)
    assert left == []
    come(1)
    first.join(10)
    assert left == [1, 0] or (sorted(left) == [0, 1] and not first.is_alive())
