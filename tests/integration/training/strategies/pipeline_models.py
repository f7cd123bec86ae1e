"""Models with losses that are not a mean over equal rows, or with layers that users typically have."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset
from torchmetrics import MeanMetric
from torchvision.models import VisionTransformer

from lightning_sm import gradient_norm
from lightning_sm.training.callbacks.local_position import LocalPosition
from lightning_sm.training.callbacks.mid_epoch import MidEpoch

CLASSES = 5
WIDTH = 16
TOKENS = 12
OUTPUTS = 777
IGNORED = -100


class Recorded(pl.LightningModule):
    """A LightningModule with SGD that records the loss of each step.

    Args:
        network: The network to train.
    """

    lr = 0.05

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.losses: list[float] = []
        self.extra: dict[str, Any] = {}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Record the loss of the step, averaged over all replicas."""
        loss = self.trainer.strategy.reduce(outputs["loss"].clone())
        self.losses.append(float(loss) * self.trainer.accumulate_grad_batches)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD, whose steps shrink with the gradient, so that weights can be compared."""
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def perceptron() -> nn.Sequential:
    """Return a network of six layers with parameters."""
    hidden = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(nn.Linear(8, WIDTH), *hidden, nn.Linear(WIDTH, CLASSES))


class Padded(Recorded):
    """Rows with different numbers of labels; the loss averages over labels that are not padding."""

    def __init__(self) -> None:
        super().__init__(perceptron())

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        """Return the mean over the labels that are not padding."""
        logits = self.network(batch[0])
        return functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), ignore_index=IGNORED)


class Denoising(Recorded):
    """Predicts the noise that it added to the rows, at a scale for each row and one for all."""

    def __init__(self) -> None:
        super().__init__(perceptron())

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        """Return the squared error, with numbers from a generator that is the same in one process."""
        generator = torch.Generator().manual_seed(self.global_step)
        noise = torch.empty_like(batch[0]).normal_(generator=generator)
        scale = torch.randint(1, 4, (len(noise), 1), generator=generator) * torch.rand((), generator=generator)
        return functional.mse_loss(self.network(batch[0] + scale * noise), noise[:, :CLASSES])


class Flipped(Denoising):
    """Changes labels at random after the network's call, and counts its steps, which the loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.seen: list[int] = []

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        """Return a loss of a random pairing of the rows, in which rows count more in later steps."""
        logits = self.network(batch[0])
        generator = torch.Generator().manual_seed(self.global_step)
        self.steps += 1
        self.seen.append(len(logits))
        pairs = logits[torch.randperm(len(logits), generator=generator)]
        noise = torch.rand(len(logits), CLASSES, generator=generator)
        return ((pairs - logits).square() * noise).mean() * self.steps / len(self.seen) + logits.square().mean()

    def on_fit_end(self) -> None:
        self.extra.update({"steps": self.steps, "seen": self.seen})


class WeightDecay(Recorded):
    """A loss that also depends on a layer of the last stage directly."""

    def __init__(self) -> None:
        super().__init__(perceptron())

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        """Return the loss of the rows, and in the third step the norm of a weight."""
        loss = functional.cross_entropy(self.network(batch[0]), batch[1])
        if batch_idx < 2:
            return loss
        last = max(
            (layer for layer in self.network if isinstance(layer, nn.Linear)), key=lambda layer: layer.in_features
        )
        return loss + last.weight.norm()


class Detached(Recorded):
    """A loss that does not depend on the network in its third step."""

    def __init__(self) -> None:
        super().__init__(perceptron())

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        """Return the loss of the rows."""
        logits = self.network(batch[0])
        return functional.cross_entropy(logits.detach() if batch_idx == 2 else logits, batch[1])


class _FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, should_fail: bool) -> Tensor:
        ctx.should_fail = should_fail
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.should_fail:
            raise MemoryError("in a backward pass")
        return gradient, None


