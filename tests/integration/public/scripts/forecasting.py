"""Forecasting in the style of pytorch-forecasting: a batch sampler, samples of varying length, (y, None) targets."""

import os

import numpy as np
import torch
from pytorch_lightning import LightningDataModule, LightningModule
from pytorch_lightning.callbacks import EarlyStopping, LearningRateMonitor
from torch.nn.utils import rnn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from lightning_sm import SageMakerCLI


class BucketBatchSampler(BatchSampler):
    """Batches windows of equal length to avoid padding; the rest at the end forms mixed batches."""

    def __init__(self, sampler, batch_size, drop_last=False, lengths=()):
        super().__init__(sampler, batch_size, drop_last)
        self.lengths = lengths

    def __iter__(self):
        buckets = {}
        for index in self.sampler:
            bucket = buckets.setdefault(self.lengths[index], [])
            bucket.append(index)
            if len(bucket) == self.batch_size:
                yield buckets.pop(self.lengths[index])
        yield from BatchSampler(
            [index for bucket in buckets.values() for index in bucket], self.batch_size, self.drop_last
        )


class TimeSeriesDataSet(Dataset):
    def __init__(self, series, max_encoder_length=12, max_prediction_length=4):
        self.series = {name: torch.tensor(values, dtype=torch.float32) for name, values in series.items()}
        self.horizon = max_prediction_length
        self.index = [
            (name, start, max_encoder_length if start % 2 else max_encoder_length // 2)
            for name, values in self.series.items()
            for start in range(len(values) - max_encoder_length - max_prediction_length)
        ]

    def __len__(self):
        return len(self.index)

    def __getitem__(self, position):
        name, start, length = self.index[position]
        values = self.series[name]
        x = {
            "encoder": values[start : start + length],
            "length": length,
            "group": name,
            "time": np.datetime64("2024-01-01") + start,
        }
        return x, (values[start + length : start + length + self.horizon], None)

    @staticmethod
    def collate_fn(samples):
        x = {
            "encoder": rnn.pad_sequence([x["encoder"] for x, _ in samples], batch_first=True),
            "encoder_lengths": torch.tensor([x["length"] for x, _ in samples]),
            "groups": np.array([x["group"] for x, _ in samples]),
            "time": np.array([x["time"] for x, _ in samples]),
        }
        return x, (torch.stack([y for _, (y, _) in samples]), None)

    def to_dataloader(self, train, batch_size, num_workers):
        if not train:
            return DataLoader(self, batch_size=batch_size, collate_fn=self.collate_fn)
        return DataLoader(
            self,
            batch_sampler=BucketBatchSampler(
                RandomSampler(self), batch_size, drop_last=True, lengths=[length for _, _, length in self.index]
            ),
            collate_fn=self.collate_fn,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
        )


class SalesData(LightningDataModule):
    def __init__(self, data_dir: str = ".", batch_size: int = 16, num_workers: int = 2):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str):
        table = np.loadtxt(os.path.join(self.hparams.data_dir, "sales.csv"), delimiter=",", skiprows=1)
        series = {f"shop {int(shop)}": table[table[:, 0] == shop, 2] for shop in np.unique(table[:, 0])}
        self.training = TimeSeriesDataSet({name: values[:32] for name, values in series.items()})
        self.validation = TimeSeriesDataSet({name: values[20:] for name, values in series.items()})

    def train_dataloader(self):
        return self.training.to_dataloader(True, self.hparams.batch_size, self.hparams.num_workers)

    def val_dataloader(self):
        return self.validation.to_dataloader(False, self.hparams.batch_size, 0)


class RecurrentNetwork(LightningModule):
    def __init__(self, learning_rate: float = 1e-2, hidden_size: int = 8):
        super().__init__()
        self.save_hyperparameters()
        self.gru = torch.nn.GRU(1, hidden_size, batch_first=True)
        self.output = torch.nn.Linear(hidden_size, 4)

    def step(self, batch, name):
        x, (y, weight) = batch
        assert weight is None
        assert x["time"].dtype.kind == "M"
        packed = rnn.pack_padded_sequence(
            x["encoder"].unsqueeze(-1), x["encoder_lengths"].cpu(), batch_first=True, enforce_sorted=False
        )
        loss = torch.nn.functional.l1_loss(self.output(self.gru(packed)[1][-1]), y)
        self.log(name, loss, batch_size=len(y), sync_dist=True)
        return loss

    def training_step(self, batch, batch_idx):
        return self.step(batch, "train_loss")

    def validation_step(self, batch, batch_idx):
        self.step(batch, "val_loss")

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), self.hparams.learning_rate)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


if __name__ == "__main__":
    SageMakerCLI(
        RecurrentNetwork,
        SalesData,
        seed_everything_default=42,
        trainer_defaults={
            "gradient_clip_val": 0.1,
            "callbacks": [EarlyStopping(monitor="val_loss", patience=10), LearningRateMonitor()],
        },
    )
