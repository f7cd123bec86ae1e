"""Page-locked batches reach the GPU intact, however far the GPU lags behind, and whoever copies them."""

import pytest
import torch
from pytorch_lightning import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, Dataset

from lightning_sm import DataHost, DataServiceSettings, RemoteDataModule
from tests.integration.data.numbers import quiet_trainer

pytestmark = [pytest.mark.gpu, pytest.mark.processes]

NUM_BATCHES, BATCH_SIZE, WIDTH = 200, 32, 4096
# About 5 ms on a GPU at 2 GHz, far longer than the CPU's part of a step.
_SLEEP_CYCLES = 10_000_000


class Filled(Dataset):
    """Vectors that are filled with their index, so that a mixture of two batches is noticed."""

    def __len__(self):
        return NUM_BATCHES * BATCH_SIZE

    def __getitem__(self, index):
        return torch.full((WIDTH,), float(index))


class Data(LightningDataModule):
    """A data module with the filled vectors, in order."""

    def train_dataloader(self):
        return DataLoader(Filled(), batch_size=BATCH_SIZE, pin_memory=True)


EXPECTED = torch.arange(NUM_BATCHES * BATCH_SIZE, dtype=torch.float32).reshape(NUM_BATCHES, BATCH_SIZE)


def assert_whole(seen):
    """Assert that all batches arrived in order, and that each row has a single value."""
    seen = torch.stack(seen).cpu()  # of shape (batches, samples, 2): least and greatest value of each row
    assert torch.equal(seen[..., 0], EXPECTED)
    assert torch.equal(seen[..., 1], EXPECTED)


def extremes(batch):
    """Return the least and the greatest value of each row, without waiting for the GPU."""
    return torch.stack([batch.amin(1), batch.amax(1)], dim=-1)


def gpu_trainer(tmp_path):
    """Return a Trainer for one GPU."""
    return quiet_trainer(tmp_path, accelerator="gpu", devices=1, max_epochs=1)


def remote(address):
    """Return a RemoteDataModule with the smallest possible window, so that slots are reused at once."""
    settings = DataServiceSettings(batch_timeout_s=30.0, window_batches=2)
    return RemoteDataModule(Data(), [address], settings=settings)


@pytest.fixture
def module():
    """Provide a RemoteDataModule with page-locked batches."""
    with DataHost(workers=4) as host:
        module = remote(host.address)
        yield module
        module.close()


def test_batches_are_page_locked(module):
    """CUDA reports a batch as pinned, as in torch."""
    batch = next(iter(module.train_dataloader()))
    assert batch.is_pinned()
    assert torch.equal(batch[:, 0], EXPECTED[0])


def test_a_loop_that_runs_ahead_of_the_gpu_gets_whole_batches(module):
    """Each step takes 5 ms on the GPU and no time on the CPU, and never waits for its result."""
    seen = []
    for batch in module.train_dataloader():
        torch.cuda._sleep(_SLEEP_CYCLES)
        seen.append(extremes(batch.to("cuda", non_blocking=True)))
        del batch
    assert_whole(seen)


def test_cuda_graphs_that_run_ahead_get_whole_batches(module):
    """The loop queues the copy into the static input and the replay, and does not wait for them."""
    static = torch.zeros(BATCH_SIZE, WIDTH, device="cuda")
    extremes(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = extremes(static)
    seen = []
    for batch in module.train_dataloader():
        static.copy_(batch, non_blocking=True)
        graph.replay()
        torch.cuda._sleep(_SLEEP_CYCLES // 10)
        seen.append(result.clone())
        del batch
    assert_whole(seen)


class Model(LightningModule):
    """A model that records its batches on the GPU, and never waits for it."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.seen = []

    def training_step(self, batch, batch_idx):
        torch.cuda._sleep(_SLEEP_CYCLES)
        self.seen.append(extremes(batch))
        return self.scale * batch[0, 0]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-9)


class SideStream(Model):
    """A model that copies its batches on a separate stream, as prefetchers do."""

    def __init__(self):
        super().__init__()
        self.stream = None

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        self.stream = self.stream or torch.cuda.Stream(device)
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(_SLEEP_CYCLES)
            on_gpu = batch.to(device, non_blocking=True)
        torch.cuda.current_stream(device).wait_stream(self.stream)
        on_gpu.record_stream(torch.cuda.current_stream(device))
        return on_gpu


@pytest.mark.parametrize("model", [Model, SideStream])
def test_a_trainer_gets_whole_batches_in_two_fits(model, tmp_path):
    """Batches arrive intact even if the user's code copies them on a side stream, unknown to everyone else."""
    with DataHost(workers=4) as host:
        for _ in range(2):
            fitted = model()
            gpu_trainer(tmp_path).fit(fitted, datamodule=remote(host.address))
            assert_whole(fitted.seen)
