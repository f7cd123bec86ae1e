"""Getting the order of a user's sampler, and the length of an iterable dataset, from data hosts."""

import contextlib
import os
import threading
import time

import numpy as np
import pytest

from lightning_sm.data.feeder.agreement import PATIENCE_S
from lightning_sm.data.feeder.host_link import LinkState
from lightning_sm.data.feeder.sampler_orders import SamplerOrderClient, length_of, plan_pass
from lightning_sm.data.ipc.feeder_messages import LoaderPlace, PassRequest, Position
from lightning_sm.data.ipc.host_messages import SamplerOutput
from lightning_sm.data.plan.samples import BatchPlan, SamplePlan, Tail, digest
from lightning_sm.data.protocol.calls import Crashed, OrderSize, Problem, Running, ShardSizes
from lightning_sm.data.protocol.spec import LoaderDescription
from lightning_sm.data.server import sampler_orders as server
from lightning_sm.errors import (
    DataHostMismatchError,
    DataServiceError,
    DataSettingsError,
    RemoteTransformError,
    WireError,
)


def pass_request(order="sampler", rank=0, world_size=1, num_shards=1, batch_size=4, drop_last=False, tail="exact"):
    """A pass, as the training process describes it."""
    loader = LoaderDescription("train_dataloader()", order, None, batch_size, drop_last, "i", "f", "Fake")
    limits = {"window_batches": 8, "window_bytes": 1 << 20, "max_batch_bytes": 1 << 20, "timeout_s": 60.0}
    place = LoaderPlace("1/fit/train/0", 0, "train", rank, world_size, seed=0, num_shards=num_shards, **limits)
    return PassRequest(1, place, loader, Position(tail=tail))


class Hosts:
    """Data hosts in this process, whose samplers yield what a test says; counts the bytes that go over the network.

    Args:
        number: How many there are.
        keys: The order.
        offsets: Where its batches begin, for a batch sampler.
    """

    def __init__(self, number=2, keys=(), offsets=None):
        self.num_bytes, self.num_calls = 0, 0
        keys = np.ascontiguousarray(keys, "<i8")
        parts = [keys] if offsets is None else [keys, np.asarray(offsets, "<i8")]
        num_batches = len(keys) if offsets is None else len(offsets) - 1
        self.size = OrderSize(len(keys), num_batches, digest(np.concatenate(parts)))
        self.fd = os.memfd_create("order")
        with os.fdopen(os.dup(self.fd), "wb") as file:
            for part in parts:
                file.write(part.data)
        self.links = {f"h{name}": Link(self, f"h{name}") for name in range(number)}

    @contextlib.contextmanager
    def orders(self, on_mismatch=print, patience_s=PATIENCE_S):
        """What a feeder has of them."""
        made = SamplerOrderClient(self.links, on_mismatch, patience_s)
        try:
            yield made
        finally:
            made.close()
            made._requests.shutdown()
            os.close(self.fd)


class Link:
    """The connection of a feeder to such a host, which answers as the server process does."""

    def __init__(self, hosts, name):
        self.name, self.state, self.counted = name, LinkState.UP, []
        self._hosts = hosts
        self.orders = server.SamplerOrderCache(self._run)

    def _run(self, loader_pass, timeout_s):
        self._hosts.num_calls += 1
        message = SamplerOutput(loader_pass, self._hosts.size, (os.dup(self._hosts.fd),))
        threading.Thread(target=self.orders.take, args=(message,)).start()

    def sampler_order(self, request):
        answer = b"".join(self.orders.answer(request, 5.0))
        self._hosts.num_bytes += len(request.encode()) + len(answer)
        return answer

    def count(self, request):
        part = range(request.part, request.num_shards, request.num_parts)
        self.counted += part
        return ShardSizes([10 + shard for shard in part], first=10).encode()


def test_an_order_comes_once_a_host_is_up_and_waiting_for_it_costs_nothing():
    """While all hosts are down, the thread sleeps; it used to spin."""
    hosts = Hosts(1, range(3))
    hosts.links["h0"].state = LinkState.CONNECTING
    found = []
    with hosts.orders() as orders:
        waiting = threading.Thread(target=lambda: found.append(orders.get(pass_request())))
        before = time.process_time()
        waiting.start()
        waiting.join(1.0)
        used_s = time.process_time() - before
        assert waiting.is_alive()
        assert used_s < 0.5
        hosts.links["h0"].state = LinkState.UP
        waiting.join(20.0)
    assert found[0].keys.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "ask",
    [lambda orders: orders.get(pass_request()), lambda orders: length_of(pass_request("shards", num_shards=8), orders)],
)
def test_the_end_of_the_training_ends_the_wait(ask):
    """Whoever waits for hosts that do not come gets an error, in whatever they were waiting."""
    hosts = Hosts(2)
    for link in hosts.links.values():
        link.state = LinkState.CONNECTING
    with hosts.orders() as orders:
        threading.Timer(0.1, orders.close).start()
        with pytest.raises(DataServiceError, match="Training has ended"):
            ask(orders)


