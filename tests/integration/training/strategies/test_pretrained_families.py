"""Each family of transformers whose parts are known, cut into stages in one process."""

from __future__ import annotations

import copy

import pytest
import torch
from pytorch_lightning import LightningModule

from lightning_sm.training.strategies.pipeline.layers import Network
from lightning_sm.training.strategies.pipeline.pretrained import FAMILIES
from tests.fakes.cut_model import through
from tests.integration.training.strategies.pretrained_models import CAUSAL, IMAGES, SEQUENCES, images, make, text

pytestmark = [pytest.mark.proof, pytest.mark.usefixtures("transformers_path")]

ENCODERS = ("bert", "roberta", "xlm-roberta")
OF_IMAGES = ("dinov2", "vit")


@pytest.mark.parametrize("cuts", [[1], [3, 5], [7]], ids=str)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_stages_of_each_family_compute_what_the_model_does(family: str, cuts: list[int]):
    """The loss, the logits and all gradients are the same bits, with rows of different lengths."""
    torch.manual_seed(0)
    if family in OF_IMAGES:
        model, rows = make(IMAGES, family), images(4, 3)
    elif family in ENCODERS:
        model, rows = make(SEQUENCES, family), text(8, 3, labels="class")[4:]
    else:
        model, rows = make(CAUSAL, family), text(8, 3, padding="left")[4:]
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    whole = copy.deepcopy(model)
    expected = whole(**batch)
    expected.loss.backward()
    module = LightningModule()
    module.model = model
    found = through(Network(module, None), cuts, batch)
    found.loss.backward()
    assert torch.equal(found.loss, expected.loss)
    assert torch.equal(found.logits, expected.logits)
    assert type(found) is type(expected)
    for (name, ours), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad), name
