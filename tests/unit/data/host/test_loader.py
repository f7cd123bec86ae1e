"""What data hosts make of the user's loaders."""

import multiprocessing
import os
import random
import signal

import cloudpickle
import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
    get_worker_info,
    random_split,
)

from lightning_sm.data.batch.arena import Arena
from lightning_sm.data.host.loader import ServedLoader
from lightning_sm.data.host.worker_notes import WorkerNotes
from lightning_sm.data.ipc.processes import in_fork
from lightning_sm.data.protocol.calls import LoaderPass
from lightning_sm.data.protocol.spec import FIRST_BY_HAND, BatchSpec
from lightning_sm.errors import DataSettingsError


class Numbers(Dataset):
    """A number for each index."""

    def __init__(self, length=10):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index


class Handle:
    """An open file, which must not be shared between processes."""

    owner = "the main process"

    def __getstate__(self):
        return {"owner": "this worker"}


class Handles(Numbers):
    """Numbers from a file."""

    def __init__(self):
        super().__init__()
        self.handle = Handle()

    def __getitem__(self, index):
        return f"{index} of {self.handle.owner}"


class Lines(IterableDataset):
    """The only line of a file."""

    def __init__(self):
        self.handle = Handle()

    def __iter__(self):
        return iter([f"line of {self.handle.owner}"])


class Asking(Numbers):
    """What each loader's samples learn of their worker."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def __getitem__(self, index):
        info = get_worker_info()
        return [info.dataset.name, info.id, info.num_workers]


class Counting(Sampler):
    """Counts its passes."""

    def __init__(self):
        self.num_passes = 0

    def __iter__(self):
        self.num_passes += 1
        return iter([self.num_passes])

    def __len__(self):
        return 1


class CountingInWords(Counting):
    """Counts its passes, and yields no numbers."""

    def __iter__(self):
        return iter([f"pass {number}" for number in super().__iter__()])


class Mine(BatchSampler):
    """A batch sampler of the user's."""


class Doubling(DataLoader):
    """A loader that changes its batches."""

    def __iter__(self):
        for batch in super().__iter__():
            yield batch * 2


class Filtering(DataLoader):
    """A loader that changes its batches in another place."""

    def _get_iterator(self):
        return iter([])


class Named(DataLoader):
    """A loader that does nothing of its own when it is iterated."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.name = "mine"


def served(loader, stage="train", **options):
    """Serve a loader."""
    return ServedLoader(loader, f"{stage}_dataloader()", stage, 0, **options)


def batch(loader, *keys, epoch=0, pass_index=0, position=0, mark=None):
    """Return the batch of some keys."""
    arena = Arena(np.zeros(1 << 16, np.uint8))
    return loader.batch(BatchSpec(0, epoch, pass_index, 100, position, np.array(keys)), arena, mark or WorkerNotes())


def copied(loader):
    """Return what a worker gets that is no fork."""
    return cloudpickle.loads(cloudpickle.dumps(loader))


def order(loader, epoch=0, pass_index=0):
    """Return the order of a pass, as a data host computes it."""

    def run():
        loader_pass = LoaderPass("1/fit/train/0", 0, 0, epoch, pass_index)
        loader.advance_sampler(loader_pass)
        return loader.sampler_order(loader_pass)

    keys, offsets, *_ = in_fork(run)
    return keys.tolist() if offsets is None else (keys.tolist(), offsets.tolist())


def test_another_split_is_other_data():
    """Hosts that split by themselves, with other generators, are found out; on resume, too."""
    splits = [random_split(Numbers(), [7, 3], generator=torch.Generator().manual_seed(seed))[0] for seed in (1, 1, 2)]
    one, same, other = (served(DataLoader(split)).description for split in splits)
    assert one == same
    assert one.identity != other.identity
    assert one.fingerprint != other.fingerprint


@pytest.mark.parametrize(("loader_class", "method"), [(Doubling, "__iter__"), (Filtering, "_get_iterator")])
def test_a_loader_that_iterates_in_its_own_way_is_refused(loader_class, method):
    """What it does to batches would be left out silently: the error names the method, and where to put its code."""
    with pytest.raises(DataSettingsError, match=rf"do not call {loader_class.__name__}\.{method}.*collate_fn"):
        served(loader_class(Numbers()))


class Sampling(DataLoader):
    """A loader that samples in workers and filters where it is told, in the shape of torch_geometric's NodeLoader."""

    def __init__(self, data, filter_per_worker, **options):
        self.data, self.filter_per_worker = data, filter_per_worker
        super().__init__(range(len(data)), collate_fn=self.collate_fn, **options)

    def collate_fn(self, indices):
        sampled = ("sampled", indices)
        return self.filter_fn(sampled) if self.filter_per_worker else sampled

    def filter_fn(self, sampled):
        return {"features": [self.data[index] for index in sampled[1]]}

    def _get_iterator(self):
        return map(self.filter_fn, super()._get_iterator())