@pytest.mark.parametrize(("drop_last", "tail"), [(False, "exact"), (False, "pad"), (True, "pad")])
@pytest.mark.parametrize("size", [0, 2, 13, 48, 50, 53])
def test_each_rank_gets_its_part_of_a_sampler(size, drop_last, tail):
    """The batches of all ranks are those of a plan over the whole order, and so is the length."""
    order = np.random.default_rng(0).integers(0, 10**12, size)
    with Hosts(2, order).orders() as orders:
        for rank in range(3):
            asked = pass_request(rank=rank, world_size=3, drop_last=drop_last, tail=tail)
            (own, last), whole = plan_pass(asked, orders), SamplePlan(order, 4, drop_last, rank, 3, pads=tail == "pad")
            is_exact = tail == "exact"
            assert last == (Tail.of(size, 4, drop_last=False, rank=rank, world_size=3) if is_exact else Tail())
            assert own.num_steps == whole.num_steps == length_of(asked, orders).num_steps
            assert [own.batch(step).tolist() for step in range(own.num_steps)] == [
                whole.batch(step).tolist() for step in range(whole.num_steps)
            ]
            assert own.positions().tolist() == whole.positions().tolist()
            assert own.order_length == len(order)


@pytest.mark.parametrize("offsets", [[0], [0, 5], [0, 1, 3, 6, 10, 15], None])
def test_each_rank_gets_its_batches_of_a_batch_sampler(offsets):
    """Batches that the user made stay whole, also those of one sample each without automatic batching."""
    order = np.arange(100, 100 + (offsets or [7])[-1])
    kind = "sampler" if offsets is None else "batch_sampler"
    with Hosts(2, order, offsets).orders() as orders:
        for rank in range(2):
            asked = pass_request(kind, rank=rank, world_size=2, batch_size=None)
            (own, last), whole = plan_pass(asked, orders), BatchPlan(order, offsets, rank, 2)
            num_last = (len(order) if offsets is None else len(offsets) - 1) % 2
            assert last.weight == (2.0 * (rank == 0) if num_last else 1.0)
            assert own.num_steps == whole.num_steps == length_of(asked, orders).num_steps
            assert [own.batch(step).tolist() for step in range(own.num_steps)] == [
                whole.batch(step).tolist() for step in range(whole.num_steps)
            ]


