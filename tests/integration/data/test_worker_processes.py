"""Worker processes: forked ones, spawned ones, and ones that cannot start."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from lightning_sm.errors import DataServiceError, RemoteTransformError
from tests.integration.data.cluster import Host, remote, running
from tests.integration.emulators import local

pytestmark = pytest.mark.processes

# Stands for a library that computes with threads; Polars and OpenMP start theirs on first use.
THREADS = ThreadPoolExecutor(1)


class Library:
    """Starts its threads where it is unpickled: in a data host's main process, or in a spawned worker."""

    def __init__(self):
        self.made_in = None  # an object without a state is unpickled without __setstate__

    def __setstate__(self, state):
        vars(self).update(state, made_in=os.getpid())
        THREADS.submit(int).result()


class Squares(Library, Dataset):
    """Squares that a library computes in a thread."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return THREADS.submit(pow, index, 2).result()


class Origins(Squares):
    """Samples that show whether the dataset was unpickled before the fork, so that the worker shares its memory."""

    def __getitem__(self, index):
        return {"is_fork": self.made_in != os.getpid(), "worker": get_worker_info().id}


class Lines(Library, IterableDataset):
    """A stream of squares, split by worker."""

    def __iter__(self):
        info = get_worker_info()
        yield from (THREADS.submit(pow, number, 2).result() for number in range(info.id, 8, info.num_workers))


def loader(dataset, method, **options):
    """Return a loader whose workers start with a given method."""
    return DataLoader(dataset(), batch_size=2, num_workers=1, multiprocessing_context=method, **options)


@pytest.mark.matrix(first=1)
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_spawned_workers_use_what_does_not_survive_a_fork(method, pool):
    """The dataset's library has separate threads in each worker; all samples of maps and streams arrive."""
    with remote(pool.serve(lambda: [loader(Squares, method), loader(Lines, method)])[1:2]) as module:
        squares, lines = module.train_dataloader()
        assert [batch.tolist() for batch in squares] == [[0, 1], [4, 9], [16, 25], [36, 49]]
        assert sorted(number for batch in lines for number in batch.tolist()) == [0, 1, 4, 9, 16, 25, 36, 49]


@pytest.mark.parametrize(("method", "is_fork"), [("fork", True), (None, True), ("spawn", False)])
def test_workers_share_the_dataset_only_as_forks(method, is_fork, pool):
    """Spawned workers copy the dataset; all workers have the usual ``get_worker_info()``."""
    with remote(pool.serve(lambda: loader(Origins, method))[:1]) as module:
        batch = next(iter(module.train_dataloader()))
    assert batch["is_fork"].tolist() == [is_fork] * 2
    assert batch["worker"].tolist() == [0, 0]


@pytest.mark.proof
def test_functions_of_the_script_reach_spawned_workers(pool):
    """Lambdas and nested functions are pickled by value, which multiprocessing cannot do."""
    offset = 100

    def add(samples):
        return torch.tensor(samples) + offset

    def make():
        return loader(Squares, "spawn", collate_fn=add, worker_init_fn=lambda worker: os.environ.update(X=str(worker)))

    with remote(pool.serve(make)[:1]) as module:
        assert next(iter(module.train_dataloader())).tolist() == [100, 101]


@pytest.mark.proof
def test_a_spawned_worker_that_is_killed_is_replaced():
    """The replacement of a killed worker builds the batches."""
    with running(Host("a", lambda: loader(Squares, "spawn"), 1)) as (host,), remote([host]) as module:
        batches = module.train_dataloader()
        assert len(list(batches)) == 4
        [worker] = host.workers
        worker.kill()
        assert len(list(batches)) == 4


@pytest.mark.proof
def test_an_error_in_worker_init_fn_of_a_spawned_worker_reaches_the_trainer(pool):
    """A spawned worker's error arrives as a forked worker's does."""

    def fail(worker):
        raise OSError(f"no cache for worker {worker}")

    with (
        remote(pool.serve(lambda: loader(Squares, "spawn", worker_init_fn=fail))[:1]) as module,
        pytest.raises(RemoteTransformError, match="no cache for worker 0"),
    ):
        list(module.train_dataloader())


def exit_at_start(folder):
    """Return a function that records each start of a worker and makes it exit."""

    def start(worker):
        with open(folder / f"starts-{worker}", "a", encoding="ascii") as file:
            file.write(f"{time.monotonic()}\n")
        os._exit(3)

    return start


@pytest.mark.proof
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_that_exits_at_its_start_is_named_and_not_started_often(tmp_path, method):
    """The error names worker_init_fn instead of samples, and starts are a second apart."""
    make = exit_at_start(tmp_path)
    with (
        running(Host("a", lambda: loader(Squares, method, worker_init_fn=make), 1)) as (host,),
        remote([host]) as module,
    ):
        with pytest.raises(DataServiceError) as caught:
            list(module.train_dataloader())
        text = str(caught.value)
        assert text.startswith("The data hosts' workers cannot start: a worker exited with code 3 at worker_init_fn")
        assert "indices" not in text
        starts = [float(line) for line in (tmp_path / "starts-0").read_text().split()]
    pauses = [after - before for before, after in pairwise(starts)]
    assert len(pauses) >= 2
    assert min(pauses) >= 0.9


# A script whose classes and library need new processes, with and without the guard that multiprocessing asks for.
SCRIPT = """
from concurrent.futures import ThreadPoolExecutor
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, Dataset
from lightning_sm import SageMakerTrainer

THREADS = ThreadPoolExecutor(1)

class Squares(Dataset):
    def __len__(self): return 4
    def __getitem__(self, index):
        assert isinstance(self, Squares) and type(self).__module__ == "__mp_main__"
        return THREADS.submit(pow, index, 2).result()

class Data(pl.LightningDataModule):
    def setup(self, stage): self.squares = THREADS.submit(Squares).result()
    def train_dataloader(self):
        return DataLoader(self.squares, 2, num_workers=1, multiprocessing_context="spawn", collate_fn=self.collate)
    def collate(self, samples): return torch.tensor(samples) + 100 * self.trainer.max_epochs

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, index):
        print("BATCH", batch.tolist(), flush=True)
        return self.layer(batch.float()[:, None]).sum()
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=0.0)

def main():
    THREADS.submit(int).result()  # in the main process of the data host, too
    SageMakerTrainer(max_epochs=1, accelerator="cpu", logger=False).fit(Net(), datamodule=Data())
"""
GUARD = 'if __name__ == "__main__": '


@pytest.mark.proof
@pytest.mark.parametrize("guard", [GUARD, ""], ids=["guard", "no guard"])
def test_a_script_is_imported_by_spawned_workers(tmp_path, guard):
    """Spawned workers import the script, as with multiprocessing; without a guard, an error asks for one."""
    (tmp_path / "train.py").write_text(f"{SCRIPT}\n{guard}main()\n")
    groups = ("--group", "trainer=1", "--group", "data=1")
    ended = local(tmp_path / "jobs", tmp_path, *groups, "--", "train.py", timeout_s=180)
    out = ended.stdout + ended.stderr
    if guard:
        assert ended.returncode == 0, out
        assert "BATCH [100, 101]" in out
        assert "BATCH [104, 109]" in out
    else:
        assert ended.returncode == 1, out
        assert 'Put that code under `if __name__ == "__main__":`' in out
