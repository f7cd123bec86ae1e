"""The average of gradients over replicas, bucket by bucket."""

import pytest
import torch
from torch import nn

from lightning_sm.training.strategies.pipeline import gradients


class Network:
    """A group of replicas with the same gradients, which counts the buckets on their way.

    Args:
        size: Number of replicas.
    """

    def __init__(self, size):
        self.size = size
        self.on_their_way = self.most = self.sent = 0

    def all_reduce(self, tensor, group, async_op):
        """Add up at once, as far as the caller can tell."""
        assert (group, async_op) == ("replicas", True)
        tensor.mul_(self.size)
        self.on_their_way += 1
        self.sent += 1
        self.most = max(self.most, self.on_their_way)
        return self

    def wait(self):
        """One of them has arrived."""
        self.on_their_way -= 1


@pytest.mark.parametrize(("parameters", "sent", "most"), [(7, 7, 2), (1, 1, 1), (0, 0, 0)])
def test_two_buckets_at_most_are_copied_at_a_time(monkeypatch, parameters, sent, most):
    """A copy of all gradients would need as much memory as the gradients."""
    network = Network(3)
    monkeypatch.setattr(gradients.dist, "all_reduce", network.all_reduce)
    monkeypatch.setattr(gradients, "_BUCKET_BYTES", 16)
    own = [nn.Parameter(torch.ones(2, 3)) for _ in range(parameters)]
    for number, parameter in enumerate(own[1:], 1):
        parameter.grad = torch.full((2, 3), float(number))
    gradients.average(own, "replicas", 3)
    assert [parameter.grad.tolist() for parameter in own] == [[[float(n)] * 3] * 2 for n in range(parameters)]
    assert (network.sent, network.most, network.on_their_way) == (sent, most, 0)


def test_buckets_have_one_dtype(monkeypatch):
    """Gradients of several dtypes cannot be one tensor."""
    network = Network(2)
    monkeypatch.setattr(gradients.dist, "all_reduce", network.all_reduce)
    own = [nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.float32, torch.float64, torch.float32)]
    for parameter in own:
        parameter.grad = torch.ones_like(parameter)
    gradients.average(own, "replicas", 2)
    assert network.sent == 2
    assert [parameter.grad.dtype for parameter in own] == [torch.float32, torch.float64, torch.float32]
    assert all((parameter.grad == 1).all() for parameter in own)
