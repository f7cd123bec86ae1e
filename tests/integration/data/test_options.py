"""Compression and local workers: other ways for the same batches."""

import numpy as np
import pytest
import torch
from pytorch_lightning import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from lightning_sm import DataHost, DataServiceSettings, RemoteDataModule
from lightning_sm.errors import DataSettingsError

pytestmark = pytest.mark.processes


class Mixed(Dataset):
    """Samples of which some compress well, and some not at all."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        noise = torch.from_numpy(np.random.default_rng(index).integers(0, 256, 300_000, dtype=np.uint8))
        return {"noise": noise, "zeros": torch.zeros(200_000), "index": index, "drawn": torch.rand(1)}


class Data(LightningDataModule):
    """Batches of several pieces on the wire."""

    def train_dataloader(self):
        return DataLoader(Mixed(), batch_size=4, shuffle=True)


@pytest.fixture(scope="module")
def host():
    """One data host."""
    with DataHost(Data(), workers=2) as host:
        yield host


def batches(addresses, **settings):
    """One pass, copied out of the ring, and where the batches were made."""
    module = RemoteDataModule(Data(), addresses, settings=DataServiceSettings(**settings))
    module.setup("fit")
    taken = [{name: value.clone() for name, value in batch.items()} for batch in module.train_dataloader()]
    made = {report["name"]: report["batches"] for report in module._feeder.state()["hosts"]}
    module.teardown("fit")
    return taken, made


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_compressed_batches_are_the_same(host, compression):
    """Pieces are compressed on the data host and restored bit for bit."""
    plain, _ = batches([host.address])
    packed, _ = batches([host.address], compression=compression)
    assert len(plain) == 6
    for one, other in zip(plain, packed, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_local_workers_help(host):
    """Workers on the trainer host take part, and the batches are the same."""
    alone, _ = batches([host.address])
    helped, made = batches([host.address], local_workers=2, window_batches=6)
    for one, other in zip(alone, helped, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert sum(made.values()) >= 6
    assert all(count > 0 for count in made.values()), made


def test_an_unknown_compression_is_refused():
    """Before anything is started."""
    with pytest.raises(DataSettingsError, match="'gzip' is not one of zstd, lz4"):
        RemoteDataModule(Data(), ["127.0.0.1:1"], settings=DataServiceSettings(compression="gzip"))
