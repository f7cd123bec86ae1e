"""What is opened again, and what stays as it is."""

import os
import threading
import time

import pytest
import torch
from pytorch_lightning import LightningModule
from torch.utils.data import DataLoader, Dataset

from lightning_sm import RemoteDataModule
from lightning_sm.data.feeder.host_link import HostLink
from lightning_sm.data.protocol.calls import HeartbeatRequest, OpenRequest
from lightning_sm.errors import DataServiceError
from tests.fakes.requests import open_request
from tests.integration.data.cluster import remote
from tests.integration.data.fakes import FakeHost, credentials
from tests.integration.data.numbers import quiet_trainer
from tests.integration.emulators import until


class Owner:
    """Counts how often the host has come up."""

    def __init__(self):
        self.figures = None
        self.ups = threading.Semaphore(0)

    def link_up(self, link):
        self.ups.release()

    def link_lost(self, link):
        """Nothing to do."""

    def link_opened(self, link, name, reply):
        """No problem."""
        return ""

    def link_refused(self, error):
        raise error

    def link_frame(self, *_):
        """No batch is requested."""

    link_piece = link_frame


class Counted(dict):
    """Answers to Open, and for which loaders they were asked."""

    asked = ()

    def __getitem__(self, loaders):
        self.asked = (*self.asked, loaders)
        return super().__getitem__(loaders)


def test_a_host_that_comes_back_opens_the_loaders_in_use_and_not_those_of_earlier_epochs():
    """With reload_dataloaders_every_n_epochs=1, every epoch opens its own."""
    host, owner = FakeHost(), Owner()
    host.opened = Counted({**host.opened, "val": host.opened["train"]})
    with host.serving() as address:
        link = HostLink(address, credentials(), HeartbeatRequest("rank 0", 1), owner)
        requests = [
            open_request(""),
            *(open_request(loaders, epoch=n) for n in range(5) for loaders in ("train", "val")),
        ]
        for request in requests:
            link.want(request["opening"], OpenRequest(**request))
        assert owner.ups.acquire(timeout=30)
        # It may have come up before all of them were wanted.
        until(lambda: link._wanted.keys() <= link._opened, "the host to open what was wanted later", 30.0)
        host.opened.asked = ()
        link.reopen()
        assert owner.ups.acquire(timeout=30)
        link.finish("finished", is_success=True)
    assert sorted(host.opened.asked) == ["", "train", "train", "val", "val"]


class Readers(Dataset):
    """Says which process read a sample, in the how manyth place."""

    def __init__(self):
        self.num_read = 0

    def __len__(self):
        return 30

    def __getitem__(self, index):
        self.num_read += 1
        return os.getpid(), self.num_read


@pytest.mark.processes
def test_validation_leaves_the_workers_of_the_training_as_they_are(pool):
    """Their caches and open files are still there in the next epoch; validation has workers of its own."""

    def read(loader):
        numbers = [(int(pid), int(number)) for pids, counts in loader for pid, number in zip(pids, counts, strict=True)]
        return {pid for pid, _ in numbers}, max(number for _, number in numbers)

    make = DataLoader(Readers(), batch_size=1)
    (host,) = pool.serve(lambda: make, lambda: make)[:1]
    # Checks and duplicates would read some samples twice.
    with remote([host], verify="off", hedge_factor=0.0) as module:
        loader = module.train_dataloader()
        trained, _ = read(loader)
        validated, num_read = read(module.val_dataloader())
        assert num_read == len(make)
        assert not validated & trained
        assert read(loader) == (trained, 2 * len(make))
        assert trained | validated <= {worker.pid for worker in host.workers}


class Kept(LightningModule):
    """Keeps the training loaders of all epochs."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.loaders = []

    def training_step(self, batch, batch_idx):
        return self.layer(batch[:, None].float()).sum()

    def on_train_epoch_end(self):
        self.loaders.append(self.trainer.train_dataloader)
        if self.current_epoch == 3:
            list(self.loaders[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.processes
@pytest.mark.parametrize("sampler", [None, list(range(8))[::-1]], ids=["order of the plan", "own sampler"])
def test_loaders_that_were_replaced_are_an_error_at_once(pool, tmp_path, sampler):
    """A pass over the loaders of three reloads ago can never get a batch: the error says so, without a timeout."""
    (host,) = pool.serve(lambda: DataLoader(range(8), batch_size=4, sampler=sampler), list)[:1]
    trainer = quiet_trainer(tmp_path, max_epochs=4, reload_dataloaders_every_n_epochs=1)
    began = time.monotonic()
    with pytest.raises(DataServiceError, match=r"no longer have this train_dataloader\(\).* newest two calls"):
        trainer.fit(Kept(), datamodule=RemoteDataModule(host.data, [host.address]))
    assert time.monotonic() - began < 100  # the batch would time out after 300 s