def test_ten_million_samples_cost_a_trainer_host_its_part():
    """64 ranks, 16 hosts: the 8 ranks of a trainer host receive an eighth of the order and 16 digests each.

    Every rank used to fetch the whole order from every host: 10 GB for each trainer host and epoch, and half as much
    again for the length.
    """
    size = 10_000_000
    hosts = Hosts(16, np.arange(size)[::-1])
    with hosts.orders() as orders:
        for rank in range(8):
            asked = pass_request(rank=rank, world_size=64, batch_size=64)
            assert length_of(asked, orders).num_steps == -(-size // (64 * 64))
            assert plan_pass(asked, orders)[0].batch(1)[0] == size - 1 - 64 * (64 + rank)
    assert hosts.num_calls == 16
    assert size < hosts.num_bytes < 1.1 * size  # 8 bytes for each sample of 8 of 64 ranks


def test_hosts_that_disagree_are_named():
    """Samples would be lost and repeated; the error has both digests."""
    hosts = Hosts(2, range(8))
    hosts.links["h1"]._hosts = Hosts(0, range(8, 0, -1))
    with (
        hosts.orders() as orders,
        pytest.raises(
            DataHostMismatchError, match=r"sampler of train_dataloader\(\):\n  h[01]: digest: \w+\n  h[01]: digest: "
        ),
    ):
        orders.get(pass_request())
    os.close(hosts.links["h1"]._hosts.fd)


def test_of_several_hosts_the_odd_one_is_named():
    """It answers first; the others show that it is the odd one."""
    hosts = Hosts(3, range(8))
    odd = hosts.links["h0"]
    odd._hosts = Hosts(0, range(8, 0, -1))
    come = threading.Event()
    for link in (hosts.links["h1"], hosts.links["h2"]):
        link.sampler_order = lambda request, answer=link.sampler_order: come.wait(20.0) and answer(request)
    threading.Timer(0.2, come.set).start()
    with hosts.orders() as orders, pytest.raises(DataHostMismatchError, match=r"\(different from most: h0\):"):
        orders.get(pass_request())
    os.close(odd._hosts.fd)


def test_a_late_host_that_disagrees_is_reported():
    """It does not delay the pass, but ends the training when it answers."""
    hosts = Hosts(2, range(8))
    may_answer, reported = threading.Event(), []
    late = hosts.links["h1"]
    late._hosts = Hosts(0, range(8, 0, -1))
    answer = late.sampler_order
    late.sampler_order = lambda request: may_answer.wait(30.0) and answer(request)
    came = threading.Event()
    with hosts.orders(lambda error: (reported.append(str(error)), came.set()), patience_s=0.1) as orders:
        assert orders.get(pass_request()).keys.tolist() == list(range(8))
        may_answer.set()
        assert came.wait(20.0)
    assert "h0" in reported[0]
    assert "h1" in reported[0]
    os.close(late._hosts.fd)


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (
            Problem("RemoteTransformError", "ZeroDivisionError: x"),
            RemoteTransformError,
            "data host h0, the s",
        ),
        (Problem("DataSettingsError", "Batch 1 is empty."), DataSettingsError, r"^Batch 1 is empty.\non data host h0"),
        (
            Problem("KeyboardInterrupt", ""),
            WireError,
            r"host h0 for the sampler of train_dataloader\(\) has an unknown error",
        ),
        (OrderSize(-1, 1, "d"), WireError, r"`int` >= 0 - at `\$.num_samples`"),
        (OrderSize(1, 1, "d", num_keys=1), WireError, "malformed"),
    ],
)
def test_an_answer_without_an_order_is_an_error(answer, error, message):
    """The user's error names the host and the sampler; nonsense is the host's."""
    hosts = Hosts(1, range(8))
    hosts.links["h0"].sampler_order = lambda _: answer.encode() + b"\n"
    with hosts.orders() as orders, pytest.raises(error, match=message):
        orders.get(pass_request())


def test_a_sampler_that_crashes_its_process_is_tried_a_few_times():
    """The error says how often it did; a host whose sampler still runs is asked again."""
    hosts = Hosts(1, range(8))
    answers = [Running(), *[Crashed("was killed by SIGKILL")] * 4]
    hosts.links["h0"].sampler_order = lambda _: answers.pop(0).encode() + b"\n"
    with hosts.orders() as orders, pytest.raises(DataServiceError, match="crashed its process 4 times"):
        orders.get(pass_request())


def test_hosts_share_the_counting():
    """Each counts its part; the part of one that does not come is counted by the next."""
    hosts = Hosts(3)
    hosts.links["h1"].state = LinkState.CONNECTING
    asked = pass_request("shards", rank=1, world_size=2, num_shards=8)
    with hosts.orders(patience_s=0.1) as orders:
        steps = length_of(asked, orders)
    assert (steps.num_steps, steps.num_dropped) == (sum(10 + shard for shard in range(0, 8, 2)), 4)
    counted = {name: sorted(link.counted) for name, link in hosts.links.items()}
    assert counted == {"h0": [0, 3, 6], "h1": [], "h2": [1, 2, 4, 5, 7]}


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (ShardSizes([1] * 4, first=9), DataHostMismatchError, r":\n  h0: batches in shard 0 of 8: 10\n  h1: .* 9\n"),
        (ShardSizes([1] * 3, first=1), WireError, "count from data host h1 is malformed"),
        (ShardSizes([1, 2, 3, True], first=1), WireError, r"`int`, got `bool` - at `\$.sizes"),
        (
            Problem("RemoteTransformError", "KeyError", "worker 3"),
            RemoteTransformError,
            "h1, worker 3",
        ),
    ],
)
def test_a_count_that_cannot_be_is_an_error(answer, error, message):
    """Hosts whose first shard has another size see other files."""
    hosts = Hosts(2)
    hosts.links["h1"].count = lambda _: answer.encode()
    with hosts.orders() as orders, pytest.raises(error, match=message):
        length_of(pass_request("shards", world_size=2, num_shards=8), orders)
