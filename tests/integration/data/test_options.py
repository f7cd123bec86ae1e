"""Compression: another way for the same batches."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_sm import DataServiceSettings, RemoteDataModule
from lightning_sm.errors import DataSettingsError
from tests.integration.data.cluster import remote, seeded
from tests.integration.data.datasets import Data

pytestmark = pytest.mark.processes


class Mixed(Dataset):
    """Samples of which some compress well, and some not at all."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        noise = torch.from_numpy(np.random.default_rng(index).integers(0, 256, 300_000, dtype=np.uint8))
        return {"noise": noise, "zeros": torch.zeros(200_000), "index": index, "drawn": torch.rand(1)}


def make():
    """Batches of several pieces on the wire."""
    return DataLoader(Mixed(), batch_size=4, shuffle=True)


@pytest.fixture(scope="module")
def address(pool):
    """One data host with two workers."""
    return pool.serve(make)[1].address


@pytest.fixture(scope="module")
def plain(address):
    """The batches as they are."""
    taken = batches(address)
    assert len(taken) == 6
    return taken


def batches(address, **settings):
    """One pass, copied out of the ring."""
    with remote([address], Data(make), **settings) as module:
        loader = seeded(module.train_dataloader())
        return [{name: value.clone() for name, value in batch.items()} for batch in loader]


def test_compressed_batches_are_the_same(address, plain):
    """Pieces are compressed on the data host and restored bit for bit."""
    packed = batches(address, compression="zstd")
    for one, other in zip(plain, packed, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_an_unknown_compression_is_refused():
    """Before anything is started."""
    with pytest.raises(DataSettingsError, match="'gzip' is not zstd"):
        RemoteDataModule(Data(make), ["127.0.0.1:1"], settings=DataServiceSettings(compression="gzip"))
