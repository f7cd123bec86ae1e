"""Trains and tests; every rank writes what it saw to a file. Also by hand: with ADDRESSES, two ranks of this host."""

import json
import os
import signal
from pathlib import Path

import torch
from pytorch_lightning import LightningDataModule, LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_sm import RemoteDataModule, SageMakerCLI

NUM_TRAIN, NUM_TEST = 103, 17


class Augmented(Dataset):
    """Numbers with noise.

    Args:
        length: How many.
        deadly: A file; who first reads sample 50 makes it and kills its data host.
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
    """Shuffled training data, and data in order; split over the ranks by Lightning's hands or by its own."""

    def __init__(self, batch_size: int = 5, deadly: Path | None = None, is_split: bool = False):
        super().__init__()
        self.batch_size, self.deadly, self.is_split = batch_size, deadly, is_split

    def train_dataloader(self):
        return self.loader(Augmented(NUM_TRAIN, self.deadly), shuffle=True)

    def val_dataloader(self):
        return self.loader(Augmented(NUM_TEST), shuffle=False)

    def loader(self, dataset, *, shuffle):
        if not self.is_split:
            return DataLoader(dataset, batch_size=self.batch_size, shuffle=shuffle)
        places = {"num_replicas": self.trainer.world_size, "rank": self.trainer.global_rank}
        return DataLoader(
            dataset, batch_size=self.batch_size, sampler=DistributedSampler(dataset, shuffle=shuffle, **places)
        )

    test_dataloader = predict_dataloader = val_dataloader


class Model(LightningModule):
    """Notes index and noise of every sample, by stage and epoch, step by step."""

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
    if "ADDRESSES" in os.environ:
        trainer, model = Trainer(devices=2, strategy="ddp", use_distributed_sampler=False, **settings), Model()
        deadly = Path(os.environ["DEADLY"]) if "DEADLY" in os.environ else None
        datamodule = RemoteDataModule(Data(deadly=deadly, is_split=deadly is not None), os.environ["ADDRESSES"].split())
        trainer.fit(model, datamodule=datamodule)
    else:
        cli = SageMakerCLI(Model, Data, trainer_defaults=settings)
        trainer, model, datamodule = cli.trainer, cli.model, cli.datamodule
    trainer.test(model, datamodule=datamodule)
    model.write()
    if "ADDRESSES" in os.environ:
        # As the CLI does: a Gloo thread that outlives the interpreter aborts the process.
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
