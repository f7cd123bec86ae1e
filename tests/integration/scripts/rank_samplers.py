"""Trains with samplers that know their rank; each rank says how many samples of which numbers it was trained on."""

import sys

import torch
from pytorch_lightning import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from lightning_sm import SageMakerTrainer
from lightning_sm.errors import DataSettingsError

LENGTH, BATCH_SIZE = 64, 8


class Own(DistributedSampler):
    """A split with an order of its own."""

    def __iter__(self):
        return iter(list(super().__iter__())[::-1])


class Duck(Sampler):
    """A split that derives from nothing."""

    def __init__(self):
        self.num_replicas = torch.distributed.get_world_size()
        self.rank = torch.distributed.get_rank()

    def __iter__(self):
        return iter(range(self.rank, LENGTH, self.num_replicas))

    def __len__(self):
        return LENGTH // self.num_replicas


class Hidden(Sampler):
    """A split that cannot be seen."""

    def __iter__(self):
        return iter(range(torch.distributed.get_rank(), LENGTH, torch.distributed.get_world_size()))

    def __len__(self):
        return LENGTH // torch.distributed.get_world_size()


class Data(LightningDataModule):
    """Numbers, with the sampler of a name."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def train_dataloader(self):
        numbers = range(LENGTH)
        if self.kind == "arguments":
            sampler = Own(numbers, num_replicas=self.trainer.world_size, rank=self.trainer.global_rank)
        else:
            sampler = {"subclass": lambda: Own(numbers), "duck": Duck, "hidden": Hidden}[self.kind]()
        return DataLoader(numbers, BATCH_SIZE, sampler=sampler)


class Model(LightningModule):
    """Notes what it is trained on."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen += batch.tolist()
        return self.layer(batch[:, None].float()).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def main():
    for kind in sys.argv[1:]:
        trainer = SageMakerTrainer(
            accelerator="cpu", max_epochs=1, use_distributed_sampler=False, logger=False, enable_checkpointing=False
        )
        model = Model()
        try:
            trainer.fit(model, datamodule=Data(kind))
        except DataSettingsError as error:
            print(f"SEEN {kind} refused: {error}", flush=True)
            raise
        print(f"SEEN {kind} {trainer.global_step} steps {sorted(model.seen)}", flush=True)


if __name__ == "__main__":
    main()
