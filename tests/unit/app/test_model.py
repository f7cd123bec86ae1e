"""The example model: predictions, training, logged metrics and norm layers."""

import pytest
import torch
from pytorch_lightning import Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import resnet18

from app.model import ResNet18Classifier


def batch(size=8):
    """Return the same random images on every call, with labels from 0 to 3."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size, 3, 32, 32, generator=generator), torch.arange(size) % 4


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


def loader():
    """Return a loader with two batches of 8."""
    return DataLoader(TensorDataset(*batch(16)), batch_size=8)


@pytest.fixture
def model():
    """Return a model with four classes and the same weights in every test."""
    torch.manual_seed(0)
    return ResNet18Classifier(num_classes=4)


def test_predictions_are_probabilities(model):
    """Predictions have one row per image, which sums to 1."""
    model.eval()
    probabilities = model.predict_step(batch(), 0)
    assert probabilities.shape == (8, 4)
    assert torch.allclose(probabilities.sum(dim=1), torch.ones(8))


def test_fit_logs_loss_and_accuracy(model, tmp_path):
    """A fit logs loss and accuracy of training and validation, for callbacks and metric definitions."""
    pl_trainer = trainer(tmp_path, max_epochs=1)
    pl_trainer.fit(model, loader(), loader())
    metrics = pl_trainer.callback_metrics
    assert {"train_loss", "train_acc", "val_loss", "val_acc"} <= metrics.keys()
    assert metrics["train_loss"] > 0
    assert 0 <= metrics["val_acc"] <= 1


def test_test_logs_loss_and_accuracy(model, tmp_path):
    """The test logs loss and accuracy over all batches, under separate names."""
    metrics = trainer(tmp_path).test(model, loader(), verbose=False)[0]
    images, labels = batch(16)
    with torch.no_grad():
        logits = model.eval()(images)
    assert metrics.keys() == {"test_loss", "test_acc"}
    assert metrics["test_loss"] == pytest.approx(nn.functional.cross_entropy(logits, labels).item(), rel=1e-4)
    assert metrics["test_acc"] == pytest.approx((logits.argmax(dim=1) == labels).float().mean().item())


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_training_lowers_the_loss(norm, tmp_path):
    """Ten steps on one batch reduce its loss to less than half, with either norm layer."""
    torch.manual_seed(0)
    model = ResNet18Classifier(num_classes=4, learning_rate=5e-4, norm=norm)
    losses = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=model.learning_rate)
    model.log = lambda *args, **kwargs: None  # logging needs a trainer
    for _ in range(10):
        loss = model.training_step(batch(), 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_group_norm_treats_each_image_alone():
    """With group norm in training mode, an image's logits do not depend on the rest of the batch."""
    model = ResNet18Classifier(num_classes=4, norm="group").train()
    images, _ = batch()
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    with torch.no_grad():
        assert torch.allclose(model(images)[:4], model(images[:4]), atol=1e-4)


def test_batch_norm_mixes_the_images_of_a_batch():
    """With batch norm, an image's logits depend on its batch, so results depend on how hosts split a batch."""
    model = ResNet18Classifier(num_classes=4, norm="batch").train()
    images, _ = batch()
    with torch.no_grad():
        assert not torch.allclose(model(images)[:4], model(images[:4]), atol=1e-2)


def test_hyperparameters_survive_a_checkpoint(model, tmp_path):
    """A model is restored from its checkpoint alone, including its constructor arguments."""
    pl_trainer = trainer(tmp_path, max_epochs=1, limit_train_batches=1)
    pl_trainer.fit(model, loader())
    pl_trainer.save_checkpoint(tmp_path / "model.ckpt")
    restored = ResNet18Classifier.load_from_checkpoint(tmp_path / "model.ckpt")
    assert restored.hparams == model.hparams
    assert restored.hparams["num_classes"] == 4
    assert torch.equal(restored.network.fc.weight, model.network.fc.weight)


def test_the_learning_rate_ends_at_zero_with_the_run(model, tmp_path):
    """The schedule spans the steps that the trainer plans, and reaches 0 at their end."""
    pl_trainer = trainer(tmp_path, max_epochs=3)
    pl_trainer.fit(model, loader())
    assert pl_trainer.global_step == 6
    assert pl_trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0, abs=1e-9)


def test_the_layers_of_a_pipeline_are_the_network(model):
    """In sequence, the layers compute the network's output; each can start a stage, and all parameters are included."""
    model.eval()
    images, _ = batch()
    layers = model.network.pipeline_layers()
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    assert [id(one) for one in parameters] == [id(one) for one in model.network.parameters()]
    features = images
    for layer in layers:
        # A stage's input is a leaf that requires a gradient, so layers must not overwrite it.
        features = layer(features.detach().requires_grad_())
    assert torch.equal(features, model(images))
    features.sum().backward()
    assert layers[-1].weight.grad is not None


def test_the_names_of_the_weights_are_those_of_torchvision(model):
    """Weights from torchvision's ResNet-18 can be loaded."""
    assert model.network.state_dict().keys() == resnet18(num_classes=4).state_dict().keys()
