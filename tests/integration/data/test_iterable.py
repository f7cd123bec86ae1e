"""Iterable datasets: the stream depends on seed, epoch, shards and ranks, and on nothing else of the cluster."""

import collections
import contextlib
import functools
import logging
import os
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.utils.data import ChainDataset, DataLoader, IterableDataset, get_worker_info

from lightning_sm.data.ipc.feeder_messages import Position
from lightning_sm.errors import DataHostMismatchError, DataSettingsError, DataTimeoutError, RemoteTransformError
from tests.integration.data import cluster
from tests.integration.data.datasets import HOST_VARIABLE, Sharded, stream_hash
from tests.integration.emulators import TIMEOUT_S, until

pytestmark = pytest.mark.processes

LENGTH, BATCH_SIZE, NUM_SHARDS = 403, 4, 16
remote = functools.partial(cluster.remote, virtual_shards=NUM_SHARDS)


def noisy_collate(samples):
    """Collate with noise, as random crops of a whole batch would."""
    batch = torch.utils.data.default_collate(samples)
    return {**batch, "collated": torch.rand(1)}


def make():
    """Shards of unequal length."""
    return DataLoader(Sharded(LENGTH), batch_size=BATCH_SIZE, collate_fn=noisy_collate)


def shard_indices(number, length=LENGTH, num_shards=NUM_SHARDS):
    """What shard ``number`` holds."""
    return list(range(number, length, num_shards * (2 if number > num_shards // 2 else 1)))


def expected_indices(rank=0, world_size=1, first=0):
    """Batches in the order in which they should come: one of each shard in turn."""
    shards = [shard_indices(number) for number in range(rank, NUM_SHARDS, world_size)]
    batches = [
        shard[start : start + BATCH_SIZE]
        for start in range(0, LENGTH, BATCH_SIZE)
        for shard in shards
        if shard[start : start + BATCH_SIZE]
    ]
    return batches[first:]


def indices(batches):
    """What a stream holds."""
    return [batch["index"].tolist() for batch in batches]


@pytest.fixture
def hosts(pool):
    """Data hosts with 1, 2 and 3 workers."""
    return pool.serve(make)


@pytest.fixture(scope="module")
def whole(pool):
    """The stream of one worker."""
    with remote(pool.serve(make)[:1]) as module:
        return list(module.train_dataloader())


def widening(*rows):
    """Rows that only widen what the others show."""
    return [pytest.param(row, marks=pytest.mark.proof) for row in rows]


@contextlib.contextmanager
def one_of(world_size, rank, hosts, **settings):
    """Connect as one of several ranks."""
    with remote(hosts, **settings) as module:
        module._hosts._data_ranks = lambda *_: (rank, world_size)
        yield module


def loader_at(module, first_step, stop_step=None):
    """A loader whose Trainer has resumed in the middle of an epoch."""
    loader = module.train_dataloader()
    loader._position = lambda *_: Position(0, 0, first_step, stop_step)
    return loader


def test_every_sample_comes_once_in_the_order_of_the_shards(whole):
    """One batch of each shard in turn; shards that have ended are left out."""
    assert indices(whole) == expected_indices()


@pytest.mark.parametrize("names", ["abc", *widening("b", "c", "ab")])
def test_hosts_and_workers_do_not_show(hosts, whole, names):
    """Any number of hosts and workers gives the same stream, bit for bit, and another one in the next epoch."""
    with remote([host for host in hosts if host.name in names]) as module:
        loader = module.train_dataloader()
        assert stream_hash(loader) == stream_hash(whole)
        assert stream_hash(loader) == stream_hash(whole)
        loader.set_epoch(1)
        assert stream_hash(loader) != stream_hash(whole)


@pytest.mark.parametrize("window", [1, *widening(2, 7, 40)])
def test_the_window_does_not_show(hosts, whole, window):
    """How far the trainer asks ahead does not show, though whole windows are empty when most shards have ended."""
    with remote(hosts, window_batches=window) as module:
        assert stream_hash(module.train_dataloader()) == stream_hash(whole)


@pytest.mark.parametrize("first", [37, 90, *widening(1, 16, 70, 80, 10_000)])
def test_the_rest_of_a_pass_is_the_same(hosts, whole, first):
    """A pass that begins in the middle continues with the next batch, also after some shards have ended."""
    with remote(hosts, window_batches=3) as module:
        rest = list(loader_at(module, first))
    assert stream_hash(rest) == stream_hash(whole[first:])


def test_a_limit_ends_the_pass(hosts, whole):
    """Exactly as many batches come as the Trainer wants, although empty steps lie between."""
    with remote(hosts) as module:
        assert stream_hash(loader_at(module, 3, 83)) == stream_hash(whole[3:83])


@pytest.mark.parametrize("world_size", [2, *widening(4)])
def test_ranks_share_the_shards(hosts, world_size):
    """Every rank takes equally many batches of its own shards, and what is left out is counted."""
    streams = []
    for rank in range(world_size):
        with one_of(world_size, rank, hosts) as module:
            loader = module.train_dataloader()
            streams.append(indices(loader))
            assert len(streams[-1]) == len(loader)
    length = min(len(expected_indices(rank, world_size)) for rank in range(world_size))
    assert streams == [expected_indices(rank, world_size)[:length] for rank in range(world_size)]


def test_counting_reads_the_data_once(pool, tmp_path):
    """All workers of all hosts share it, for all ranks together; the first shard is read on each host, to compare."""

    def read():
        return [line.split() for line in (tmp_path / "read").read_text().splitlines()]

    class Noted(IterableDataset):
        def __iter__(self):
            info = get_worker_info()
            with open(tmp_path / "read", "a") as file:
                file.write(f"{info.id} {os.getpid()}\n")
            # On a busy machine, one worker of a host could read all of its part before the others have started.
            until(lambda: len({worker for _, worker in read()}) == 1 + 2 + 3, "all workers read", TIMEOUT_S)
            yield from range(info.id, LENGTH, info.num_workers)

    hosts = pool.serve(lambda: DataLoader(Noted(), batch_size=BATCH_SIZE))
    with one_of(2, 0, hosts) as module:
        loader = module.train_dataloader()
        cluster.until_up(module)
        # As all ranks ask.
        assert [loader._count_on_host()[0] for _ in range(2)] == [8 * -(-25 // BATCH_SIZE)] * 2
    assert collections.Counter(int(shard) for shard, _ in read()) == {0: 3, **dict.fromkeys(range(1, NUM_SHARDS), 1)}


def test_hosts_that_see_other_files_are_an_error(pool):
    """The sizes of the first shard show it, before any batch is trained on."""

    class Own(IterableDataset):
        def __iter__(self):
            info = get_worker_info()
            return iter(range(info.id, info.num_workers * ord(os.environ[HOST_VARIABLE]), info.num_workers))

    hosts = pool.serve(lambda: DataLoader(Own(), batch_size=1))[:2]
    with (
        one_of(2, 0, hosts) as module,
        pytest.raises(
            DataHostMismatchError, match=r"different data from the iterable dataset(.|\n)*batches in shard 0 of 16: "
        ),
    ):
        len(module.train_dataloader())


def test_dropped_batches_are_told(hosts, caplog):
    """The warning says how many batches all ranks leave out."""
    with one_of(2, 0, hosts) as module:
        length = len(module.train_dataloader())
    total = len(expected_indices())
    assert f"leaving out {total - 2 * length} of {total} batches" in caplog.text


def test_shards_restart_where_the_pass_is_longer(hosts, caplog):
    """With batches_per_epoch, a pass has exactly so many batches; the next round has random states of its own."""
    with remote(hosts, batches_per_epoch=230) as module:
        loader = module.train_dataloader()
        assert len(loader) == 230
        batches = list(loader)
        rest = list(loader_at(module, 150))
    expected = expected_indices()
    assert indices(batches) == (expected * 3)[:230]
    assert stream_hash(batches[: len(expected)]) != stream_hash(batches[len(expected) : 2 * len(expected)])
    assert stream_hash(rest) == stream_hash(batches[150:])
    assert caplog.text.count("They restart within the pass") == 1  # once for each loader


def test_shards_that_have_more_are_cut(hosts, whole):
    """With batches_per_epoch, what is left is dropped."""
    with remote(hosts, batches_per_epoch=50) as module:
        assert stream_hash(module.train_dataloader()) == stream_hash(whole[:50])


def test_a_single_rank_has_no_length(hosts):
    """Counting would cost a pass over the data; the message names the setting."""
    with remote(hosts) as module, pytest.raises(TypeError, match=r"data_service\.batches_per_epoch"):
        len(module.train_dataloader())


def test_shards_must_divide(hosts):
    """The error names both numbers, and the setting."""
    with (
        one_of(3, 0, hosts, virtual_shards=10) as module,
        pytest.raises(DataSettingsError, match=r"num_shards=10 \(data_service.virtual_shards\) .* world_size=3"),
    ):
        module.train_dataloader()


@pytest.mark.parametrize(("breaks_at", "batch"), [(37, 0), (277, 4)], ids=["the first batch", "several requested"])
def test_errors_name_shard_and_batch(pool, breaks_at, batch):
    """An exception in the iterator is raised in the trainer, with the shard and its batch."""

    def broken():
        return DataLoader(Sharded(LENGTH, breaks_at=breaks_at), batch_size=BATCH_SIZE)

    match = rf"(?s)batch {batch} of shard 5 of 16.*ValueError: cannot read {breaks_at}"
    with (
        remote(pool.serve(broken)[:2]) as module,
        pytest.raises(RemoteTransformError, match=match),
    ):
        list(module.train_dataloader())


def test_worker_init_fn_splits_a_dataset(pool):
    """It is called for each shard, and what it sets on the dataset is that shard's."""

    class Range(IterableDataset):
        start, stop = 0, 96

        def __iter__(self):
            return iter(range(self.start, self.stop))

    def split(worker_id):
        info = get_worker_info()
        assert worker_id == info.id
        size = 96 // info.num_workers
        info.dataset.start, info.dataset.stop = info.id * size, (info.id + 1) * size

    def loader():
        return DataLoader(Range(), batch_size=3, worker_init_fn=split)

    with remote(pool.serve(loader)[2:]) as module:
        seen = [index for batch in module.train_dataloader() for index in batch.tolist()]
    assert sorted(seen) == list(range(96))


class Unsplit(IterableDataset):
    """Numbers in the order of a file."""

    def __iter__(self):
        yield from range(24)


class Shuffled(Unsplit):
    """In another order in each shard."""

    def __iter__(self):
        numbers = list(super().__iter__())
        random.shuffle(numbers)
        return iter(numbers)


class AsksTooLate(Unsplit):
    """A sample that comes in every shard, and then its part of the others."""

    def __iter__(self):
        yield 0
        info = get_worker_info()
        yield from range(1 + info.id, 24, info.num_workers)


class OnlyChecks(Unsplit):
    """Looks whether it is in a worker, and draws from the worker's seed."""

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        return iter([] if info is None else random.Random(info.seed).sample(range(24), 24))


def only_seeds(worker_id):
    """Seed, as examples do for random augmentation."""
    np.random.seed(worker_id)


UNSPLIT = {
    "in file order": lambda: DataLoader(Unsplit(), batch_size=4),
    "shuffled": lambda: DataLoader(Shuffled(), batch_size=4),
    "asks too late": lambda: DataLoader(AsksTooLate(), batch_size=4),
    "only checks": lambda: DataLoader(OnlyChecks(), batch_size=4),
    "worker_init_fn only seeds": lambda: DataLoader(Unsplit(), batch_size=4, worker_init_fn=only_seeds),
    "one of two chained": lambda: DataLoader(Nested() + Unsplit(), batch_size=4),
}


@pytest.mark.parametrize("name", UNSPLIT)
def test_a_dataset_that_does_not_split_itself_is_an_error(pool, name):
    """Every shard would have everything; the error names the dataset and the loader, and says what to do."""
    dataset = UNSPLIT[name]().dataset
    cls = type(dataset.datasets[1] if isinstance(dataset, ChainDataset) else dataset).__name__
    match = rf"{cls}, the dataset of train_dataloader\(\).* Each of 16 virtual.*get_worker_info(.|\n)*virtual_shards=1"
    with remote(pool.serve(UNSPLIT[name])[:1]) as module, pytest.raises(DataSettingsError, match=match):
        list(module.train_dataloader())


class Logs(IterableDataset):
    """Asks for its number only to log it."""

    def __iter__(self):
        logging.getLogger(__name__).debug("reading in worker %d", get_worker_info().id)
        for number in range(40):
            yield {"mask": torch.tensor([number % 3] * 3, dtype=torch.uint8), "index": number, "name": f"{number}"}


@pytest.mark.parametrize("name", "ac")
def test_shards_that_are_equal_are_an_error(pool, name):
    """A dataset that asks for its number, but yields everything, would be read once for each shard."""
    hosts = {host.name: host for host in pool.serve(lambda: DataLoader(Logs(), batch_size=4))}
    match = r"Shards \d+ and \d+ of 16 of train_dataloader\(\).* begin with the same 2 batches.*virtual_shards=1"
    with remote([hosts[name]]) as module, pytest.raises(DataSettingsError, match=match):
        list(module.train_dataloader())
    with remote([hosts[name]], virtual_shards=1) as module:
        assert torch.cat([batch["index"] for batch in module.train_dataloader()]).tolist() == list(range(40))


def test_shards_that_are_meant_to_be_equal_need_a_setting(pool):
    """Then the stream is read once for each shard."""
    hosts = pool.serve(lambda: DataLoader(Logs(), batch_size=4))[:1]
    with remote(hosts, verify="warn") as module:
        assert len(list(module.train_dataloader())) == 16 * 10


def test_ranks_learn_before_they_train_that_a_dataset_does_not_split_itself(pool):
    """Where batches are counted first, too."""
    with (
        one_of(2, 1, pool.serve(UNSPLIT["in file order"])[:2]) as module,
        pytest.raises(DataSettingsError, match="Unsplit"),
    ):
        len(module.train_dataloader())


@pytest.mark.parametrize("name", ["in file order", "shuffled"])
def test_a_single_shard_needs_no_split(pool, name):
    """What the error advises reads everything once."""
    with remote(pool.serve(UNSPLIT[name])[:1], virtual_shards=1) as module:
        assert sorted(torch.cat(list(module.train_dataloader())).tolist()) == list(range(24))


class Splitting(Unsplit):
    """Splits itself in one of the ways in which datasets do.

    Args:
        how: The way.
    """

    def __init__(self, how):
        self.how = how

    def __iter__(self):
        info = self.how()
        yield from range(info.id, 24, info.num_workers)


class Nested(Unsplit):
    """Passes on what another dataset yields, which it makes itself, as libraries do."""

    def __iter__(self):
        inner = Splitting(torch.utils.data._utils.worker.get_worker_info)
        return map(int, iter(inner))


class Half(Unsplit):
    """Twelve numbers; each half splits itself.

    Args:
        start: The first one.
    """

    def __init__(self, start):
        self.start = start

    def __iter__(self):
        info = get_worker_info()
        return iter(range(self.start + info.id, self.start + 12, info.num_workers))


def in_a_thread():
    """Ask in a thread, as datasets do that read ahead."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(get_worker_info).result()


SPLIT = {
    "from-import": lambda: Splitting(get_worker_info),
    "by its full name": lambda: Splitting(torch.utils.data.get_worker_info),
    "a nested dataset": Nested,
    "chained datasets": lambda: ChainDataset([Half(0), Half(12) + ChainDataset([])]),
    "in a thread": lambda: Splitting(in_a_thread),
}


@pytest.mark.parametrize("name", SPLIT)
def test_a_dataset_that_splits_itself_is_read_once(pool, name):
    """Whatever the name by which it asks for its part, and whoever asks for it."""
    with remote(pool.serve(lambda: DataLoader(SPLIT[name](), batch_size=4))[:1]) as module:
        assert sorted(torch.cat(list(module.train_dataloader())).tolist()) == list(range(24))


def test_a_dataset_without_end_cannot_be_counted(pool):
    """Several ranks get an error after a while, which names the setting that makes counting needless."""

    class Endless(IterableDataset):
        def __iter__(self):
            number = get_worker_info().id
            while True:
                yield number

    def loader():
        return DataLoader(Endless(), batch_size=2)

    hosts = pool.serve(loader)[:1]
    with (
        one_of(2, 0, hosts, batch_timeout_s=2.0) as module,
        pytest.raises(DataTimeoutError, match=r"Set data_service\.batches_per_epoch"),
    ):
        len(module.train_dataloader())
    # It still reads, and would be killed after a while.
    for worker in hosts[0].workers:
        worker.kill()
    with one_of(2, 1, hosts, batches_per_epoch=9) as module:
        assert [batch.tolist() for batch in module.train_dataloader()] == [
            [number] * 2 for number in [1, 3, 5, 7, 9, 11, 13, 15, 1]
        ]
