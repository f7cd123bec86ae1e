"""Whatever decides the order of the user's loader still decides it with data hosts."""

import collections
import functools
import os
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
    get_worker_info,
    random_split,
)

from lightning_sm.errors import DataHostMismatchError, DataSettingsError, RemoteTransformError
from tests.integration.data.cluster import Host, remote, running, take_first
from tests.integration.data.datasets import HOST_VARIABLE, stream_hash

pytestmark = pytest.mark.processes

LENGTH = 50


class Numbers(Dataset):
    """A number and noise."""

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return {"index": index, "noise": torch.rand(2)}


class Lists(Numbers):
    """A dataset that fetches a whole list at a time."""

    def __getitems__(self, indices):
        return [{"index": index, "noise": torch.rand(2)} for index in indices]


class Augmented(Numbers):
    """A dataset with a generator of its own, in a transform."""

    def __init__(self):
        self.transforms = [functools.partial(np.random.Generator.random, np.random.default_rng(1), 2)]

    def __getitem__(self, index):
        return {"index": index, "noise": self.transforms[0]()}


class Words(Numbers):
    """A dataset that is indexed with strings."""

    def __getitem__(self, key):
        return {"index": int(key.removeprefix("number ")), "noise": torch.rand(2)}


class Workers(Numbers):
    """A dataset that tells of the worker that reads it."""

    def __getitem__(self, index):
        return {"index": index, "worker": get_worker_info().id, "prepared": self.prepared}


def prepare(worker_id):
    """Prepare the dataset of a worker."""
    get_worker_info().dataset.prepared = worker_id + 100


def fail(worker_id):
    """Fail to prepare."""
    raise OSError(f"no cache for worker {worker_id}")


class Backwards(Sampler):
    """The samples from the last to the first."""

    def __iter__(self):
        return iter(range(LENGTH - 1, -1, -1))

    def __len__(self):
        return LENGTH


class Drawn(Backwards):
    """An order that is drawn from ``random``."""

    def __iter__(self):
        return iter(random.sample(range(LENGTH), LENGTH))


class Counting(Backwards):
    """Strings, in an order that depends on how often the sampler was asked."""

    def __init__(self):
        self.count = 0

    def __iter__(self):
        self.count += 1
        numbers = list(range(LENGTH))
        random.Random(self.count).shuffle(numbers)
        return iter([f"number {number}" for number in numbers])


class Own(Backwards):
    """An order that is drawn from a generator of the sampler's own."""

    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __iter__(self):
        return iter(self.rng.permutation(LENGTH).tolist())


class Mine(BatchSampler):
    """A batch sampler of the user's."""


class Growing(Sampler):
    """Batches of 1, 2, 3, ... samples, in another order every epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        size = 1 + self.epoch
        while order:
            yield order[:size]
            order, size = order[size:], size + 1


class Dishonest(Backwards):
    """Another order on every host."""

    def __iter__(self):
        numbers = list(range(LENGTH))
        random.Random(os.urandom(8)).shuffle(numbers)
        return iter(numbers)


class Faulty(Backwards):
    """A sampler with an error."""

    def __iter__(self):
        yield 0
        raise ZeroDivisionError("no samples per class")


class Doubling(DataLoader):
    """A loader that changes its batches."""

    def __iter__(self):
        for batch in super().__iter__():
            yield {"index": batch["index"] * 2}


class Unsplittable(Numbers):
    """A dataset that finds out too late that it cannot be served."""

    def __getitem__(self, index):
        raise DataSettingsError("self.trainer.global_rank=0 and self.trainer.world_size=8 were both read")


class Parts(Numbers):
    """Notes in each sample which part of the data its process takes for its own."""

    def __getitem__(self, index):
        places = (os.environ["RANK"], os.environ["WORLD_SIZE"], dist.get_rank(), dist.get_world_size())
        return {"index": index, "place": [int(place) for place in places]}


def grouped(samples):
    """Collate to a structure of Python's."""
    groups = collections.defaultdict(list)
    for sample in samples:
        groups[sample["index"] % 3].append(sample["index"])
    return {"groups": groups, "device": torch.device("cpu")}


def split_by_host():
    """Split the data in another way on each host."""
    seed = ord(os.environ[HOST_VARIABLE])
    return DataLoader(random_split(Numbers(), [40, 10], generator=torch.Generator().manual_seed(seed))[0])


def first_and_last(samples):
    """Collate in a way of the user's own."""
    return [samples[0]["index"], samples[-1]["index"], torch.rand(1)]