@pytest.mark.parametrize("filter_per_worker", [False, True])
def test_loaders_of_graphs_filter_on_the_data_host(filter_per_worker, monkeypatch):
    """A data host samples and filters, wherever the loader would: once."""
    monkeypatch.setattr(Sampling, "__module__", "torch_geometric.loader.node_loader")
    loader = served(Sampling("abcd", filter_per_worker, batch_size=2))
    assert loader.description.num_samples == 4
    assert batch(loader, 2, 0) == {"features": ["c", "a"]}


def test_a_loader_of_graphs_that_iterates_in_its_own_way_is_refused():
    """A subclass of the user's with an iterator of its own is as any other."""

    class Mine(Sampling):
        def _get_iterator(self):
            return iter([])

    with pytest.raises(DataSettingsError, match=r"do not call .*Mine\._get_iterator"):
        served(Mine("abcd", filter_per_worker=True))


def test_other_subclasses_of_dataloader_are_served(monkeypatch):
    """Those that only set something, and torchdata's, which yields the same batches."""
    assert served(Named(Numbers())).description.num_samples == 10
    monkeypatch.setattr(Doubling, "__module__", "torchdata.stateful_dataloader")
    assert served(Doubling(Numbers())).description.num_samples == 10


def test_a_dataset_whose_workers_wait_for_each_other_is_refused():
    """MosaicML's StreamingDataset would hang: virtual shards open one after the other."""

    class StreamingDataset(Lines):
        __module__ = "streaming.base.dataset"

    class Images(StreamingDataset):
        pass

    with pytest.raises(DataSettingsError, match=r"train_dataloader\(\) is a StreamingDataset of MosaicML"):
        served(DataLoader(Images()))


@pytest.mark.parametrize(
    "options",
    [{"drop_last": True}, {"sampler": DistributedSampler(Numbers(), 2, 0, drop_last=True), "drop_last": True}],
)
def test_predictions_drop_nothing(options):
    """Lightning predicts every sample."""
    assert served(DataLoader(Numbers(), batch_size=4, **options)).description.drop_last
    assert not served(DataLoader(Numbers(), batch_size=4, **options), "predict").description.drop_last


def test_batch_samplers_of_predictions_drop_nothing():
    """Those of the user's own, too."""
    loader = DataLoader(Numbers(), batch_sampler=Mine(SequentialSampler(Numbers()), 4, drop_last=True))
    assert order(served(loader))[1] == [0, 4, 8]
    assert order(served(loader, "predict"))[1] == [0, 4, 8, 10]


def test_a_batch_sampler_without_a_batch_is_no_error():
    """There is nothing to do."""
    loader = DataLoader(Numbers(3), batch_sampler=Mine(SequentialSampler(Numbers(3)), 8, drop_last=True))
    assert order(served(loader)) == ([], [0])


def test_a_sampler_that_cannot_be_iterated_fails_in_a_pass():
    """Not when the loader opens: a local one may never be iterated."""
    loader = served(DataLoader(Numbers(), sampler=WeightedRandomSampler([], 4)))
    with pytest.raises(RuntimeError):
        order(loader)


def test_loaders_of_empty_datasets_are_served():
    """A dataset may have nothing for a stage."""
    assert served(DataLoader(Numbers(0))).description.num_samples == 0


def test_a_sampler_is_as_old_as_its_loader():
    """Loaders that are reloaded in an epoch have new samplers; in tests, the epochs of training do not count."""
    loader = DataLoader(Numbers(), sampler=Counting())
    assert order(served(loader), epoch=2) == [3]
    assert order(served(loader, epoch=2), epoch=2) == [1]
    assert order(served(loader, "test"), epoch=2) == [1]


@pytest.mark.parametrize(("epoch", "pass_index", "expected"), [(0, 0, 1), (2, 0, 3), (2, 3, 6), (2, FIRST_BY_HAND, 3)])
def test_a_pass_that_a_combined_loader_restarts_goes_on(epoch, pass_index, expected):
    """Whatever the sampler yields; a pass by hand begins as the Trainer's."""
    numbers = served(DataLoader(Numbers(), sampler=Counting()))
    words = served(DataLoader(Numbers(), sampler=CountingInWords(), collate_fn=list))
    assert order(numbers, epoch, pass_index) == [expected]
    assert batch(words, 0, epoch=epoch, pass_index=pass_index) == [f"pass {expected}"]


