"""The number of batches requested from data hosts, from the first request of a pass on."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.integration.data.cluster import num_in_flight, remote
from tests.integration.emulators import until

pytestmark = pytest.mark.processes

NUM_BYTES = 4_000_000
TIMEOUT_S = 60.0


class Large(Dataset):
    """Samples of 4 MB."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((NUM_BYTES // 4,), float(index))


class Waiting(Dataset):
    """Numbers; once a folder exists, each sample records its index there and waits for a file.

    Args:
        folder: The folder.
    """

    def __init__(self, folder):
        self.folder = folder

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if self.folder.exists():
            (self.folder / str(index)).touch()
            until((self.folder / "go").exists, "the test to go on", TIMEOUT_S)
        return index


def memory_of_rings():
    """Return the bytes that the rings of this process have ever filled."""
    total = 0
    for path in Path("/proc/self/map_files").iterdir():
        if os.readlink(path).startswith("/memfd:lightning_sm "):
            total += path.stat().st_blocks * 512
    return total


def test_bytes_are_bounded_from_the_first_request(pool):
    """Only as many large batches arrive as the limit allows, although many workers could build them at once."""
    before = memory_of_rings()
    with remote(pool.serve(lambda: DataLoader(Large(), batch_size=1)), window_bytes=2 * NUM_BYTES) as module:
        batches = iter(module.train_dataloader())
        next(batches)
        feeder = module._service_connection.feeder
        until(lambda: num_in_flight(feeder.snapshot()) == 0, "what was asked for has come", TIMEOUT_S)
        assert feeder.snapshot().passes[0].ready <= 2
        assert memory_of_rings() - before <= 3.5 * NUM_BYTES
        assert len(list(batches)) == 7


def test_later_passes_know_the_size_of_batches(pool, tmp_path):
    """All workers work from the first request on; in a first pass, only two do until the first batch arrives."""
    folder = tmp_path / "second"
    with remote(pool.serve(lambda: DataLoader(Waiting(folder), batch_size=1))[2:]) as module:
        loader = module.train_dataloader()
        assert len(list(loader)) == 8
        folder.mkdir()
        with ThreadPoolExecutor(1) as reader:
            second = reader.submit(list, loader)
            until(lambda: len(os.listdir(folder)) == 3, "all three workers work", TIMEOUT_S)
            (folder / "go").touch()
            assert len(second.result(TIMEOUT_S)) == 8
