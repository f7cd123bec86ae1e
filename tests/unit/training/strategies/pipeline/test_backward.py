"""The backward passes of microbatches, and the average over replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_sm.errors import StrategyError
from lightning_sm.training.strategies.pipeline import backward
from tests.unit.training.strategies.pipeline.one_rank import passes_of

ROWS = 7


@pytest.mark.parametrize("number", [1, 2, 3, ROWS])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_gradients_are_those_of_the_batch(number: int, scale: float):
    """Backward adds the gradients of the whole batch's loss, scaled with it, whatever the sizes of microbatches."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    x = torch.randn(ROWS, 4)
    expected = torch.autograd.grad(_contrastive(network(x)) * scale, list(network.parameters()))
    seen: list[int] = []
    network[0].bias.grad = torch.full((3,), 10.0)  # accumulated
    passes = passes_of(network, lambda: seen.append(1))
    output = passes.attach(passes.forward([x], number))
    (_contrastive(output) * scale).backward()
    torch.testing.assert_close(network[0].weight.grad, expected[0])
    torch.testing.assert_close(network[0].bias.grad - 10, expected[1], atol=1e-5, rtol=0)
    assert seen == [1]


def _contrastive(output: Tensor) -> Tensor:
    return functional.cross_entropy(output @ output.T, torch.arange(len(output)))


class _Several(nn.Module):
    """Returns a tensor that the loss uses, one that it does not, one without gradients, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.first(x), self.unused(x), x, x[:, 0] > 0


def test_outputs_without_gradients_are_passed_on():
    """Only the outputs that the loss uses have gradients; masks and inputs need none."""
    network = _Several()
    passes = passes_of(network)
    outputs = passes.attach(passes.forward([torch.randn(4, 4)], 2))
    assert [output.requires_grad for output in outputs] == [True, True, False, False]
    (outputs[0].sum(1) * outputs[3]).sum().backward()
    assert network.first.weight.grad is not None
    assert network.unused.weight.grad is None


class _Shapes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum() if x.shape[1] == 1 else x[:, : int(x[0, 0])]


@pytest.mark.parametrize(
    ("inputs", "shapes"),
    [(torch.ones(4, 1), r"\(\), \(\)"), (torch.arange(1.0, 9).view(4, 2), r"\(2, 1\), \(2, 2\)")],
)
def test_outputs_that_cannot_be_joined_are_refused(inputs: Tensor, shapes: str):
    """The error has the shapes."""
    with pytest.raises(StrategyError, match=f"have the shapes {shapes}, which cannot be joined"):
        passes_of(_Shapes()).forward([inputs], 2)


def test_a_loss_on_another_rank_starts_its_passes():
    """On a rank without outputs, backward on a stand-in with the loss's value starts this rank's part."""
    passes: Any = passes_of(nn.Linear(4, 3))
    seen: list[Any] = []
    passes.backward = seen.append
    loss = passes.attach(torch.tensor(2.0, requires_grad=True))
    assert loss == 2
    (loss / 2).backward()
    assert seen == [(torch.tensor(0.5),)]


def test_gradients_are_averaged_over_replicas(monkeypatch):
    """Gradients are averaged per dtype; a missing one counts as 0 and is still sent, as other ranks may have it."""
    waited = []

    class Sent:
        def __init__(self, tensor):
            self.tensor = tensor

        def wait(self):
            self.tensor.mul_(3)  # all replicas have equal gradients
            waited.append(self.tensor.dtype)

    def all_reduce(tensor, group, async_op):
        assert (group, async_op) == ("replicas", True)
        return Sent(tensor)

    monkeypatch.setattr(backward.dist, "all_reduce", all_reduce)
    dtypes = [torch.float32, torch.float64, torch.float32]
    own = [nn.Parameter(torch.ones(2, 3, dtype=dtype)) for dtype in dtypes]
    for number, parameter in enumerate(own[1:], 1):
        parameter.grad = torch.full_like(parameter, 3.0 * number)
    backward.average(own, "replicas", 3)
    assert [parameter.grad.tolist() for parameter in own] == [[[3.0 * n] * 3] * 2 for n in range(3)]
    assert waited == dtypes
