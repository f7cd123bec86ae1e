"""Fits with and without a pipeline on the same rows in each step; each group of processes runs several fits."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Sampler, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from app.model import ResNet18Classifier
from app.transformer import TransformerLanguageModel
from lightning_sm import PipelineParallelStrategy
from lightning_sm.errors import StrategyError
from lightning_sm.training.group_exit import leave_at_exit
from tests.integration.training.strategies.gpt2 import GPT2_MODELS
from tests.integration.training.strategies.pipeline_models import LAYERS, LOSSES

ROWS = 16  # per step, of all replicas together
CLASSES = 5


@dataclass(frozen=True)
class Fit:
    """A fit of one of the models.

    Args:
        strategy: Arguments of the pipeline strategy; None for stock Lightning, with DDP if there are several processes.
        model: A key of ``MODELS``.
        trainer: Arguments of the Trainer.
        resume: Name of the fit whose checkpoint to resume from.
        rows: Number of rows of the training data.
        refused: Whether the fit must fail; its result is then the error that the rank raises.
    """

    strategy: Mapping[str, Any] | None = None
    model: str = "tokens"
    trainer: Mapping[str, Any] = field(default_factory=dict)
    resume: str | None = None
    rows: int = 6 * ROWS
    refused: bool = False


class TokenClassifier(pl.LightningModule):
    """A small transformer that logs everything: values per step and epoch, and metrics, with a per-step scheduler."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__()
        self.optimizer = optimizer
        blocks = [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(6)]
        self.network = nn.Sequential(nn.Embedding(32, 16), *blocks, _Mean(), nn.Linear(16, CLASSES))
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.val_accuracy = MulticlassAccuracy(CLASSES)
        self.losses: list[float] = []
        self.val_rows: list[int] = []
        self.extra: dict[str, Any] = {}

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Return the loss and the logits."""
        tokens, labels = batch
        logits = self.network(tokens)
        loss = functional.cross_entropy(logits, labels)
        self.accuracy(logits, labels)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("rows", float(len(labels)), on_epoch=True, sync_dist=True, reduce_fx="sum")
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return {"loss": loss, "logits": logits.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Record the loss of the step, averaged over all replicas."""
        loss = self.trainer.strategy.reduce(outputs["loss"].clone())
        self.losses.append(float(loss) * self.trainer.accumulate_grad_batches)

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Log the loss and the accuracy."""
        tokens, labels = batch
        logits = self.network(tokens)
        self.val_accuracy(logits, labels)
        self.val_rows.append(len(tokens))
        loss = functional.cross_entropy(logits, labels)
        self.log("val_loss", loss, sync_dist=True)
        self.log("val_accuracy", self.val_accuracy)
        return {"loss": loss, "logits": logits}

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Record the outputs of the step."""
        self.extra["val_outputs"] = sorted(outputs)
        self.extra["val_rows"] = self.val_rows

    def test_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        """Log the loss, and return the logits."""
        logits: Tensor = self.network(batch[0])
        self.log("test_loss", functional.cross_entropy(logits, batch[1]))
        return logits

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Record the outputs of the step."""
        self.extra["tested"] = outputs if isinstance(outputs, Tensor) else None

    def predict_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.network(batch[0])
        return logits

    def configure_optimizers(self) -> Any:
        """Return an optimizer with two parameter groups, and a scheduler that steps after each step."""
        groups = [
            {"params": [p for p in self.parameters() if p.ndim > 1], "weight_decay": 0.01},
            {"params": [p for p in self.parameters() if p.ndim <= 1]},
        ]
        optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
        if self.optimizer == "adamw":
            optimizer = torch.optim.AdamW(groups, lr=3e-3)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5), "interval": "step"}]


class _Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class _Losses:
    """Records the losses of the app's models, of which only the optimizer differs from the app."""

    losses: list[float]
    sgd_lr = 0.05

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = self.trainer.strategy.reduce(outputs["loss"].clone())  # type: ignore[attr-defined]
        self.losses.append(float(loss))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.sgd_lr, momentum=0.9)  # type: ignore[attr-defined]


class AppTransformer(_Losses, TransformerLanguageModel):
    """The app's transformer with SGD."""

    def __init__(self) -> None:
        super().__init__(num_tokens=32, context=6, width=16, num_blocks=4, num_heads=2)
        self.losses = []


class AppResNet(_Losses, ResNet18Classifier):
    """The app's ResNet-18 with group normalization and SGD."""

    # On random images, larger steps amplify the rounding errors of float32 by 10,000.
    sgd_lr = 1e-3

    def __init__(self) -> None:
        super().__init__(num_classes=CLASSES, norm="group")
        self.losses = []


