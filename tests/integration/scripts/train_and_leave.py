# Makes a clean exit hard: validation streams end at a different batch on each rank, and checkpoints are written slowly
# in the background, or not at all. NOTES/<host> records whether a checkpoint had been written when the host exited.
import errno
import os
import time
from pathlib import Path

import torch
from pytorch_lightning import LightningDataModule, LightningModule
from pytorch_lightning.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_sm import SageMakerCLI
from lightning_sm.job.facts import SageMakerJob

WRITTEN = Path(os.environ["NOTES"], "written")


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.ones(6 if torch.distributed.get_rank() else 3, 1))


class SizedStream(Stream):
    def __len__(self):
        return 6


class Numbers(LightningDataModule):
    """Args: stream: "none", "unsized" or "sized"."""

    def __init__(self, stream: str = "none", num_samples: int = 32) -> None:
        super().__init__()
        self.stream, self.num_samples = stream, num_samples

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(self.num_samples, 1)), batch_size=4)

    def val_dataloader(self):
        streams = {"unsized": Stream, "sized": SizedStream}
        return DataLoader(streams[self.stream](), batch_size=1) if self.stream in streams else []


class Mean(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        time.sleep(0.02)
        return self.layer(batch[0]).mean()

    def validation_step(self, batch, batch_idx):
        self.log("mean", self.layer(batch).mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SlowIO(TorchCheckpointIO):
    def save_checkpoint(self, checkpoint, path, storage_options=None):
        time.sleep(2)
        if "FULL" in os.environ:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().save_checkpoint(checkpoint, path)
        WRITTEN.touch()


if __name__ == "__main__":
    try:
        SageMakerCLI(
            Mean,
            Numbers,
            trainer_defaults={
                "accelerator": "cpu",
                "enable_model_summary": False,
                "logger": False,
                "num_sanity_val_steps": 0,
                "plugins": [AsyncCheckpointIO(SlowIO())],
            },
        )
    finally:
        host = SageMakerJob.from_environment().current_host
        Path(os.environ["NOTES"], host).write_text(str(WRITTEN.exists()))
