"""Loaders with their workers on data hosts, iterated by hand: batches, streams and errors."""

import collections
import copy
import dataclasses
import itertools
import logging
import multiprocessing
import os
import random
import sys
import time

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

from lightning_sm.data.trainer import remote_loader
from lightning_sm.errors import DataServiceError, DataSettingsError, RemoteTransformError
from tests.integration.data.cluster import remote

# torch warns if a loader has more workers than there are cores.
pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore:This DataLoader will create")]

Point = collections.namedtuple("Point", "x y")


class Rows(Dataset):
    """Samples with noise from the global generators and from one that the dataset holds."""

    def __init__(self, length=37):
        self.length, self.held = length, np.random.default_rng()

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        noise = [random.random(), np.random.rand(), torch.rand(1).item(), self.held.random()]
        return {"index": index, "x": torch.full((64,), float(index)), "noise": torch.tensor(noise)}


class Numbers(IterableDataset):
    """A stream of numbers with noise, split by worker, that counts how often it was opened."""

    def __init__(self, length=37):
        self.length, self.times = length, 0

    def __iter__(self):
        self.times += 1
        info = get_worker_info()
        for number in range(info.id, self.length, info.num_workers):
            noise = [random.random(), np.random.rand(), torch.rand(1).item()]
            yield torch.tensor([number, self.times, *noise], dtype=torch.float64)


@dataclasses.dataclass
class Holder:
    """A class of the script."""

    x: torch.Tensor
    more: dict


def of_many_types(samples):
    """Return a batch with many of the types that a collate function may return."""
    whole = torch.arange(1000.0)
    return {
        "named tuple": Point(torch.ones(2), 1),
        "dataclass": Holder(torch.ones(300), {"a": [1, None]}),
        "array of objects": np.array([{"a": 1}, None], object),
        "masked array": np.ma.masked_array(np.arange(2), [0, 1]),
        "sparse": torch.eye(30).to_sparse(),
        "sparse by row": torch.eye(30).to_sparse_csr(),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "channels last": torch.zeros(2, 3, 16, 16).to(memory_format=torch.channels_last),
        "views": (whole, whole[10:900]),
        "set": {1, 2},
        "bytes": b"\0" * 100_000,
        "samples": len(samples),
    }


class Neighbors(DataLoader):
    """A loader that wraps DataLoader's iterator, as in PyTorch Geometric."""

    def _get_iterator(self):
        return map(self.after, super()._get_iterator())

    def after(self, batch):
        return {**batch, "x": batch["x"] + 0.5}


def read(pool, make, epochs=1):
    """Read a loader on the shared data hosts; return a list of batches for each epoch."""
    with remote(pool.serve(make)) as module:
        loader = module.train_dataloader()
        return [copy.deepcopy(list(loader)) for _ in range(epochs)]


def plain(batches, without=()):
    """Return batches as values that can be compared."""
    return [{name: value.tolist() for name, value in batch.items() if name not in without} for batch in batches]


def test_a_loader_is_what_it_was_and_has_the_same_batches(pool):
    """A subclass that wraps the iterator keeps its class, and its generator's order in two epochs."""

    def make():
        return Neighbors(Rows(), 5, shuffle=True, generator=torch.Generator().manual_seed(3))

    own = make()
    expected = [plain(own, ["noise"]) for _ in range(2)]
    with remote(pool.serve(make)) as module:
        loader = module.train_dataloader()
        assert isinstance(loader, Neighbors)
        assert (len(loader), len(loader.dataset), loader.batch_size) == (8, 37, 5)
        assert [plain(loader, ["noise"]) for _ in range(2)] == expected


def test_random_numbers_follow_from_the_batch_alone(pool):
    """Random numbers do not depend on hosts or workers; with persistent workers, they differ between epochs."""

    def make():
        return DataLoader(Rows(), 5, num_workers=2, persistent_workers=True)

    runs = []
    for hosts in (pool.hosts, pool.hosts[:1]):
        torch.manual_seed(1)
        pool.serve(make)
        with remote(hosts) as module:
            loader = module.train_dataloader()
            runs.append([plain(loader) for _ in range(2)])
    assert runs[0] == runs[1]
    first, second = runs[0]
    assert [batch["noise"] for batch in first] != [batch["noise"] for batch in second]


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 4, "num_workers": 3},
        {"batch_size": 3, "num_workers": 2, "drop_last": True},
        {"batch_size": None, "num_workers": 1},
        {"batch_size": 4, "num_workers": 2, "persistent_workers": True},
    ],
    ids=str,
)
def test_a_stream_is_that_of_a_local_loader(pool, options):
    """Batches and random numbers are those of a local loader for two epochs, even with uneven shares."""

    def make():
        return DataLoader(Numbers(), **options)

    torch.manual_seed(1)
    local = make()
    expected = [[batch.tolist() for batch in local] for _ in range(2)]
    torch.manual_seed(1)
    assert [[batch.tolist() for batch in epoch] for epoch in read(pool, make, 2)] == expected