class _FailingLayer(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.how = how
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        # One microbatch in the third step.
        self.calls += self.training
        if self.how == "forward" and self.calls == 10:
            raise MemoryError("in a forward pass")
        return _FailsBackward.apply(x * self.weight, self.how == "backward" and self.calls == 10)


class FailingLayer(Recorded):
    """A network with a layer that fails in one microbatch.

    Args:
        how: "forward" or "backward".
    """

    def __init__(self, how: str) -> None:
        super().__init__(nn.Sequential(*perceptron()[:3], _FailingLayer(how), *perceptron()[3:]))

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        """Return the mean over the rows."""
        return functional.cross_entropy(self.network(batch[0]), batch[1])


class Sum(Recorded):
    """A loss that sums over the rows."""

    lr = 0.02

    def __init__(self) -> None:
        super().__init__(perceptron())

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        """Return the sum over the rows."""
        return functional.cross_entropy(self.network(batch[0]), batch[1], reduction="sum") / 10


class ClassWeights(Recorded):
    """A loss that averages over rows, weighted by their classes."""

    def __init__(self) -> None:
        super().__init__(perceptron())
        self.register_buffer("class_weights", torch.tensor([1.0, 5.0, 0.1, 2.0, 0.5]))

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        """Return the weighted mean."""
        return functional.cross_entropy(self.network(batch[0]), batch[1], weight=self.class_weights)


class Contrastive(Recorded):
    """A loss that distinguishes each row from the other rows of its batch."""

    lr = 0.005  # larger steps amplify the rounding errors of float32

    def __init__(self) -> None:
        super().__init__(perceptron())

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        """Return the mean over the rows."""
        features = functional.normalize(self.network(batch[0]), dim=1)
        return functional.cross_entropy(features @ features.T / 0.5, torch.arange(len(features)))


def vectors(rows: int, seed: int) -> TensorDataset:
    """Vectors and a class for each."""
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(rows, 8, generator=generator), torch.randint(0, CLASSES, (rows,), generator=generator)
    )


def tokens(rows: int, seed: int) -> TensorDataset:
    """Sequences of six tokens, and the token that follows each."""
    drawn = torch.randint(0, TOKENS, (rows, 7), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(drawn[:, :-1], drawn[:, 1:])


def sequences(rows: int, seed: int) -> TensorDataset:
    """Sequences of six vectors and a class for each."""
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(rows, 6, 8, generator=generator), vectors(rows, seed).tensors[1])


def images(rows: int, seed: int) -> TensorDataset:
    """Images of 8 x 8 pixels and a class for each."""
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(rows, 3, 8, 8, generator=generator), vectors(rows, seed).tensors[1] % 3)


def padded(rows: int, seed: int) -> TensorDataset:
    """Rows of six vectors, of which the first 0 to 5 have labels; four successive rows have none."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (rows, 6), generator=generator)
    lengths = torch.arange(rows) % 6
    lengths[4:8] = 0
    labels[torch.arange(6) >= lengths[:, None]] = IGNORED
    return TensorDataset(torch.randn(rows, 6, 8, generator=generator), labels)


class Classifier(Recorded):
    """A network that returns logits, with an ordinary loss."""

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        """Return the mean over the rows."""
        return functional.cross_entropy(self.network(batch[0]), batch[1])


class _LSTM(nn.LSTM):
    """An LSTM that returns only its features, as a tensor that is not contiguous."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[0]


class _Last(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, -1]


def _lstm() -> Classifier:
    layers = [_LSTM(8, WIDTH, batch_first=True), *(_LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(3))]
    return Classifier(nn.Sequential(*layers, _Last(), nn.Linear(WIDTH, CLASSES)))


def _time_first() -> Classifier:
    """LSTMs with time in dimension 0, so that microbatches would split sequences."""
    return Classifier(
        nn.Sequential(*(_LSTM(width, WIDTH) for width in (8, WIDTH)), nn.Flatten(), nn.Linear(96, CLASSES))
    )


def _raw_lstm() -> Classifier:
    """A network whose first stage ends with an LSTM, which returns a nested tuple."""
    return Classifier(nn.Sequential(nn.LSTM(8, WIDTH, batch_first=True), nn.Linear(WIDTH, WIDTH), nn.LSTM(WIDTH, 8)))


class _RawLSTMInValidation(Classifier):
    """The network of ``_raw_lstm``, with a validation that runs before training."""

    def __init__(self) -> None:
        super().__init__(_raw_lstm().network)

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.network(batch[0])


class _ChannelsLast(Classifier):
    def __init__(self) -> None:
        convolutions = [layer for _ in range(3) for layer in (nn.Conv2d(3, 3, 3), nn.ReLU())]
        network = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(12, CLASSES))
        super().__init__(network.to(memory_format=torch.channels_last))

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        return super().training_step((batch[0].to(memory_format=torch.channels_last), batch[1]), batch_idx)


