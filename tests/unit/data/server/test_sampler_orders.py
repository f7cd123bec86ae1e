"""The orders of samplers that a data host keeps; the test stands in for the main process, which runs them."""

import os

import numpy as np
import pytest
from msgspec.structs import replace

from lightning_sm.data.ipc.host_messages import SamplerOutput
from lightning_sm.data.protocol.calls import Crashed, ListRequest, OrderSize, Problem, Running, parse_reply
from lightning_sm.data.server.sampler_orders import SamplerOrderCache
from tests.fakes.requests import list_request


class Main:
    """Runs samplers at once, whose orders are 0 to 9 and need a descriptor."""

    def __init__(self):
        self.asked, self.outcome, self.has_descriptors = [], OrderSize(10, 10, "d"), True
        self.orders = SamplerOrderCache(self._run)

    def _run(self, loader_pass, timeout_s):
        self.asked.append((loader_pass.opening, loader_pass.loader, loader_pass.epoch))
        fds = ()
        if isinstance(self.outcome, OrderSize) and self.has_descriptors:
            fds = (os.memfd_create("order"),)
            os.write(fds[0], np.arange(self.outcome.num_samples, dtype="<i8").tobytes())
        self.orders.take(SamplerOutput(loader_pass, self.outcome, fds))

    def ask(self, timeout_s=5.0, **changed):
        """Make a request, and return the head of the answer and the numbers behind it."""
        head, _, rest = b"".join(self.orders.answer(ListRequest(**list_request(**changed)), timeout_s)).partition(b"\n")
        return parse_reply(head, "answer", OrderSize, Running, Crashed, Problem), np.frombuffer(rest, "<i8").tolist()


@pytest.fixture
def main():
    """A main process."""
    return Main()


def test_a_rank_gets_its_batches_and_where_they_begin(main):
    """Two ranks of batches of four: the tail of two is shared; without keys there is only what the order is.

    Behind the keys is where batches begin in them, and where in the order.
    """
    size = OrderSize(num_samples=10, num_batches=10, digest="d", num_keys=5)
    assert main.ask() == (replace(size, num_keys=0), [])
    wanted = {"world_size": 2, "wants_keys": True}
    assert main.ask(rank=0, **wanted) == (size, [0, 1, 2, 3, 8, 0, 4, 5, 0, 8])
    assert main.ask(rank=1, **wanted) == (size, [4, 5, 6, 7, 9, 0, 4, 5, 4, 9])
    assert len(main.asked) == 1
    with pytest.raises(ValueError, match="rank=2 does not exist in world_size=2"):
        main.ask(rank=2, **wanted)


def test_two_passes_of_each_loader_are_kept(main):
    """Ranks are at most an epoch apart; a third pass lets the first go, and another training all of them."""
    for epoch in (0, 1, 0, 1):
        for loader in (0, 1):
            main.ask(epoch=epoch, loader=loader)
    assert len(main.asked) == 4
    main.ask(epoch=2)
    main.ask(epoch=1)
    main.ask(epoch=0, loader=1)
    assert len(main.asked) == 5
    main.ask(epoch=0)
    assert len(main.asked) == 6
    main.ask(opening="2/fit/train/0")
    main.ask(epoch=0, loader=1)
    assert len(main.asked) == 8


def test_a_sampler_that_crashed_runs_again(main):
    """The trainer that asked is told how it ended; the next one may have more luck."""
    size = main.outcome
    main.outcome = Crashed("was killed by SIGKILL")
    assert main.ask() == (main.outcome, [])
    main.outcome = size
    assert main.ask()[0].digest == "d"


def test_an_order_without_its_memory_is_a_crash(main):
    """A process that has no descriptor left receives none: the sampler runs again for the next trainer."""
    main.has_descriptors = False
    assert main.ask() == (Crashed("sent its order to a process that has no descriptor left"), [])
    main.has_descriptors = True
    assert main.ask()[0].digest == "d"


def test_the_error_of_a_sampler_is_kept(main):
    """Each rank gets it: the sampler does not run again."""
    main.outcome = Problem("DataSettingsError", "it never ends")
    assert [main.ask(), main.ask()] == [(main.outcome, [])] * 2
    assert len(main.asked) == 1


def test_an_order_may_be_empty(main):
    """The dataset has no samples."""
    main.outcome = OrderSize(0, 0, "d")
    assert main.ask(wants_keys=True) == (main.outcome, [0])


def test_a_sampler_that_runs_is_waited_for_in_turns():
    """A call ends after a while, and the sampler goes on."""
    orders = SamplerOrderCache(lambda *_: None)
    for _ in range(2):
        (answer,) = orders.answer(ListRequest(**list_request()), 0.01)
        assert parse_reply(answer, "answer", OrderSize, Running, Crashed) == Running()
    assert orders.num_running == 1
    assert orders.is_known(ListRequest(**list_request(rank=0, wants_keys=True)))