def _tokens(rows: int, seed: int) -> TensorDataset:
    tokens = torch.randint(0, 32, (rows, 6), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(tokens, tokens.sum(1) % CLASSES)


def _text(rows: int, seed: int) -> TensorDataset:
    tokens = torch.randint(0, 32, (rows, 7), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def _images(rows: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(rows, 3, 32, 32, generator=generator), torch.randint(0, CLASSES, (rows,), generator=generator)
    )


MODELS: dict[str, Any] = {
    "tokens": (TokenClassifier, _tokens),
    "adamw": (lambda: TokenClassifier("adamw"), _tokens),
    "transformer": (AppTransformer, _text),
    "resnet": (AppResNet, _images),
    **LOSSES,
    **LAYERS,
    **GPT2_MODELS,
}


class _InOrder(Sampler[int]):
    """Gives each replica a slice of each global batch, so that steps have the same rows with any number of replicas."""

    def __init__(self, rows: int, replicas: int, replica: int) -> None:
        share = ROWS // replicas
        self._rows = [
            row
            for first in range(0, rows, ROWS)
            for row in range(first + replica * share, min(rows, first + (replica + 1) * share))
        ]

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


class _Processes(LightningEnvironment):
    @property
    def creates_processes_externally(self) -> bool:
        return True


def command(folder: Path, groups: Sequence[tuple[int, int, Mapping[str, Fit]]]) -> list[str]:
    """Return the command that runs groups of processes one after the other, and the fits of each in turn.

    Each rank writes one result file per fit. Ranks are forked from a process that has imported everything.

    Args:
        folder: Folder for result files, ``NAME.RANK``, and checkpoints, ``NAME.ckpt``.
        groups: For each group, the number of processes, the port on which rank 0 listens, and the fits.
    """
    texts = [(size, port, {name: asdict(fit) for name, fit in fits.items()}) for size, port, fits in groups]
    return [sys.executable, "-m", __name__, str(folder), json.dumps(texts)]


def _main(folder: Path, groups: list[tuple[int, int, Mapping[str, Mapping[str, Any]]]]) -> None:
    for world_size, port, texts in groups:
        for rank in range(world_size):
            if os.fork() == 0:
                fits = {name: Fit(**text) for name, text in texts.items()}
                _run_all(rank, world_size, port, folder, fits)
                return  # exit like any other process
        for _ in range(world_size):
            if os.wait()[1] != 0:
                sys.exit(1)  # the caller kills the other ranks


def _run_all(rank: int, world_size: int, port: int, folder: Path, fits: Mapping[str, Fit]) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    leave_at_exit()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank), NODE_RANK="0")
    if any((fit.strategy or {}).get("process_group_backend") == "staged" for fit in fits.values()):
        importlib.import_module("tests.gpu.staged")  # registers the backend
    for name, fit in fits.items():
        seen = _refusal(fit, world_size, folder, name) if fit.refused else _run(fit, world_size, folder, name)
        torch.save(seen, folder / f"{name}.{rank}")


def _refusal(fit: Fit, world_size: int, folder: Path, name: str) -> dict[str, Any]:
    began = time.monotonic()
    try:
        _run(fit, world_size, folder, name)
    except (StrategyError, MemoryError) as error:
        return {"error": str(error), "seconds": time.monotonic() - began}
    raise AssertionError(f"{name} was not refused")


def _run(fit: Fit, world_size: int, folder: Path, name: str) -> dict[str, Any]:
    pl.seed_everything(0)
    make, data = MODELS[fit.model]
    module = make()
    strategy = "auto" if fit.strategy is None else PipelineParallelStrategy(**fit.strategy)
    settings = {
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "default_root_dir": folder,
        **fit.trainer,
    }
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy,
        plugins=[_Processes()] if world_size > 1 else None,
        **settings,
    )
    loaders = _Loaders(data, fit.rows)
    resume = None if fit.resume is None else str(folder / f"{fit.resume}.ckpt")
    trainer.fit(module, datamodule=loaders, ckpt_path=resume, weights_only=False)
    trainer.save_checkpoint(folder / f"{name}.ckpt")
    seen = {
        "losses": module.losses,
        "weights": trainer.strategy.lightning_module_state_dict(),
        "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
        "step": trainer.global_step,
        "extra": getattr(module, "extra", {}),
    }
    if fit.model == "tokens" and not fit.trainer.get("max_steps"):
        seen["tested"] = trainer.test(module, DataLoader(_tokens(13, 7), 5), verbose=False)[0]
        seen["predictions"] = torch.cat(trainer.predict(module, DataLoader(_tokens(13, 7), 5)))
    return seen


class _Loaders(pl.LightningDataModule):
    def __init__(self, data: Any, rows: int) -> None:
        super().__init__()
        self._data, self._rows = data, rows

    def train_dataloader(self) -> DataLoader[Any]:
        ranks = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        sampler = _InOrder(self._rows, ranks["num_replicas"], ranks["rank"])
        return DataLoader(self._data(self._rows, 3), ROWS // ranks["num_replicas"], sampler=sampler)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self._data(22, 5), 10)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), json.loads(sys.argv[2]))
