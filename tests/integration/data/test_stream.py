"""A stream of batches depends neither on the trainer's window nor on its other passes."""

import pytest
from torch.utils.data import DataLoader

from tests.integration.data.cluster import remote, seeded, undisturbed
from tests.integration.data.datasets import Augmented, Sharded, stream_hash

pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore:This DataLoader will create")]

MAKE = {
    "indexed": lambda: DataLoader(Augmented(203), batch_size=8, shuffle=True, num_workers=1),
    "stream": lambda: DataLoader(Sharded(203), batch_size=8, num_workers=4),
}


@pytest.fixture(params=MAKE)
def hosts(request, pool):
    """Data hosts with 1, 2 and 3 workers."""
    return pool.serve(MAKE[request.param])


@pytest.fixture
def expected(hosts):
    """The hash of the stream from one host with two workers."""
    return undisturbed(hosts[1:2])[0]


def test_a_window_of_one_batch_gives_the_same_stream(hosts, expected):
    """The size of the window does not change the batches."""
    with remote(hosts, window_batches=1) as module:
        assert stream_hash(seeded(module.train_dataloader())) == expected


def test_a_pass_that_was_left_early_does_not_show_in_the_next(hosts, expected):
    """Batches requested in vain are dropped, and the next pass starts from its beginning."""
    with remote(hosts) as module:
        loader = module.train_dataloader()
        for _, _ in zip(range(5), loader, strict=False):
            pass
        assert stream_hash(seeded(loader)) == expected


def test_two_passes_at_once_give_the_same_stream(hosts, expected):
    """Two iterators over one loader share its slots but do not affect each other."""
    with remote(hosts, window_batches=4) as module:
        loader = module.train_dataloader()
        first, second = iter(seeded(loader)), iter(seeded(loader))
        pairs = list(zip(first, second, strict=True))
    assert {stream_hash(stream) for stream in zip(*pairs, strict=True)} == {expected}
