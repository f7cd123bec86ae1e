"""Compression and local workers: other ways for the same batches."""

import os

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_sm import DataServiceSettings, RemoteDataModule
from lightning_sm.errors import DataSettingsError
from tests.integration.data.cluster import until_up
from tests.integration.data.datasets import HOST_VARIABLE, Data
from tests.integration.emulators import TIMEOUT_S, until

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
    taken, _ = batches(address)
    assert len(taken) == 6
    return taken


class Gated(Data):
    """Data that local workers, which have no name in their environment, get only once there is a file."""

    def __init__(self, gate):
        super().__init__(make)
        self.gate = gate

    def setup(self, stage):
        if HOST_VARIABLE not in os.environ:
            until(self.gate.exists, "the gate of the test to open", 60.0)


def hosts(module):
    """The states of the data hosts of a module, the local workers included."""
    return [host.state for host in module._hosts.connection.feeder.snapshot().hosts]


def batches(address, **settings):
    """One pass over all data hosts, copied out of the ring, and where the batches were made."""
    module = RemoteDataModule(Data(make), [address], settings=DataServiceSettings(**settings))
    module.setup("fit")
    loader = module.train_dataloader()
    until_up(module)
    taken = [{name: value.clone() for name, value in batch.items()} for batch in loader]
    made = {host.name: host.num_received for host in module._hosts.connection.feeder.snapshot().hosts}
    module.teardown("fit")
    return taken, made


def test_compressed_batches_are_the_same(address, plain):
    """Pieces are compressed on the data host and restored bit for bit."""
    packed, _ = batches(address, compression="zstd")
    for one, other in zip(plain, packed, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_local_workers_help(address, plain):
    """Workers on the trainer host take part, and the batches are the same."""
    # With duplicates, a host that is quicker on a busy machine may build all of the six batches.
    helped, made = batches(address, local_workers=2, window_batches=6, hedge_factor=0.0)
    for one, other in zip(plain, helped, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert sum(made.values()) >= 6
    assert all(count > 0 for count in made.values()), made


@pytest.mark.proof
def test_training_begins_before_the_local_workers_listen(address, plain, tmp_path):
    """They import torch and run setup() for seconds, while the data hosts have batches; then they join."""
    gate = tmp_path / "gate"
    module = RemoteDataModule(Gated(gate), [address], settings=DataServiceSettings(local_workers=5))
    module.setup("fit")
    loader = module.train_dataloader()
    first = next(iter(loader))
    assert hosts(module)[0] == "up" != hosts(module)[1]
    assert loader.place.window_batches == 56, "eight for each of two workers of the data host and five local ones"
    assert torch.equal(first["drawn"], plain[0]["drawn"])
    gate.touch()
    until(lambda: hosts(module) == ["up", "up"], "the local workers to join", TIMEOUT_S)
    del first
    module.teardown("fit")


def test_an_unknown_compression_is_refused():
    """Before anything is started."""
    with pytest.raises(DataSettingsError, match="'gzip' is not zstd"):
        RemoteDataModule(Data(make), ["127.0.0.1:1"], settings=DataServiceSettings(compression="gzip"))