@pytest.mark.parametrize("length", [60, 1000])
@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_persistent_workers_go_on_as_torchs_after_passes_that_are_left_early(pool, length, ahead):
    """Their random numbers depend on how far they read ahead in the earlier passes: as far as torch's workers."""

    def make():
        options = {"num_workers": 2, "prefetch_factor": ahead, "persistent_workers": True}
        return DataLoader(Numbers(length), 2, **options)

    def passes(loader):
        for num_batches in (0, 2, 0, 5, 1, 1, 100):
            yield [batch.tolist() for batch in itertools.islice(loader, num_batches)]

    torch.manual_seed(1)
    expected = list(passes(make()))
    with remote(pool.serve(make)) as module:
        torch.manual_seed(1)
        assert list(passes(module.train_dataloader())) == expected


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")  # torch warns once per process
def test_batches_of_many_types_arrive(pool):
    """Batches arrive as from DataLoader's workers, with classes of the script, shared memory and strides."""
    with remote(pool.serve(lambda: DataLoader(Rows(4), 2, collate_fn=of_many_types))) as module:
        batch = next(iter(module.train_dataloader()))
    expected = of_many_types([1, 2])
    assert list(batch) == list(expected)
    assert [type(value) for value in batch.values()] == [type(value) for value in expected.values()]
    assert batch["dataclass"].more == {"a": [1, None]}
    assert batch["channels last"].stride() == expected["channels last"].stride()
    assert torch.equal(batch["sparse"].to_dense(), torch.eye(30))
    assert torch.equal(batch["sparse by row"].to_dense(), torch.eye(30))
    assert batch["sparse"].is_coalesced()
    # torch keeps what it has unpickled here until something is loaded.
    assert not torch._utils._sparse_tensors_to_validate
    whole, part = batch["views"]
    whole[10] = -1
    assert part[0] == -1


def test_a_class_of_the_script_stays_as_the_script_has_made_it(pool):
    """Batches bring no old class attributes back, and classes that data hosts got by value have slots there, too."""

    class Sample:
        __slots__ = ("value",)
        num_read = 0

        def __init__(self, value):
            self.value = value

    loader = DataLoader([Sample(number) for number in range(4)], batch_size=None, num_workers=1)
    with remote(pool.serve(lambda: loader)) as module:
        for number, sample in enumerate(module.train_dataloader()):
            assert (type(sample), sample.value, Sample.num_read) == (Sample, number, number)
            Sample.num_read += 1


def test_what_cannot_be_pickled_is_named(pool):
    """The error names the path of the attribute that cannot be pickled, and a remedy."""
    dataset = Rows()
    with open(os.devnull) as file, remote(pool.serve(lambda: DataLoader(dataset))) as module:
        dataset.files = {"log": file}
        loader = module.train_dataloader()
        with pytest.raises(DataSettingsError, match=r"_dataloader\(\)\.dataset\.files\['log'\] is a TextIOWrapper"):
            next(iter(loader))


class Failing(Rows):
    """A dataset with a sample that cannot be read. Another one is read after two hosts have tried."""

    def __init__(self, tries):
        super().__init__()
        self.tries = tries

    def __getitem__(self, index):
        if index == 7:
            with self.tries.open("a") as file:
                file.write("x")
            raise ValueError("no seven")
        deadline = time.monotonic() + 60.0
        while index == 3 and len(self.tries.read_text()) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        return super().__getitem__(index)


class Exiting(Rows):
    """A dataset with a sample at which it calls sys.exit()."""

    def __getitem__(self, index):
        if index == 7:
            sys.exit("no license for seven")
        return super().__getitem__(index)


class Deadly(Rows):
    """A dataset with a sample that makes the process that reads it exit."""

    def __getitem__(self, index):
        if index == 7:
            os._exit(3)
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("dataset", "error", "text"),
    [
        (Failing, RemoteTransformError, "ValueError: no seven\non data host .*, index 7, worker"),
        (Exiting, RemoteTransformError, "SystemExit: no license for seven\non data host .*, index 7, worker"),
        (Deadly, DataServiceError, "exited with code 3 at index 7.* indices \\[6, 7, 8\\]"),
    ],
)
def test_the_batch_before_a_bad_sample_arrives(pool, tmp_path, dataset, error, text):
    """A bad sample's error, which names the sample, is raised after the batches before it, even if these are late."""
    (tries := tmp_path / "tries").touch()
    rows = dataset(tries) if dataset is Failing else dataset()
    with remote(pool.serve(lambda: DataLoader(rows, 3)), window_batches=4) as module:  # one batch per request
        batches = iter(module.train_dataloader())
        assert [next(batches)["index"].tolist() for _ in range(2)] == [[0, 1, 2], [3, 4, 5]]
        with pytest.raises(error, match=text):
            next(batches)