def make():
    """A loader for every way to choose samples."""
    numbers = Numbers()
    parts = random_split(numbers, [30, 20], generator=torch.Generator().manual_seed(3))
    return {
        "backwards": DataLoader(numbers, batch_size=8, sampler=Backwards()),
        "drawn": DataLoader(numbers, batch_size=8, sampler=Drawn(), drop_last=True),
        "weighted": DataLoader(numbers, batch_size=8, sampler=WeightedRandomSampler([0.0, 1.0] * 25, 40)),
        "replacement": DataLoader(numbers, batch_size=8, sampler=RandomSampler(numbers, replacement=True)),
        "growing": DataLoader(numbers, batch_sampler=Growing()),
        "batches": DataLoader(numbers, batch_sampler=BatchSampler(Drawn(), 8, drop_last=False)),
        "oversampled": DataLoader(Augmented(), batch_size=8, sampler=WeightedRandomSampler([1.0] * 2 + [0.0] * 48, 40)),
        "words": DataLoader(Words(), batch_size=8, sampler=[f"number {number}" for number in range(LENGTH)]),
        "counting": DataLoader(Words(), batch_size=8, sampler=Counting()),
        "unbatched": DataLoader(numbers, batch_size=None),
        "distributed": DataLoader(numbers, batch_size=8, sampler=DistributedSampler(numbers, 4, 2, shuffle=True)),
        "subset": DataLoader(Subset(numbers, range(10, 20)), batch_size=4, shuffle=True),
        "split": DataLoader(parts[1], batch_size=4),
        "lists": DataLoader(Lists(), batch_size=8, shuffle=True),
        "collated": DataLoader(numbers, batch_size=8, collate_fn=first_and_last),
        "prepared": DataLoader(Workers(), batch_size=8, worker_init_fn=prepare),
        "nested": [DataLoader(numbers, batch_size=10), (DataLoader(numbers, batch_size=25),)],
        "own": DataLoader(numbers, batch_size=8, sampler=Own()),
        "bare": DataLoader(numbers, batch_size=8, sampler=DistributedSampler(numbers)),
        "none": DataLoader(numbers, batch_sampler=Mine(SequentialSampler(range(3)), 8, drop_last=True)),
        "grouped": DataLoader(numbers, batch_size=8, collate_fn=grouped),
        "dishonest": DataLoader(numbers, batch_size=8, sampler=Dishonest()),
        "faulty": DataLoader(numbers, batch_size=8, sampler=Faulty()),
    }


@pytest.fixture(scope="module")
def loaders(pool):
    """The loaders as a trainer with the first two hosts sees them."""
    # Each of the loaders' batches that show their worker differs between workers on purpose.
    with remote(pool.serve(make)[:2], verify="warn") as module:
        yield module.train_dataloader()


@pytest.fixture(scope="module")
def loaders_of_one(pool):
    """The loaders as a trainer with the last host sees them; a host serves one run at a time."""
    with remote(pool.serve(make)[2:]) as module:
        yield module.train_dataloader()


def taken(loader, epoch=0):
    """Return the batches of an epoch."""
    loader.set_epoch(epoch)
    return list(loader)


def indices(batches):
    """Return the samples in the order in which they came."""
    return [index for batch in batches for index in batch["index"].tolist()]


def params(cheap, widening):
    """Names of loaders, of which some only widen what the others show."""
    return [*cheap, *(pytest.param(name, marks=pytest.mark.proof) for name in widening)]


@pytest.mark.parametrize(
    "name",
    params(
        ["drawn", "growing", "counting", "own", "distributed", "unbatched", "oversampled"],
        ["backwards", "words", "split", "collated", "weighted", "replacement", "batches", "subset", "lists"],
    ),
)
def test_one_host_gives_the_same_stream_as_two(loaders, loaders_of_one, name):
    """The order is the same on every host, whoever asks, as often as it is asked for."""
    both = [stream_hash(taken(loaders[name], epoch)) for epoch in (0, 1, 0)]
    one = [stream_hash(taken(loaders_of_one[name], epoch)) for epoch in (0, 1, 0)]
    assert one == both
    assert both[0] == both[2]
    assert both[0] != both[1], "noise or order must differ between epochs"


def test_a_sample_that_is_drawn_twice_is_augmented_twice(loaders):
    """Also by a generator that the dataset holds, on any number of workers."""
    batches = taken(loaders["oversampled"])
    assert set(indices(batches)) == {0, 1}
    assert len({tuple(noise) for batch in batches for noise in batch["noise"].tolist()}) == 40


@pytest.mark.parametrize(
    "name", params(["growing", "words", "own", "bare"], ["backwards", "batches", "counting", "distributed", "lists"])
)
def test_every_sample_comes_once(loaders, name):
    """Custom orders leave nothing out and repeat nothing; the padding of DistributedSampler is not needed."""
    assert collections.Counter(indices(taken(loaders[name]))) == collections.Counter(range(LENGTH))


@pytest.mark.parametrize(
    ("name", "epoch"),
    [
        ("growing", 2),
        ("growing", 3),
        *(
            pytest.param(name, 2 + number % 2, marks=pytest.mark.proof)
            for number, name in enumerate(("backwards", "drawn", "weighted", "batches", "words", "subset", "split"))
        ),
    ],
)
def test_the_length_is_the_number_of_batches(loaders, name, epoch):
    """``len`` tells what a pass will give, also where only the sampler knows, and it differs between epochs."""
    loaders[name].set_epoch(epoch)
    announced = len(loaders[name])
    assert len(taken(loaders[name], epoch)) == announced


