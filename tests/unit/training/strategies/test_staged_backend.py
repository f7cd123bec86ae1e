"""tests/gpu/staged.py, a stand-in for NCCL, refuses what NCCL would."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.gpu.staged import DEVICE, Staged


def _of_two(call):
    """The results of a call on two ranks, or the texts of their errors."""
    store = dist.HashStore()

    def run(rank):
        group = Staged(store, rank, 2, timedelta(seconds=60))
        try:
            return call(group, rank)
        except RuntimeError as error:
            return str(error)

    with ThreadPoolExecutor(2) as ranks:
        return list(ranks.map(run, range(2)))


def _reduced(group, *values):
    tensor = torch.tensor(values, device=DEVICE)
    group.allreduce([tensor]).wait()
    return tensor.tolist()


def test_ranks_that_agree_are_served():
    """Matching calls succeed, so the calls below are refused only for their differences."""
    assert _of_two(lambda group, rank: _reduced(group, rank, 1)) == [[1, 2], [1, 2]]


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda group, rank: _reduced(group, *[1.0] * (1 + rank)), id="sizes"),
        pytest.param(lambda group, rank: _reduced(group, 1.0 if rank else 1), id="types"),
        pytest.param(lambda group, rank: group.barrier() if rank else _reduced(group, 1), id="calls"),
    ],
)
def test_ranks_that_differ_are_refused(call):
    """Each rank's error describes its call."""
    for rank, said in enumerate(_of_two(call)):
        assert said.startswith(f"Rank {rank} of 2 calls ")


def test_only_contiguous_tensors_are_taken():
    """Non-contiguous tensors are refused, because NCCL would send their memory as it is."""
    for said in _of_two(lambda group, _: group.broadcast([torch.ones(2, 3, device=DEVICE).T])):
        assert said == "Tensors must be contiguous, but this one of shape [3, 2] is not."
