"""Parameters that several layers share."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn

from lightning_sm.training.strategies.pipeline.layers import materialize
from lightning_sm.training.strategies.pipeline.tied import TiedWeights, find_tied


def tied_module() -> LightningModule:
    """A module with three layers whose first and last share their weights."""
    module = LightningModule()
    module.network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    module.network[2].weight = module.network[0].weight
    return module


def test_tied_parameters_are_found_by_all_their_names():
    """Tied parameters are found with all names, in the module's order, and the stages that hold them."""
    module = tied_module()
    first, second, third = module.network
    (found,) = find_tied(module, [[first, second], [third]])
    assert found == (["network.0.weight", "network.2.weight"], [0, 1])
    (found,) = find_tied(module, [[first, second, third]])
    assert found.stages == [0]


def test_layers_that_are_made_are_tied_again():
    """Layers created from the meta device are tied again, because each one gets a separate parameter."""
    with torch.device("meta"):
        module = tied_module()
    tied = find_tied(module, [list(module.network)])
    materialize(list(module.network), torch.device("cpu"))
    assert module.network[0].weight is not module.network[2].weight
    TiedWeights(module, tied, Rank(0, deque()))
    assert module.network[0].weight is module.network[2].weight


class Rank:
    """A rank of a replica with two ranks in one process.

    Args:
        position: The rank's position.
        sent: Values that were sent and not yet received.
    """

    def __init__(self, position: int, sent: deque[Any]) -> None:
        self.position = position
        self.sent = sent

    def send(self, value: Any, position: int) -> None:
        """Send a value to the other rank."""
        assert position == 1 - self.position
        self.sent.append(value)

    def receive(self, position: int) -> Any:
        """Return the next value from the other rank."""
        assert position == 1 - self.position
        return self.sent.popleft()


def gradient(value: float) -> Tensor:
    """The gradient of a layer."""
    return torch.full((4, 4), value)


def test_the_first_stage_owns_a_tied_parameter():
    """Only the first stage's optimizer has a tied parameter, with the summed gradients; the other gets its values."""
    sent: deque[Any] = deque()
    modules = [tied_module(), tied_module()]
    parameters = [module.network[0].weight for module in modules]
    owner, other = (
        TiedWeights(module, find_tied(module, [list(module.network[:2]), list(module.network[2:])]), Rank(i, sent))
        for i, module in enumerate(modules)
    )
    assert owner.without_copies(parameters[:1]) == parameters[:1]
    assert other.without_copies(parameters[1:]) == []
    for own, theirs, expected in ((1.0, 2.0, 3.0), (None, 2.0, 2.0), (1.0, None, 1.0)):
        parameters[0].grad, parameters[1].grad = (None if one is None else gradient(one) for one in (own, theirs))
        other.collect_gradients()
        owner.collect_gradients()
        assert torch.equal(parameters[0].grad, gradient(expected))
        assert parameters[1].grad is None
    owner.update_copies()
    other.update_copies()
    assert torch.equal(*parameters)