def test_samples_see_the_dataset_of_their_loader():
    """get_worker_info() is that of the loader whose batch is built, whichever worker was prepared last."""
    train, val = (served(DataLoader(Asking(stage), collate_fn=list), stage) for stage in ("train", "val"))

    def batches():
        for loader in (train, val):
            loader.enter_worker("algo-1", 2, 4)
        return [batch(loader, 0) for loader in (train, val, train)]

    assert in_fork(batches) == [[["train", 2, 4]], [["val", 2, 4]], [["train", 2, 4]]]


def drawn_in_worker(run=0, host="algo-1", worker=0, stage="train"):
    """Return what a worker draws when it is prepared."""
    drawn = []

    def prepare(_):
        drawn.append(np.random.default_rng(get_worker_info().seed).integers(1 << 40))
        drawn.append(np.random.default_rng(torch.initial_seed()).integers(1 << 40))

    loader = served(DataLoader(Numbers(), worker_init_fn=prepare), stage, seed=run)

    def run_worker():
        loader.enter_worker(host, worker, 4)
        return drawn

    return in_fork(run_worker)


@pytest.mark.parametrize("other", [{"run": 1}, {"host": "algo-2"}, {"worker": 1}, {"stage": "val"}])
def test_workers_draw_different_numbers(other):
    """The seed of a worker depends on run, host, worker and loader; a worker that replaces another has the same."""
    assert drawn_in_worker() == drawn_in_worker()
    assert not set(drawn_in_worker()) & set(drawn_in_worker(**other))


def test_a_pickled_loader_is_what_a_worker_of_a_dataloader_gets():
    """Dataset and functions, as pickling leaves them; not the sampler, which need not be picklable."""

    class Unpicklable(SequentialSampler):
        def __reduce__(self):
            raise TypeError("never")

    dataset = Handles()
    loader = served(DataLoader(dataset, collate_fn=list, sampler=Unpicklable(dataset)))
    copy = copied(loader)
    assert batch(loader, 3) == ["3 of the main process"]
    assert batch(copy, 3) == ["3 of this worker"]
    shard = (1, 0, 0, True)  # of 1, the first, its first batch, which is wanted
    copy = copied(served(DataLoader(Lines(), collate_fn=list)))
    assert batch(copy, *shard) == ["line of this worker"]


def test_a_pickled_loader_keeps_keys_that_are_no_numbers():
    """Trainers request their positions in the order, so workers run the sampler."""
    loader = served(DataLoader(Numbers(), sampler=list("abcd"), collate_fn=list))
    copy = copied(loader)
    assert batch(copy, 1, 2) == batch(loader, 1, 2)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_loader_says_how_its_workers_start(method):
    """As its multiprocessing_context says, by name or as an object; forked without one."""
    assert served(DataLoader(Numbers())).start_method == "fork"
    for context in (method, multiprocessing.get_context(method)):
        assert served(DataLoader(Numbers(), num_workers=1, multiprocessing_context=context)).start_method == method


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_the_start_method_of_the_script_is_that_of_its_workers(method, request):
    """As of DataLoader's own; a loader may say otherwise."""
    before = multiprocessing.get_start_method(allow_none=True)
    request.addfinalizer(lambda: multiprocessing.set_start_method(before, force=True))
    multiprocessing.set_start_method(method, force=True)
    assert served(DataLoader(Numbers())).start_method == method
    assert served(DataLoader(Numbers(), num_workers=1, multiprocessing_context="fork")).start_method == "fork"


class Own:
    """An object with a generator, as an augmentation has."""

    def __init__(self):
        self.rng = np.random.default_rng(1)


class Drawing(Numbers):
    """Draws from all global generators, and from one of its own, also for a whole list."""

    def __init__(self, *, in_lists=False):
        super().__init__()
        self.transforms = [Own()]
        if in_lists:
            self.__getitems__ = lambda keys: [[key, *draws(self.transforms[0])] for key in keys]

    def __getitem__(self, index):
        return [index, *draws(self.transforms[0])]


def draws(own):
    """Draw from each generator."""
    return [torch.rand(()).item(), random.random(), np.random.rand(), own.rng.random()]


