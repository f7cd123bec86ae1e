"""Train and test on data hosts with two ranks on this machine. Each rank writes the samples that it saw to a file."""

import json
import os
import signal
from pathlib import Path

import torch
from pytorch_lightning import LightningDataModule, LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, Dataset

from lightning_sm import RemoteDataModule

NUM_TRAIN, NUM_TEST = 103, 17


class Augmented(Dataset):
    """Numbers with noise.

    Args:
        length: Number of samples.
        deadly: A file; the first worker to read sample 50 creates it and kills its data host.
    """

    def __init__(self, length, deadly=None):
        self.length, self.deadly = length, deadly

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index == 50 and self.deadly is not None and not self.deadly.exists():
            self.deadly.touch()
            os.kill(os.getppid(), signal.SIGKILL)
        return index, torch.rand(2)


class Data(LightningDataModule):
    """Shuffled training data, and ordered validation and test data."""

    def __init__(self, deadly: Path | None = None):
        super().__init__()
        self.deadly = deadly

    def train_dataloader(self):
        return DataLoader(Augmented(NUM_TRAIN, self.deadly), batch_size=5, shuffle=True)

    def val_dataloader(self):
        return DataLoader(Augmented(NUM_TEST), batch_size=5)

    test_dataloader = val_dataloader


class Model(LightningModule):
    """Records index and noise of every sample by stage, epoch and step."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.seen = {}

    def note(self, stage, batch):
        samples = [
            [index, noise.numpy().tobytes().hex()] for index, noise in zip(batch[0].tolist(), batch[1], strict=True)
        ]
        self.seen.setdefault(f"{stage} {self.current_epoch}", []).append(samples)
        return self.layer(batch[1]).mean()

    def training_step(self, batch, batch_idx):
        return self.note("train", batch)

    def validation_step(self, batch, batch_idx):
        self.note("val", batch)

    def test_step(self, batch, batch_idx):
        self.note("test", batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6)

    def write(self):
        Path(os.environ["SEEN"], f"rank-{self.global_rank}.json").write_text(json.dumps(self.seen))


def main():
    settings = {"max_epochs": 2, "logger": False, "enable_progress_bar": False, "num_sanity_val_steps": 0}
    settings |= {"enable_checkpointing": False, "enable_model_summary": False, "accelerator": "cpu"}
    seed_everything(3, verbose=False)
    trainer, model = Trainer(devices=2, strategy="ddp", **settings), Model()
    deadly = Path(os.environ["DEADLY"]) if "DEADLY" in os.environ else None
    data = RemoteDataModule(Data(deadly), os.environ["ADDRESSES"].split())
    trainer.fit(model, datamodule=data)
    trainer.test(model, datamodule=data, verbose=False)
    model.write()
    # As the CLI does, because a Gloo thread that outlives the interpreter aborts the process.
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
