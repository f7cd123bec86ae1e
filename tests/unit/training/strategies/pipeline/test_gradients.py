"""Gradients kept until Lightning's backward, and averaged over replicas."""

import torch
from torch import nn

from lightning_sm.training.strategies.pipeline import gradients


def test_gradients_are_delivered_by_backward_and_scaled_like_the_loss():
    """Accumulated gradients are unchanged until backward, which adds the step's gradients, scaled like the loss."""
    layer = nn.Linear(2, 1, bias=False)
    layer.weight.grad = torch.full((1, 2), 10.0)
    seen = []
    step = gradients.StepGradients(layer)
    with step:
        layer(torch.ones(3, 2)).sum().backward()
    assert layer.weight.grad.tolist() == [[10, 10]]
    loss = step.loss(torch.tensor(2.0), seen.append)
    assert (loss.item(), seen) == (2, [])
    (loss / 2).backward()
    assert layer.weight.grad.tolist() == [[11.5, 11.5]]
    assert seen == [[layer.weight]]


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

    monkeypatch.setattr(gradients.dist, "all_reduce", all_reduce)
    dtypes = [torch.float32, torch.float64, torch.float32]
    own = [nn.Parameter(torch.ones(2, 3, dtype=dtype)) for dtype in dtypes]
    for number, parameter in enumerate(own[1:], 1):
        parameter.grad = torch.full_like(parameter, 3.0 * number)
    gradients.average(own, "replicas", 3)
    assert [parameter.grad.tolist() for parameter in own] == [[[3.0 * n] * 3] * 2 for n in range(3)]
    assert waited == dtypes