def drawing(own=None, **options):
    """Serve a loader whose samples, and whose batches if they have a generator, draw."""
    collate = None if own is None else lambda samples: [samples, draws(own)]
    return served(DataLoader(Drawing(**options), batch_size=4, collate_fn=collate or list))


def test_a_sample_draws_by_its_position():
    """Other batch sizes, other ranks, and workers with another history draw the same for it, from each generator."""
    whole = batch(drawing(), *range(8))
    busy = drawing()
    assert [batch(busy, *range(start, start + 2), position=start) for start in (6, 0, 4)] == [
        whole[start : start + 2] for start in (6, 0, 4)
    ]
    assert len({number for sample in whole for number in sample[1:]}) == 4 * 8
    assert batch(drawing(), *range(8), epoch=1) != whole


def test_a_sample_that_is_drawn_twice_draws_twice():
    """Oversampling a rare class gives no equal samples, also where a sampler repeats each sample at once."""
    samples = batch(drawing(), 3, 3, 3)
    assert [index for index, *_ in samples] == [3, 3, 3]
    assert len({number for _, *numbers in samples for number in numbers}) == 3 * 4


def test_a_sample_that_a_rank_repeats_draws_the_same():
    """Behind the last sample of the order comes its first, as it was."""
    loader = drawing()
    first, *_ = batch(loader, 0, 1, 2)
    arena = Arena(np.zeros(1 << 16, np.uint8))
    again = loader.batch(BatchSpec(0, 0, 0, 10, 9, np.array([9, 0])), arena, WorkerNotes())
    assert again[1] == first


@pytest.mark.parametrize("in_lists", [False, True])
def test_the_collate_function_draws_for_itself(in_lists):
    """Neither samples nor lists of them share its numbers; it draws by the position of the first sample."""
    samples, collated = batch(drawing(Own(), in_lists=in_lists), *range(4), position=4)
    drawn = [number for _, *numbers in samples for number in numbers]
    assert len({*drawn, *collated}) == len(drawn) + 4
    assert batch(drawing(Own(), in_lists=in_lists), *range(3), position=4)[1] == collated
    assert batch(drawing(Own(), in_lists=in_lists), *range(4), position=8)[1] != collated


def test_a_generator_of_dataset_and_collate_function_is_one():
    """A transform that both use is seeded for each."""
    own = Own()
    dataset = Drawing()
    dataset.transforms = [own]
    loader = served(DataLoader(dataset, batch_size=2, collate_fn=lambda samples: [samples, draws(own)]))
    assert batch(loader, 0, 1) == batch(loader, 0, 1)


def die():
    """End as a process does that takes too much memory."""
    os.kill(os.getpid(), signal.SIGKILL)


class Deadly(Numbers):
    """Cannot be read at one index, alone or in a list."""

    deadly = 3

    def __getitem__(self, index):
        if index == self.deadly:
            die()
        return 0


class DeadlyList(Deadly):
    """Reads lists."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class DeadlyName(Deadly):
    """Its keys are texts."""

    deadly = "c"


class DeadlyLines(Lines):
    """Cannot be read to its end."""

    def __iter__(self):
        yield 0
        die()


@pytest.mark.parametrize(
    ("loader", "keys", "expected"),
    [
        (DataLoader(Deadly()), (2, 3, 4), "index 3"),
        (DataLoader(DeadlyList()), (2, 3, 4), "indices 2 to 4"),
        (DataLoader(DeadlyName(), sampler=list("abcd")), (1, 2, 3), "index 'c'"),
        (DataLoader(Numbers(), collate_fn=lambda _: die()), (2, 3, 4), "the collate function, for indices 2 to 4"),
        (DataLoader(DeadlyLines()), (1, 0, 1, 1), "batch 1 of shard 0 of 1"),
    ],
    ids=["a sample", "a list of samples", "a key that is no number", "collating", "a stream"],
)
def test_a_killed_worker_has_noted_where_it_was(loader, keys, expected):
    """Its parent can say which sample kills it; an exception would name it by itself."""
    one, mark = served(loader), WorkerNotes()
    with pytest.raises(ChildProcessError, match="SIGKILL"):
        in_fork(lambda: batch(one, *keys, mark=mark))
    assert mark.place() == expected
    mark.close()


def test_a_note_holds_any_text():
    """A key may be long, or have characters that take several bytes."""
    mark = WorkerNotes()
    assert mark.place() == ""
    mark.set_text("é" * 300)
    assert mark.place().startswith("é" * 99)
    mark.set_index(-(1 << 63))
    assert mark.place() == f"index {-(1 << 63)}"
    mark.clear()
    assert mark.place() == ""
    mark.close()