class _Down(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.Conv2d(8, 8, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        skip = torch.relu(self.first(x))
        return torch.relu(self.down(skip)), skip


class _Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, values: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return torch.relu(self.convolution(values[0])), values[1]


class _Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.last = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, values: tuple[Tensor, Tensor]) -> Tensor:
        # The gradient of cat is a narrow view, which is not contiguous.
        joined = torch.cat([values[1], self.up(values[0])], 1)
        return self.last(joined).flatten(2).mean(2)


def _unet() -> Classifier:
    """A U-Net that passes its skip connection on in a tuple."""
    return Classifier(nn.Sequential(_Down(), _Middle(), _Middle(), _Up()))


class _Patches(nn.Module):
    """The first layers of torchvision's ViT."""

    def __init__(self, vit: VisionTransformer) -> None:
        super().__init__()
        self.project, self.position, self.token = vit.conv_proj, vit.encoder.pos_embedding, vit.class_token

    def forward(self, x: Tensor) -> Tensor:
        x = self.project(x).flatten(2).transpose(1, 2)
        return torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position


class _ViTHead(nn.Module):
    def __init__(self, vit: VisionTransformer) -> None:
        super().__init__()
        self.norm, self.head = vit.encoder.ln, vit.heads

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x)[:, 0])


def _vit() -> Classifier:
    vit = VisionTransformer(
        image_size=8, patch_size=4, num_layers=4, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=CLASSES
    )
    nn.init.normal_(vit.heads.head.weight, std=0.1)  # torchvision initializes it to 0
    return Classifier(nn.Sequential(_Patches(vit), *vit.encoder.layers, _ViTHead(vit)))


class _ManyLengths(Classifier):
    """Batches of six lengths in turn, as if padded to the longest row; counts the passes of the first layer."""

    def __init__(self) -> None:
        super().__init__(perceptron())
        self.passes = 0
        self.network[0].register_forward_hook(self._count)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        length = 1 + self.trainer.global_step % 6
        return batch[0][:, :length], batch[1]

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        return functional.cross_entropy(self.network(batch[0]).mean(1), batch[1])

    def _count(self, *_: Any) -> None:
        self.passes += 1

    def on_fit_end(self) -> None:
        self.extra["passes"] = self.passes


class _Counters(Classifier):
    """A training_step that counts in an attribute, a container and a buffer."""

    def __init__(self) -> None:
        super().__init__(perceptron())
        self.rows = self.counted_behind = 0
        self.batches: list[int] = []
        self.register_buffer("mean", torch.zeros(8))

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        self.rows += len(batch[0])
        self.batches.append(batch_idx)
        loss = super().training_step(batch, batch_idx) * (1 + self.mean.square().sum()) / len(self.batches)
        self.counted_behind += 1
        self.mean.mul_(0.9).add_(batch[0].mean(0), alpha=0.1)
        return loss

    def on_fit_end(self) -> None:
        self.extra.update({"rows": self.rows, "batches": self.batches, "mean": self.mean})
        self.extra["counted behind"] = self.counted_behind