class FailingStream(IterableDataset):
    """Eight numbers, with an error at one of them: always, or only until a file exists."""

    def __init__(self, at, mark=None):
        self.at, self.mark = at, mark

    def __iter__(self):
        for number in range(8):
            if number == self.at:
                fail_once(self.mark, f"no {number}")
            yield number


def fail_once(mark, text):
    """Raise an error, unless the file exists already; then create the file, if any."""
    if mark is None or not mark.exists():
        if mark is not None:
            mark.touch()
        raise ValueError(text)


@pytest.mark.parametrize("at", [0, 3, 4])
def test_an_error_of_a_stream_is_not_its_end(pool, at):
    """A generator that has raised looks exhausted, but the error is raised after the batches before it."""
    read_before = []
    with (
        remote(pool.serve(lambda: DataLoader(FailingStream(at), 2, num_workers=1))) as module,
        pytest.raises(RemoteTransformError, match=f"ValueError: no {at}"),
    ):
        read_before.extend(batch.tolist() for batch in module.train_dataloader())
    assert read_before == [[0, 1], [2, 3]][: at // 2]


class FailingLater(IterableDataset):
    """A stream without samples that cannot be opened a second time."""

    def __init__(self):
        self.times = 0

    def __iter__(self):
        self.times += 1
        if self.times > 1:
            raise ValueError("no second time")
        return iter(())


def test_a_stream_that_cannot_be_opened_again_is_an_error(pool):
    """The retry opens the stream, too, and does not take the previous pass for this one."""
    with remote(pool.serve(lambda: DataLoader(FailingLater(), 2, num_workers=1, persistent_workers=True))) as module:
        loader = module.train_dataloader()
        assert list(loader) == []
        with pytest.raises(RemoteTransformError, match="ValueError: no second time"):
            list(loader)


@pytest.mark.parametrize("where", ["the stream", "the collate function"])
def test_a_stream_loses_nothing_to_an_error_that_does_not_recur(pool, tmp_path, where):
    """The request is repeated by a worker that reads the stream from the start and skips what has arrived."""
    mark = tmp_path / "failed"

    def collate(samples):
        if 4 in samples:
            fail_once(mark, "no batch")
        return torch.tensor(samples)

    options = {"collate_fn": collate} if where == "the collate function" else {}
    stream = FailingStream(None if options else 4, mark)
    with remote(pool.serve(lambda: DataLoader(stream, 2, num_workers=1, **options))) as module:
        assert [batch.tolist() for batch in module.train_dataloader()] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert mark.exists()


class Broken(Sampler):
    """A sampler that raises an error after three indices."""

    def __iter__(self):
        yield from range(3)
        raise RuntimeError("the sampler broke")

    def __len__(self):
        return 5


def test_the_error_of_a_sampler_comes_in_its_place(pool):
    """A sampler's error is raised after the batches before it, although the sampler runs ahead of them."""
    read_before = []
    with (
        remote(pool.serve(lambda: DataLoader(Rows(), 1, sampler=Broken()))) as module,
        pytest.raises(RuntimeError, match="the sampler broke"),
    ):
        read_before.extend(batch["index"].item() for batch in module.train_dataloader())
    assert read_before == [0, 1, 2]


class Local(DataLoader):
    """A loader with an iterator that replaces DataLoader's, as in torchdata."""

    def _get_iterator(self):
        return iter([1, 2])


class Filtered(DataLoader):
    """A loader that changes the batches of DataLoader's iterator, as in PyTorch Geometric."""

    def __iter__(self):
        return (batch["index"].tolist() for batch in super().__iter__())


def test_what_stays_local_is_said_once(pool, caplog):
    """A loader that replaces DataLoader's iterator stays local, with one warning; one that uses it is remote.

    Loaders without workers are remote, too, and one line says so for all of them.
    """
    caplog.set_level(logging.INFO, "lightning_sm")
    remote_loader._log_once.cache_clear()
    rows = Rows(3)
    with remote(pool.serve(lambda: {"own": Local(rows), "remote": Filtered(rows, 2)})) as module:
        for _ in range(2):
            loaders = module.train_dataloader()
            assert list(loaders["own"]) == [1, 2]
            assert list(loaders["remote"]) == [[0, 1], [2]]
    assert caplog.text.count("overrides _get_iterator() without") == 1
    assert "Filtered" not in caplog.text
    assert caplog.text.count("also build the batches of loaders with num_workers=0") == 1


def test_shared_memory_does_not_cross_machines(pool, caplog):
    """A shared value raises an error with a remedy; a shared tensor is copied, with a warning."""
    dataset = Rows(3)
    dataset.table = torch.zeros(3).share_memory_()
    with remote(pool.serve(lambda: DataLoader(dataset))) as module:
        assert len(list(module.train_dataloader())) == 3
        dataset.epoch = multiprocessing.Value("i", 0)
        with pytest.raises(DataSettingsError, match=r"dataset\.epoch is a Synchronized, .* shared memory.*plain attr"):
            next(iter(module.train_dataloader()))
    assert caplog.text.count("has a tensor in shared memory") == 1
