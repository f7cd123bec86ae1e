"""The strategy says which ranks split the data, and which get the same batches."""

import pytest
import torch
from pytorch_lightning import LightningDataModule, LightningModule, Trainer
from pytorch_lightning.strategies import DDPStrategy
from torch.utils.data import DataLoader

from lightning_sm import DataHost, RemoteDataModule

pytestmark = pytest.mark.processes


class Data(LightningDataModule):
    """Twelve numbers."""

    def train_dataloader(self):
        return DataLoader(range(12), batch_size=2)


class Model(LightningModule):
    """Notes what it is trained on."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch.tolist())
        return self.layer(batch[:1, None].float()).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class TensorParallel(DDPStrategy):
    """One of two ranks of the second of three tensor parallel groups, as ``ModelParallelStrategy`` says it."""

    @property
    def distributed_sampler_kwargs(self):
        return {"num_replicas": 3, "rank": 1}


def test_the_strategy_says_which_share_of_the_data_a_rank_trains_on(tmp_path):
    """Not its global rank: the ranks of a tensor parallel group need the same batches."""
    trainer = Trainer(
        strategy=TensorParallel(process_group_backend="gloo"),
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    model = Model()
    try:
        with DataHost(Data(), workers=1) as host:
            trainer.fit(model, datamodule=RemoteDataModule(Data(), [host.address]))
    finally:
        torch.distributed.destroy_process_group()
    assert model.seen == [[2, 3], [8, 9]]
