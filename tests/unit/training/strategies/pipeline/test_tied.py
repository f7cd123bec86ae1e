"""Parameters that several layers share."""

from __future__ import annotations

import torch
from pytorch_lightning import LightningModule
from torch import nn

from lightning_sm.training.strategies.pipeline.layers import materialize
from lightning_sm.training.strategies.pipeline.tied import find_tied, retie


def tied_module() -> LightningModule:
    """A module whose first and last of three layers share their weights."""
    module = LightningModule()
    module.network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    module.network[2].weight = module.network[0].weight
    return module


def test_tied_parameters_are_found_by_all_their_names():
    """In the module's order, with the layers that hold them; others are not tied."""
    module = tied_module()
    (found,) = find_tied(module, list(module.network))
    assert found.names == ("network.0.weight", "network.2.weight")
    assert found.layers == {0, 2}


def test_layers_that_are_made_are_tied_again():
    """To make them gives each name a parameter of its own."""
    with torch.device("meta"):
        module = tied_module()
    tied = find_tied(module, list(module.network))
    materialize(list(module.network), torch.device("cpu"))
    assert module.network[0].weight is not module.network[2].weight
    retie(module, tied)
    assert module.network[0].weight is module.network[2].weight
