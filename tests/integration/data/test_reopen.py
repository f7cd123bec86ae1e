"""Sources that are opened again after a reconnection, and workers that continue."""

import contextlib
import json
import os
import threading

import pytest
from torch.utils.data import DataLoader, Dataset

from lightning_sm.data.feeder.host_link import HostLink
from lightning_sm.data.protocol.calls import HeartbeatRequest
from lightning_sm.data.protocol.openings import Opening
from tests.fakes.reserved_job import reserve_job
from tests.integration.data.cluster import remote
from tests.integration.data.fakes import FakeHost, credentials
from tests.integration.emulators import until

pytestmark = pytest.mark.processes


class Owner:
    """Counts how often the host has come up."""

    def __init__(self):
        self.figures = None
        self.ups = threading.Semaphore(0)

    def link_up(self, link):
        self.ups.release()

    def link_lost(self, link):
        """Ignore lost connections."""

    def link_opened_source(self, link, name, outcome):
        """Ignore the outcome."""

    def fail(self, error):
        raise error

    def link_frame(self, *_):
        """Ignore frames: no batch is requested."""

    link_piece = link_frame


class Asked(FakeHost):
    """Records which openings it is asked for."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def open(self, request):
        self.asked.append([one["name"] for one in json.loads(request)["openings"]])
        return super().open(request)


def test_a_host_that_comes_back_opens_what_is_in_use_and_not_what_was():
    """The host does not reopen sources of earlier iterators."""
    _, topology, ports = reserve_job({"trainer": ["algo-1"], "data": ["algo-2"]})
    host, owner, address = Asked(), Owner(), f"127.0.0.1:{topology.data_port}"
    link = HostLink(address, credentials(), HeartbeatRequest("rank 0", 1), owner)
    with ports, contextlib.ExitStack() as stack:
        stack.callback(link.finish)
        with host.serving(where=address):
            for number in range(5):
                link.want_source(Opening(f"source {number}", "x"))
            for number in (0, 2, 4):
                link.release_source(f"source {number}")
            assert owner.ups.acquire(timeout=30)
            # The host may have come up before all sources were wanted.
            until(lambda: host.asked[-1:] == [["source 1", "source 3"]], "the host to open what was wanted later", 30.0)
        host.asked.clear()
        with host.serving(where=address):
            assert owner.ups.acquire(timeout=30)
            until(lambda: host.asked, "the host to open what is wanted", 30.0)
    assert host.asked[0] == ["source 1", "source 3"]


class Readers(Dataset):
    """Samples that consist of the id of the process that read them and its number of reads."""

    def __init__(self):
        self.num_read = 0

    def __len__(self):
        return 30

    def __getitem__(self, index):
        self.num_read += 1
        return os.getpid(), self.num_read


def test_validation_leaves_the_workers_of_the_training_as_they_are(pool):
    """Training workers keep their caches and open files between epochs, because validation has separate workers."""

    def read(loader):
        numbers = [(int(pid), int(number)) for pids, counts in loader for pid, number in zip(pids, counts, strict=True)]
        return {pid for pid, _ in numbers}, max(number for _, number in numbers)

    make = DataLoader(Readers(), batch_size=1)
    (host,) = pool.serve(lambda: make, lambda: make)[:1]
    with remote([host]) as module:
        loader, val = module.train_dataloader(), module.val_dataloader()
        trained, _ = read(loader)
        validated, num_read = read(val)
        assert num_read == len(make)
        assert not validated & trained
        assert read(loader) == (trained, 2 * len(make))
        assert trained | validated <= {worker.pid for worker in host.workers}
