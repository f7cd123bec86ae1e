"""Images from tar files with WebDataset. Each shard goes to one process, on any host."""

import os

import torch
import webdataset as wds
from pytorch_lightning import LightningDataModule, LightningModule
from torch.utils.data import DataLoader

from lightning_sm import SageMakerCLI


class ShardedImages(LightningDataModule):
    def __init__(self, data_dir: str = "shards", batch_size: int = 4, num_workers: int = 2, web_loader: bool = False):
        super().__init__()
        self.save_hyperparameters()

    def make_loader(self, pattern, shuffle):
        urls = os.path.join(self.hparams.data_dir, pattern)
        dataset = (
            wds.WebDataset(
                urls, nodesplitter=wds.split_by_node, shardshuffle=100 if shuffle else False, empty_check=False
            )
            .decode("torchrgb")
            .to_tuple("png", "cls")
            .batched(self.hparams.batch_size)
        )
        if not self.hparams.web_loader:
            return DataLoader(dataset, batch_size=None, num_workers=self.hparams.num_workers)
        loader = wds.WebLoader(dataset, batch_size=None, num_workers=self.hparams.num_workers)
        return loader.with_epoch(4)

    def train_dataloader(self):
        return self.make_loader("train-{0000..0003}.tar", shuffle=True)

    def val_dataloader(self):
        return self.make_loader("val-{0000..0003}.tar", shuffle=False)


class Classifier(LightningModule):
    def __init__(self, learning_rate: float = 0.1):
        super().__init__()
        self.save_hyperparameters()
        self.model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 2))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = torch.nn.functional.cross_entropy(self.model(images), labels)
        self.log("train_loss", loss, batch_size=len(labels))
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        loss = torch.nn.functional.cross_entropy(self.model(images), labels)
        self.log("val_loss", loss, batch_size=len(labels), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.learning_rate)


if __name__ == "__main__":
    SageMakerCLI(Classifier, ShardedImages, trainer_defaults={"use_distributed_sampler": False})
