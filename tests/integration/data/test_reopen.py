"""What a data host that comes back is asked to open."""

import threading

from lightning_sm.data.feeder.host_link import HostLink
from tests.integration.data.fakes import FakeHost, credentials


class Owner:
    """Counts how often the host has come up."""

    def __init__(self):
        self.figures = {}
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
        link = HostLink(address, credentials(), {"client": "rank 0", "world_size": 1}, owner)
        link.want("1/fit//0", {"opening": "1/fit//0", "run": 1, "stage": "fit", "loaders": ""})
        for epoch in range(5):
            for loaders in ("train", "val"):
                name = f"1/fit/{loaders}/{epoch}"
                link.want(name, {"opening": name, "run": 1, "stage": "fit", "loaders": loaders})
        assert owner.ups.acquire(timeout=30)
        host.opened.asked = ()
        link.reopen()
        assert owner.ups.acquire(timeout=30)
        link.finish("finished")
    assert sorted(host.opened.asked) == ["", "train", "train", "val", "val"]
