"""Batches are in shared memory, and do not change while anything refers to them."""

import copy
import gc
import logging
import os
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, _utils

from tests.integration.data.cluster import num_in_flight, remote, seeded, undisturbed
from tests.integration.data.datasets import Augmented, stream_hash
from tests.integration.emulators import until

pytestmark = pytest.mark.processes

LENGTH, BATCH_SIZE = 203, 4
BLOCK, NUM_LARGE = 1 << 20, 40


class Large(Dataset):
    """Samples of 1 MiB that hold their index."""

    def __len__(self):
        return NUM_LARGE

    def __getitem__(self, index):
        return torch.full((BLOCK,), index, dtype=torch.uint8)


def make():
    """Return loaders of small and of large samples."""
    return {
        "small": DataLoader(Augmented(LENGTH), batch_size=BATCH_SIZE, shuffle=True),
        "large": DataLoader(Large(), batch_size=1),
    }


@pytest.fixture
def hosts(pool):
    """Two data hosts."""
    return pool.serve(make)[:2]


@pytest.fixture(scope="module")
def expected(pool):
    """The stream of small samples if no batch is kept."""
    return undisturbed(pool.hosts[1:2], lambda: make()["small"])[0]


def test_kept_batches_stay_unchanged(hosts, expected, caplog):
    """More batches than there are slots can be kept for an epoch; one warning says that this costs copies."""
    with remote(hosts, window_batches=4) as module, caplog.at_level(logging.WARNING):
        loaders = module.train_dataloader()
        batches, large = list(seeded(loaders["small"])), list(loaders["large"])
        assert stream_hash(batches) == expected
    # The batches outlive the feeder.
    assert stream_hash(batches) == expected
    assert [batch.unique().tolist() for batch in large] == [[index] for index in range(NUM_LARGE)]
    warnings = [record.message for record in caplog.records if "the training loop holds" in record.message]
    assert len(warnings) == 1
    assert "Keep only the parts of a batch that you need" in warnings[0]


def test_with_pin_memory_batches_are_copies_as_in_torch(hosts, expected, monkeypatch, caplog):
    """With an accelerator, torch's own function copies each batch, so all of them can be kept without a slot."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(_utils.pin_memory, "pin_memory", lambda batch, _device: copy.deepcopy(batch))
    with remote(hosts, window_batches=4) as module, caplog.at_level(logging.WARNING):
        loader = module.train_dataloader()["small"]
        loader.pin_memory = True
        batches = list(seeded(loader))
    assert stream_hash(batches) == expected
    assert "the training loop holds" not in caplog.text


def test_kept_views_stay_unchanged(hosts):
    """A slice, a detached tensor, a NumPy view or a storage keeps its slot, as a whole batch does."""
    views = []
    ways = (
        lambda batch: batch[0, 10:20],
        lambda batch: batch.detach().view(-1)[::7],
        lambda batch: batch.numpy()[:, 5:],
        lambda batch: torch.tensor([], dtype=torch.uint8).set_(batch.untyped_storage()),
    )
    with remote(hosts, window_batches=4) as module:
        for index, batch in enumerate(module.train_dataloader()["large"]):
            views.append(ways[index % len(ways)](batch))
            del batch
        for index, view in enumerate(views):
            assert (view == index).all(), index


def test_a_batch_in_a_reference_cycle_gives_its_slot_back(hosts, expected):
    """Batches that only the garbage collector frees neither stop the stream nor change while in use."""
    gc.disable()
    try:
        with remote(hosts, window_batches=4) as module:
            batches = []
            for batch in seeded(module.train_dataloader()["small"]):
                cycle = [batch]
                cycle.append(cycle)
                batches.append(
                    {name: value.clone() if torch.is_tensor(value) else value for name, value in batch.items()}
                )
                if len(batches) % 16 == 0:
                    gc.collect()
            assert stream_hash(batches) == expected
    finally:
        gc.enable()


def test_a_forked_child_frees_nothing(hosts):
    """The parent can still use inherited batches that a child has dropped."""
    with remote(hosts, window_batches=4) as module:
        stream = iter(module.train_dataloader()["large"])
        batches = [next(stream) for _ in range(3)]
        child = os.fork()
        if child == 0:
            batches.clear()
            gc.collect()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        rest = [int(batch.amax()) for batch in stream]
        assert rest == list(range(3, NUM_LARGE))
        for index, batch in enumerate(batches):
            assert (batch == index).all()


def settled(module, loader, least):
    """Read a few batches and wait until none is in flight; return stream and number of batches ahead."""
    stream = iter(loader)
    for _ in range(10):
        next(stream)
    feeder = module._service_connection.feeder

    def is_settled():
        # Right after a batch is read, the next one is not requested yet.
        snapshot = feeder.snapshot()
        (known,) = snapshot.passes
        return not num_in_flight(snapshot) and known.ready >= least

    until(is_settled, f"{least} batches are ahead", 60.0)
    return stream, feeder.snapshot().passes[0].ready


def ring_bytes(module):
    """Return the memory of all loaders' slots in bytes."""
    folder = Path(f"/proc/{module._service_connection.feeder._process.pid}/fd")
    rings = {
        file.stat().st_ino: file.stat() for file in folder.iterdir() if "memfd:lightning_sm" in str(file.readlink())
    }
    return sum(ring.st_blocks * 512 for ring in rings.values())


@pytest.mark.parametrize(
    ("settings", "window"),
    [
        ({"window_batches": 6}, 6),
        ({"window_batches": 30, "window_bytes": 5 * BLOCK}, 5),
        pytest.param({"window_batches": 3}, 3, marks=pytest.mark.proof),
        pytest.param({"window_batches": 30, "window_bytes": BLOCK // 2}, 2, marks=pytest.mark.proof),
    ],
)
def test_a_slow_consumer_is_not_flooded(hosts, settings, window):
    """However fast the hosts are, the window bounds the batches ahead, in number and in bytes, and so the memory."""
    # Use one host: duplicates of late batches at a second one would occupy more slots.
    with remote(hosts[:1], **settings) as module:
        # The sampler runs for several batches at a time, so fewer than `window` may be ahead.
        stream, num_ready = settled(module, module.train_dataloader()["large"], max(1, window - 3))
        taken = ring_bytes(module)
        assert num_ready <= window
        assert len(list(stream)) == NUM_LARGE - 10
    # The size of a batch is unknown before the first answer, and a host with two workers accepts three requests.
    assert taken <= (max(window, 3) + 2) * BLOCK, taken / BLOCK