class _Outputs(Recorded):
    """Returns outputs that are much larger than its inputs, and searches memory for them after the step."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(*perceptron()[:-1], nn.Linear(WIDTH, OUTPUTS)))
        self.mean = MeanMetric()

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> dict[str, Tensor]:
        logits = self.network(batch[0])
        loss = functional.cross_entropy(logits, batch[1])
        self.mean(logits.detach())
        self.log("mean", self.mean)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "logits": logits.detach(), "largest": logits.detach().max()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        found = [one for one in gc.get_objects() if type(one) is Tensor and one.shape == (len(batch[0]), OUTPUTS)]
        self.extra["whole outputs"] = max(self.extra.get("whole outputs", 0), len(found))
        self.extra["returned"] = sorted(outputs)
        self.extra.setdefault("largest", []).append(float(outputs["largest"]))


class _OwnLogger(Classifier):
    """Uses a logger in its third training step."""

    def __init__(self) -> None:
        super().__init__(perceptron())

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 2:
            self.logger.log_metrics({"x": 1.0})
        return super().training_step(batch, batch_idx)


class _LoggerInValidation(Classifier):
    """Uses a logger in its first validation step, after calling the network."""

    def __init__(self) -> None:
        super().__init__(perceptron())

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.network(batch[0])
        self.logger.log_metrics({"x": 1.0})


class _Dropouts(Classifier):
    """Dropout in each stage; records the masks."""

    def __init__(self) -> None:
        stage = [(nn.Linear(width, WIDTH), nn.Dropout(0.5)) for width in (8, WIDTH)]
        super().__init__(nn.Sequential(*stage[0], *stage[1], nn.Linear(WIDTH, CLASSES)))
        for layer in self.network:
            if isinstance(layer, nn.Dropout):
                layer.register_forward_hook(self._keep)

    def _keep(self, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        if layer.training:
            self.extra.setdefault("masks", []).append((output == 0).tolist())


class _Draws(Classifier):
    """Draws random numbers in every hook of a step, with dropout in each stage; records the numbers by hook.

    Some hooks run on all ranks, some on the rank of the last stage, and one on the rank that fetches batches.
    """

    def __init__(self) -> None:
        layers = [(nn.Linear(width, WIDTH), nn.Dropout(0.5), nn.Tanh()) for width in (8, WIDTH)]
        super().__init__(nn.Sequential(*layers[0], *layers[1], nn.Linear(WIDTH, CLASSES)))
        self.draws: dict[str, tuple[float, ...]] = {}

    def _draw(self, where: str, batch_idx: int = -1) -> float:
        numbers = (float(torch.rand(())), random.random(), float(np.random.rand()))
        if self.trainer.sanity_checking:
            return numbers[0]  # Lightning then restores the random state, so fits draw these numbers again
        self.draws[f"{where}, epoch {self.current_epoch}, step {self.global_step}, batch {batch_idx}"] = numbers
        return numbers[0]

    def configure_callbacks(self) -> list[pl.Callback]:
        """Return the callbacks with which a job resumes, and one that saves in the middle of an epoch."""
        folder = self.trainer.default_root_dir
        name = "draws at {step}"
        checkpoint = ModelCheckpoint(
            folder, name, auto_insert_metric_name=False, every_n_train_steps=4, save_top_k=-1, save_weights_only=False
        )
        return [LocalPosition(), MidEpoch(), checkpoint]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Add noise, as augmentation does."""
        return batch[0] + 0.01 * torch.randn_like(batch[0]), batch[1]

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        """Draw after calling the network."""
        logits = self.network(batch[0])
        return functional.cross_entropy(logits, batch[1]) * (1 + self._draw("training_step", batch_idx))

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        """Draw before and after calling the network."""
        noise = self._draw("validation_step", batch_idx)
        self.log("val_loss", functional.cross_entropy(self.network(batch[0] + noise), batch[1]))
        self._draw("validation_step, end", batch_idx)

    def on_train_start(self) -> None:
        """Draw unless the fit resumes, because an uninterrupted fit draws here only once."""
        if not self.global_step:
            self._draw("on_train_start")

    def on_train_epoch_start(self) -> None:
        """Draw a learning rate."""
        self.optimizers().param_groups[0]["lr"] = 0.01 + 0.05 * self._draw("on_train_epoch_start")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Draw."""
        self._draw("on_train_batch_start", batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Draw."""
        self._draw("on_before_optimizer_step")

    def on_train_epoch_end(self) -> None:
        """Draw."""
        self._draw("on_train_epoch_end")

    def on_validation_start(self) -> None:
        """Draw."""
        self._draw("on_validation_start")

    def on_validation_epoch_start(self) -> None:
        """Draw."""
        self._draw("on_validation_epoch_start")

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Draw."""
        self._draw("on_validation_batch_end", batch_idx)

    def on_validation_epoch_end(self) -> None:
        """Draw."""
        self._draw("on_validation_epoch_end")

    def on_fit_end(self) -> None:
        """Record the numbers."""
        self.extra["draws"] = self.draws


class _Stops(Classifier):
    """A model that ends the fit in its third batch, or in one with few rows, as microbatches have."""

    def __init__(self) -> None:
        super().__init__(perceptron())

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        loss = functional.cross_entropy(self.network(batch[0]).flatten(1), batch[1])
        if batch_idx == 2 or len(batch[0]) < 16:
            self.trainer.should_stop = True
        return loss


class _Averaged(Classifier):
    """A model with a callback that averages the parameters of its rank, as those of torch_ema do."""

    def __init__(self) -> None:
        super().__init__(perceptron())

    def configure_callbacks(self) -> list[pl.Callback]:
        return [_Average()]


class _Average(pl.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.average = [parameter.detach().clone() for parameter in pl_module.parameters()]

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}


class _Fails(Classifier):
    """A model that does what a pipeline refuses, in its third batch or in validation.

    Args:
        how: "skip": returns no loss; "draw": draws a number per row from NumPy first; "draw again": draws from its own
            generator after the call, too; "change": changes the labels in place; "trim": passes other shapes to the
            network; "twice": calls the network twice in a validation step.
    """

    def __init__(self, how: str) -> None:
        super().__init__(perceptron())
        self.how = how
        self.generator = torch.Generator().manual_seed(1)

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
        x, labels = batch
        if batch_idx == 2 and self.how == "draw":
            x = x + torch.from_numpy(np.random.rand(len(x), 1)).float()
        if self.how == "draw again":
            x = x + torch.rand(len(x), 1, generator=self.generator)
        if batch_idx == 2 and self.how == "change":
            labels.clamp_(min=1)
        if batch_idx == 2 and self.how == "trim":
            x = x[:, None]
        logits = self.network(x).flatten(1)
        if batch_idx == 1 and self.how == "draw again":
            torch.rand(1, generator=self.generator)
        return None if batch_idx == 2 and self.how == "skip" else functional.cross_entropy(logits, labels)

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.network(batch[0])
        if self.how == "twice":
            self.network(batch[0])


class _Tied(Recorded):
    """A language model whose embedding and head share weights, with parameter groups chosen by name.

    Args:
        optimizer: "sgd" or "adamw".
    """

    def __init__(self, optimizer: str = "sgd") -> None:
        embedding, head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)
        nn.init.normal_(embedding.weight, std=0.3)
        head.weight = embedding.weight
        hidden = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        super().__init__(nn.Sequential(embedding, *hidden, head))
        self.optimizer = optimizer

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        return functional.cross_entropy(self.network(batch[0]).flatten(0, 1), batch[1].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        first = [parameter for name, parameter in self.named_parameters() if name.startswith("network.0")]
        others = [parameter for name, parameter in self.named_parameters() if not name.startswith("network.0")]
        groups = [{"params": first, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        if self.optimizer == "sgd":
            return torch.optim.SGD(groups, lr=self.lr, momentum=0.9)
        return torch.optim.AdamW(groups, lr=1e-3)


class _OnMeta(Classifier):
    """A network on the meta device, which has no memory until it is split into stages."""

    def __init__(self) -> None:
        with torch.device("meta"):
            embedding = nn.Linear(8, WIDTH)
            block = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
            same = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
            network = nn.Sequential(embedding, block, same, _Last(), nn.Linear(WIDTH, CLASSES))
        super().__init__(network)

    def on_fit_start(self) -> None:
        self.extra["initial"] = [float(parameter.sum()) for parameter in self.parameters() if parameter.ndim > 1]

    def on_fit_end(self) -> None:
        self.extra["held"] = sum(parameter.numel() for parameter in self.parameters())


class _Norms(Classifier):
    """Records the norms of gradients before they are clipped."""

    def __init__(self) -> None:
        super().__init__(perceptron())

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        norms = [float(gradient_norm(self, p)) for p in (2.0, 1.0, math.inf)]
        self.extra.setdefault("norms", []).extend(norms)


class _LBFGS(Classifier):
    def __init__(self) -> None:
        super().__init__(perceptron())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters())


LOSSES: dict[str, Any] = {
    "padded": (Padded, padded),
    "sum": (Sum, vectors),
    "class weights": (ClassWeights, vectors),
    "denoising": (Denoising, vectors),
    "contrastive": (Contrastive, vectors),
    "flipped": (Flipped, vectors),
    "weight decay": (WeightDecay, vectors),
    "detached": (Detached, vectors),
    "fails forward": (partial(FailingLayer, "forward"), vectors),
    "fails backward": (partial(FailingLayer, "backward"), vectors),
}

LAYERS: dict[str, Any] = {
    "lstm": (_lstm, sequences),
    "raw lstm": (_raw_lstm, sequences),
    "time first": (_time_first, sequences),
    "channels_last": (_ChannelsLast, images),
    "unet": (_unet, images),
    "vit": (_vit, images),
    "lengths": (_ManyLengths, sequences),
    "counters": (_Counters, vectors),
    "outputs": (_Outputs, vectors),
    "own logger": (_OwnLogger, vectors),
    "logger in validation": (_LoggerInValidation, vectors),
    "dropouts": (_Dropouts, vectors),
    "draws": (_Draws, vectors),
    "tied": (_Tied, tokens),
    "tied, adamw": (partial(_Tied, "adamw"), tokens),
    "meta": (_OnMeta, sequences),
    "norms": (_Norms, vectors),
    "lbfgs": (_LBFGS, vectors),
    "skip": (partial(_Fails, "skip"), vectors),
    "draw": (partial(_Fails, "draw"), vectors),
    "draw again": (partial(_Fails, "draw again"), vectors),
    "change": (partial(_Fails, "change"), vectors),
    "trim": (partial(_Fails, "trim"), vectors),
    "twice": (partial(_Fails, "twice"), vectors),
    "averaged": (_Averaged, vectors),
    "stops": (_Stops, vectors),
    "raw lstm in validation": (_RawLSTMInValidation, sequences),
}