def test_orders_are_those_of_the_samplers(loaders):
    """Samplers see the epoch, and their batches come as they made them."""
    assert indices(taken(loaders["backwards"])) == list(range(LENGTH - 1, -1, -1))
    assert [len(batch["index"]) for batch in taken(loaders["growing"], 4)] == [5, 6, 7, 8, 9, 10, 5]
    assert indices(taken(loaders["growing"], 4)) == [index for batch in expected_growing(4) for index in batch]
    assert set(indices(taken(loaders["weighted"]))) <= set(range(1, LENGTH, 2))
    assert len(indices(taken(loaders["drawn"]))) == 48
    assert sorted(indices(taken(loaders["subset"]))) == list(range(10, 20))
    assert len(set(indices(taken(loaders["split"])))) == 20
    assert [batch["index"] for batch in taken(loaders["unbatched"])] == list(range(LENGTH))
    assert [batch[:2] for batch in taken(loaders["collated"])] == [
        [start, min(start + 7, 49)] for start in range(0, 50, 8)
    ]


def test_samplers_go_on_from_epoch_to_epoch(loaders):
    """A generator or a counter of the sampler's own gives another order in each epoch, as with a local loader."""
    for name in ("own", "counting"):
        assert len({tuple(indices(taken(loaders[name], epoch))) for epoch in range(4)}) == 4


def test_a_batch_sampler_may_have_no_batches(loaders):
    """Then a pass has none."""
    assert taken(loaders["none"]) == []
    assert len(loaders["none"]) == 0


def test_structures_of_python_arrive_as_they_are(loaders):
    """A defaultdict with a builtin factory, and a device."""
    first = taken(loaders["grouped"])[0]
    assert first["groups"] == {0: [0, 3, 6], 1: [1, 4, 7], 2: [2, 5]}
    assert first["groups"]["another"] == []
    assert first["device"] == torch.device("cpu")


def expected_growing(epoch):
    """Run the sampler here."""
    sampler = Growing()
    sampler.set_epoch(epoch)
    return list(sampler)


def test_worker_init_fn_runs_in_every_worker(loaders):
    """The user's function finds the dataset through ``get_worker_info``, as in a DataLoader."""
    batches = taken(loaders["prepared"])
    assert indices(batches) == list(range(LENGTH))
    for batch in batches:
        assert (batch["prepared"] == batch["worker"] + 100).all()


def test_nested_loaders_keep_their_structure(loaders):
    """Lists and tuples of loaders stay what they are."""
    first, (second,) = loaders["nested"]
    assert isinstance(loaders["nested"][1], tuple)
    assert [len(batch["index"]) for batch in first] == [10] * 5
    assert [len(batch["index"]) for batch in second] == [25] * 2


def test_a_sampler_that_differs_between_hosts_is_an_error(loaders):
    """Without agreement on the order, samples would be lost and repeated: the error says what to draw from."""
    with pytest.raises(DataHostMismatchError, match="Data hosts got different orders from the sampler of"):
        list(loaders["dishonest"])


def test_an_exception_in_a_sampler_comes_with_its_traceback(loaders):
    """The user's sampler fails in the trainer as it did on the data host."""
    with pytest.raises(RemoteTransformError, match="no samples per class"):
        list(loaders["faulty"])


def test_an_exception_in_worker_init_fn_comes_with_its_traceback(pool):
    """Workers that cannot be prepared are no endless loop of new workers."""

    def make_failing():
        return DataLoader(Numbers(), batch_size=8, worker_init_fn=fail)

    with (
        remote(pool.serve(make_failing)[:1]) as module,
        pytest.raises(RemoteTransformError, match="no cache for worker 0"),
    ):
        list(module.train_dataloader())


def test_hosts_that_split_the_data_differently_are_an_error(pool):
    """Some samples would be trained on and validated with: nothing is served."""
    with (
        remote(pool.serve(split_by_host)[:2]) as module,
        pytest.raises(DataHostMismatchError, match=r"Data hosts serve different data(.|\n)*seeds in setup"),
    ):
        take_first(module)


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (lambda: Doubling(Numbers(), batch_size=8), r"do not call Doubling\.__iter__"),
        (lambda: DataLoader(Unsplittable(), batch_size=8), "global_rank=0 and self.trainer.world_size=8"),
    ],
)
def test_what_cannot_be_served_is_an_error_of_the_settings(pool, loader, message):
    """The message is the data host's, without a traceback: the user has to write something else."""
    with remote(pool.serve(loader)[:1]) as module, pytest.raises(DataSettingsError, match=message) as caught:
        list(module.train_dataloader())
    assert "Traceback" not in str(caught.value)


def test_data_is_not_split_by_the_rank_of_the_process(monkeypatch):
    """A data host that a rank of torchrun starts, as local workers are, is a world of one."""
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    host = Host("r", lambda: DataLoader(Parts(), batch_size=10, sampler=DistributedSampler(Parts(), shuffle=False)), 1)
    with running(host), remote([host]) as module:
        batches = list(module.train_dataloader())
    assert indices(batches) == list(range(LENGTH))
    assert {tuple(place) for batch in batches for place in torch.stack(batch["place"], 1).tolist()} == {(0, 1, 0, 1)}
