"""The strategy says which ranks split the data, and which get the same batches."""

import pytest
import torch
from pytorch_lightning import LightningDataModule, LightningModule
from pytorch_lightning.strategies import DDPStrategy
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_sm import DataHost, RemoteDataModule
from tests.integration.data.numbers import quiet_trainer

pytestmark = pytest.mark.processes


class Stream(IterableDataset):
    """A number for each of 48 shards."""

    def __iter__(self):
        info = get_worker_info()
        return iter(range(info.id, 48, info.num_workers))


class Data(LightningDataModule):
    """Twelve numbers, or a stream."""

    def __init__(self, *, is_stream=False):
        super().__init__()
        self.is_stream = is_stream

    def train_dataloader(self):
        return DataLoader(Stream() if self.is_stream else range(12), batch_size=2)


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


def trained_on(data, folder, **settings):
    """What the rank is trained on."""
    strategy = TensorParallel(process_group_backend="gloo")
    trainer, model = quiet_trainer(folder, strategy=strategy, devices=1, max_epochs=1, **settings), Model()
    try:
        with DataHost(workers=1) as host:
            trainer.fit(model, datamodule=RemoteDataModule(data, [host.address]))
    finally:
        torch.distributed.destroy_process_group()
    return model.seen


def test_the_strategy_says_which_share_of_the_data_a_rank_trains_on(tmp_path, caplog):
    """Not its global rank: the ranks of a tensor parallel group need the same batches.

    On several ranks, Lightning's own sampler would shuffle; that the loader does not is kept, and told.
    """
    assert trained_on(Data(), tmp_path) == [[2, 3], [8, 9]]
    assert "train_dataloader() does not shuffle, and its 3 ranks train in its order" in caplog.text


def test_an_iterable_dataset_is_split_whatever_use_distributed_sampler_says(tmp_path, caplog):
    """Lightning never gives it a sampler; it splits itself by rank, which it cannot do on a data host."""
    seen = trained_on(Data(is_stream=True), tmp_path, use_distributed_sampler=False)
    assert sorted(seen) == [[number] for number in range(1, 48, 3)]
    assert "does not shuffle" not in caplog.text
