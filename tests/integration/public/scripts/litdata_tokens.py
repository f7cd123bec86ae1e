"""Pretraining of a small language model on tokens that LitData streams."""

import os

import torch
from litdata import StreamingDataLoader, StreamingDataset
from pytorch_lightning import LightningDataModule, LightningModule
from torch.utils.data import DataLoader

from lightning_sm import SageMakerCLI


class TokenData(LightningDataModule):
    def __init__(
        self, data_dir: str = "tokens", batch_size: int = 4, num_workers: int = 1, stateful_loader: bool = True
    ):
        super().__init__()
        self.save_hyperparameters()

    def make_loader(self, split, shuffle):
        dataset = StreamingDataset(os.path.join(self.hparams.data_dir, split), shuffle=shuffle, drop_last=True)
        loader = StreamingDataLoader if self.hparams.stateful_loader else DataLoader
        return loader(dataset, batch_size=self.hparams.batch_size, num_workers=self.hparams.num_workers, drop_last=True)

    def train_dataloader(self):
        return self.make_loader("train", shuffle=True)

    def val_dataloader(self):
        return self.make_loader("val", shuffle=False)


class LanguageModel(LightningModule):
    def __init__(self, vocab_size: int = 32, dim: int = 8, learning_rate: float = 0.01):
        super().__init__()
        self.save_hyperparameters()
        self.embed = torch.nn.Embedding(vocab_size, dim)
        self.lm_head = torch.nn.Linear(dim, vocab_size)

    def step(self, batch, name):
        tokens = batch["input_ids"].long()
        logits = self.lm_head(self.embed(tokens[:, :-1]))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.log(name, loss, batch_size=len(tokens), sync_dist=True)
        return loss

    def training_step(self, batch, batch_idx):
        return self.step(batch, "train_loss")

    def validation_step(self, batch, batch_idx):
        self.step(batch, "val_loss")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)


if __name__ == "__main__":
    SageMakerCLI(LanguageModel, TokenData, seed_everything_default=3)
