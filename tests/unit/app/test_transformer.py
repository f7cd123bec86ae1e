"""The language model: causality, learning, logging and splitting into stages."""

import math

import pytest
import torch
from pytorch_lightning import Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from app.transformer import TransformerLanguageModel


def small(**settings):
    """Return a model with 8 tokens and windows of 6, the same on every call."""
    torch.manual_seed(0)
    return TransformerLanguageModel(8, 6, **{"width": 16, "num_blocks": 2, "num_heads": 2, **settings})


def loader(size=16):
    """Return batches of 8 windows that count up, so that each token determines the next."""
    starts = torch.arange(size).unsqueeze(1)
    tokens = (starts + torch.arange(7)) % 8
    return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=8)


def trainer(folder, **kwargs):
    """Return a CPU trainer that writes no files."""
    return Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **kwargs,
    )


def test_a_token_sees_only_those_before_it():
    """Changing a token changes the logits from its position on, and none before."""
    model = small().eval()
    tokens = torch.zeros(1, 6, dtype=torch.int64)
    other = tokens.clone()
    other[0, 3] = 5
    with torch.no_grad():
        same = torch.isclose(model(tokens), model(other), atol=1e-6).all(dim=-1)[0]
    assert same.tolist() == [True, True, True, False, False, False]


def test_a_token_knows_its_place():
    """Equal tokens have different logits at different positions."""
    with torch.no_grad():
        logits = small()(torch.zeros(1, 6, dtype=torch.int64))[0]
    assert not torch.allclose(logits[1], logits[2], atol=1e-3)


def test_training_learns_what_follows(tmp_path):
    """If each token determines the next, the loss falls from chance level to below 0.1."""
    model = small(learning_rate=1e-2)
    pl_trainer = trainer(tmp_path, max_epochs=40)
    (before,) = pl_trainer.validate(model, loader(), verbose=False)
    assert before["val_loss"] == pytest.approx(math.log(8), abs=0.6)
    pl_trainer.fit(model, loader(), loader())
    trained = dict(pl_trainer.callback_metrics)
    assert {"train_loss", "val_loss"} <= trained.keys()
    assert trained["val_loss"] < 0.1
    (tested,) = pl_trainer.test(model, loader(), verbose=False)
    assert tested["test_loss"] == pytest.approx(float(trained["val_loss"]), rel=1e-4)
    predicted = torch.cat(pl_trainer.predict(model, loader()))
    assert torch.equal(predicted, torch.cat([targets for _, targets in loader()]))


def test_the_network_can_be_cut_into_stages():
    """The network is a sequence of layers with all parameters, and a training step calls it once."""
    model = small(num_blocks=3)
    assert isinstance(model.network, nn.Sequential)
    assert [name for name, _ in model.network.named_children()] == ["embedding", "block0", "block1", "block2", "head"]
    assert {id(parameter) for parameter in model.parameters()} == {id(one) for one in model.network.parameters()}
    assert len(model.state_dict()) == len(list(model.parameters()))
    calls = []
    model.network.register_forward_hook(lambda *_: calls.append(1))
    model.log = lambda *args, **kwargs: None  # logging needs a trainer
    model.training_step(next(iter(loader())), 0)
    assert calls == [1]


def test_nothing_is_random_in_training_unless_dropout_is_asked_for():
    """Two passes in training mode are equal by default and differ with dropout."""
    tokens = torch.zeros(1, 6, dtype=torch.int64)
    for dropout, is_equal in ((0.0, True), (0.5, False)):
        model = small(dropout=dropout).train()
        assert torch.equal(model(tokens), model(tokens)) is is_equal


def test_heads_that_do_not_divide_the_width_are_refused():
    """A width that the heads do not divide raises an error with both numbers."""
    with pytest.raises(ValueError, match="width=16 cannot be divided among num_heads=3"):
        small(num_heads=3)


def test_hyperparameters_survive_a_checkpoint(tmp_path):
    """A model is restored from its checkpoint alone, including its constructor arguments."""
    model = small()
    pl_trainer = trainer(tmp_path, max_epochs=1, limit_train_batches=1)
    pl_trainer.fit(model, loader())
    pl_trainer.save_checkpoint(tmp_path / "model.ckpt")
    restored = TransformerLanguageModel.load_from_checkpoint(tmp_path / "model.ckpt")
    assert restored.hparams == model.hparams
    assert (restored.hparams["num_tokens"], restored.hparams["context"]) == (8, 6)
    assert torch.equal(restored.network.head.linear.weight, model.network.head.linear.weight)
