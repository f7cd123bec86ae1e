"""The stream of batches is a function of seed and epoch, and of nothing else."""

import pytest
from torch.utils.data import DataLoader

from tests.integration.data.cluster import remote
from tests.integration.data.datasets import Augmented, reference, stream_hash

pytestmark = pytest.mark.processes

LENGTH, BATCH_SIZE = 203, 8


def make():
    """Shuffled, augmented samples."""
    return DataLoader(Augmented(LENGTH), batch_size=BATCH_SIZE, shuffle=True)


@pytest.fixture
def hosts(pool):
    """Data hosts with 1, 2 and 3 workers."""
    return pool.serve(make)


def epoch_of(module, epoch):
    """Take an epoch; Lightning announces it in the same way."""
    loader = module.train_dataloader()
    loader.set_epoch(epoch)
    return list(loader)


@pytest.mark.parametrize(
    "names", ["b", "abc", *(pytest.param(names, marks=pytest.mark.proof) for names in ("a", "c", "ab", "ac", "bc"))]
)
def test_hosts_and_workers_do_not_show(hosts, names):
    """Any number of hosts and workers gives the stream that one process computes, and every index once."""
    chosen = [host for host in hosts if host.name in names]
    with remote(chosen) as module:
        batches = epoch_of(module, 0)
        again = epoch_of(module, 1)
    assert sorted(index for batch in batches for index in batch["index"].tolist()) == list(range(LENGTH))
    assert stream_hash(batches) == stream_hash(reference(Augmented(LENGTH), LENGTH, BATCH_SIZE))
    assert stream_hash(again) == stream_hash(reference(Augmented(LENGTH), LENGTH, BATCH_SIZE, epoch=1))


def test_ranks_share_each_epoch_exactly(hosts):
    """What two ranks take in a step is what one rank with twice the batch size takes; the last step is shared, too."""
    ranks = []
    for rank in (0, 1):
        with remote(hosts[:2], tail="exact") as module:
            module._hosts._data_ranks = lambda *_, rank=rank: (rank, 2)
            loader = module.train_dataloader()
            ranks.append([batch["index"].tolist() for batch in loader])
            assert len(loader) == len(ranks[-1])
    alone = [batch["index"].tolist() for batch in reference(Augmented(LENGTH), LENGTH, 2 * BATCH_SIZE)]
    assert [first + second for first, second in zip(*ranks, strict=True)] == alone


def test_a_window_of_one_batch_gives_the_same_stream(hosts):
    """How far the trainer asks ahead does not show in the batches."""
    with remote(hosts, window_batches=1) as module:
        batches = epoch_of(module, 0)
    assert stream_hash(batches) == stream_hash(reference(Augmented(LENGTH), LENGTH, BATCH_SIZE))


def test_a_pass_that_was_left_early_does_not_show_in_the_next(hosts):
    """Batches that were asked for in vain are dropped, and the next pass starts from its beginning."""
    with remote(hosts) as module:
        loader = module.train_dataloader()
        loader.set_epoch(0)
        for _, _ in zip(range(5), loader, strict=False):
            pass
        assert stream_hash(loader) == stream_hash(reference(Augmented(LENGTH), LENGTH, BATCH_SIZE))


def test_two_passes_at_once_give_the_same_stream(hosts):
    """Two iterators over one loader share its slots, and neither shows in the other."""
    with remote(hosts, window_batches=4) as module:
        loader = module.train_dataloader()
        pairs = list(zip(loader, loader, strict=True))
    expected = stream_hash(reference(Augmented(LENGTH), LENGTH, BATCH_SIZE))
    assert {stream_hash(stream) for stream in zip(*pairs, strict=True)} == {expected}
