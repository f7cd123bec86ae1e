"""A GPU far behind its CPU gets all batches, with a fake CUDA; ``tests/gpu`` uses a real GPU."""

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_sm import DataServiceSettings, RemoteDataModule
from lightning_sm.data.trainer import pinning
from tests.integration.data.datasets import Data
from tests.integration.data.numbers import quiet_trainer

pytestmark = pytest.mark.processes

_NUM_BATCHES = 60


class SlowGPU:
    """A GPU that completes copies in order, each after five queries while it is the first one.

    So no copy is complete when the next batch arrives, as when a thousand kernels are queued before it.
    """

    def __init__(self):
        self.pending, self.most_pending, self.locked = [], 0, set()

    def register(self, address, size):
        self.locked.add(address)
        return 0

    def unregister(self, address):
        self.locked.remove(address)

    def record_events(self):
        self.pending.append(Event(self))
        self.most_pending = max(self.most_pending, len(self.pending))
        return [self.pending[-1]]


class Event:
    """A copy that completes after five queries."""

    def __init__(self, gpu):
        self.gpu, self.num_queries = gpu, 0

    def query(self):
        """Return whether the copy is complete."""
        self.num_queries += self in self.gpu.pending[:1]
        if self.num_queries >= 5 and self in self.gpu.pending:
            self.gpu.pending.remove(self)
        return self not in self.gpu.pending

    def synchronize(self):
        """Wait for this copy and all copies before it."""
        del self.gpu.pending[: self.gpu.pending.index(self) + 1]


def test_a_training_loop_that_runs_ahead_of_its_gpu_gets_all_batches(monkeypatch, tmp_path, pool):
    """Slots return while the loop waits for a batch, copies in progress are bounded, and no memory stays locked."""
    gpu, trainer = SlowGPU(), quiet_trainer(tmp_path)
    monkeypatch.setattr(pinning, "CUDA", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    settings = DataServiceSettings(batch_timeout_s=60.0, window_batches=2)
    data = Data(lambda: DataLoader(range(_NUM_BATCHES), batch_size=1, pin_memory=True))
    module = RemoteDataModule(data, [pool.hosts[0].address], settings=settings)
    module.trainer = trainer
    seen = [batch.item() for batch in module.train_dataloader()]
    assert gpu.locked
    module.teardown("fit")
    assert seen == list(range(_NUM_BATCHES))
    assert gpu.most_pending <= pinning.MAX_COPYING + 4  # plus the batches that the loop held
    assert not gpu.locked
