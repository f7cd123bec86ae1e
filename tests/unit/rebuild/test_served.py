"""A recorded batch, built from a DataModule of this process."""

import numpy as np
import pytest
import torch
from msgspec import structs
from pytorch_lightning import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from lightning_sm.data.host.world import world_of_one
from lightning_sm.errors import RemoteTransformError, ReplayError
from lightning_sm.rebuild.recorded_step import RecordedBatch
from lightning_sm.rebuild.served import ServedScript, assemble
from tests.unit.rebuild.test_recorded_step import PASS


class Noisy(Dataset):
    """Each sample has its index and a random number.

    Args:
        length: Number of samples.
        broken: The index that cannot be read.
    """

    def __init__(self, length, broken=None):
        self.length, self.broken = length, broken

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index == self.broken:
            raise OSError("a damaged file")
        return index, torch.rand(()) + np.random.random()


class Data(LightningDataModule):
    """Loaders over such samples."""

    def __init__(self, length=20, broken=None, **options):
        super().__init__()
        self.length, self.broken = length, broken
        self.options = {"batch_size": 4, "shuffle": True, **options}

    def train_dataloader(self):
        return DataLoader(Noisy(self.length, self.broken), **self.options)


@pytest.fixture(autouse=True)
def _threads():
    """A worker has one thread; other tests have as many as before."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def build(datamodule, **changed):
    """Build the second batch of rank 1 in a pass over the data of a DataModule."""
    begun = structs.replace(PASS, rank=1, **changed)
    with world_of_one():
        script = ServedScript(datamodule, begun)
        batch, rebuilt = script.build(RecordedBatch(begun, 1, 0))
        script.close()
    return batch, rebuilt


def test_the_seed_of_the_record_decides():
    """The same batch each time; other random numbers with another seed, and other samples."""
    (indices, noise), one = build(Data())
    assert one.indices == indices.tolist()
    (_, same), again = build(Data())
    assert torch.equal(noise, same)
    assert again.content_hash == one.content_hash
    _, other = build(Data(), seed=6)
    assert other.indices != one.indices
    _, later = build(Data(shuffle=False), order="sequential", epoch=1)
    _, earlier = build(Data(shuffle=False), order="sequential", epoch=0)
    assert later.indices == earlier.indices == [12, 13, 14, 15]
    assert later.content_hash != earlier.content_hash


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (Data(length=21), "samples 21 here, 20 in the run"),
        (Data(batch_size=5), "batch size 5 here, 4 in the run"),
        (Data(drop_last=True), "drop_last True here, False in the run"),
        (Data(shuffle=False), "order 'sequential' here, 'shuffled' in the run"),
    ],
)
def test_another_loader_is_refused(data, says):
    """The error names what differs, here and in the run."""
    with pytest.raises(ReplayError, match=says):
        build(data)


def test_a_dataset_of_another_identity_is_noted():
    """The batch is built all the same: its hash decides."""
    _, rebuilt = build(Data(), data="another")
    assert "is another one than in the run (Digits of 20, identity another)" in rebuilt.notes[0]


def test_what_the_code_raises_is_shown():
    """With the index and the traceback."""
    _, rebuilt = build(Data())
    with pytest.raises(RemoteTransformError, match="a damaged file\non this machine, index"):
        build(Data(broken=rebuilt.indices[2]))


def test_loaders_keep_their_structure():
    """As training_step gets it; None for a loader that has ended."""
    structure = {"combined": "max_size", "of": {"dict": [["a", 0], ["b", {"list": [1, {"tuple": [2]}]}]]}}
    assert assemble(structure, {0: "x", 2: "z"}) == {"a": "x", "b": [None, ("z",)]}
