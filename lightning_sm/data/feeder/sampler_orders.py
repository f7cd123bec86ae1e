"""The orders of the user's own samplers: data hosts compute them, the feeder compares them and plans the pass."""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import grpc
import numpy as np

from lightning_sm.data.feeder.host_link import HostLink, LinkState, describe
from lightning_sm.data.feeder.pass_buffer import StepPlan
from lightning_sm.data.plan.order import IndexArray, Order, SequentialOrder, ShuffledOrder, sorted_order
from lightning_sm.data.plan.samples import BatchPlan, SamplePlan, digest
from lightning_sm.data.plan.shards import ShardSteps, shard_steps
from lightning_sm.data.protocol.failures import with_place
from lightning_sm.errors import DataHostMismatchError, DataServiceError, RemoteTransformError, WireError

logger = logging.getLogger(__name__)

# Hosts that answer this much later than the first do not delay the pass; they are compared when they do.
_PATIENCE_S = 5.0
# How often hosts that have reconnected, or whose request failed, get a request.
_PERIOD_S = 0.5
# Crashes of the processes that run a sampler after which the sampler is to blame.
_MAX_CRASHES = 4
# The current pass, the next one, and those of a few other loaders.
_NUM_REMEMBERED = 8


class SamplerOrder(NamedTuple):
    """What a sampler yields in one pass, or for an iterable dataset, the number of batches in each shard.

    Attributes:
        keys: What the dataset is indexed with, int64 of shape (samples,).
        offsets: For batch samplers, where each batch starts, and where the last one ends.
    """

    keys: IndexArray
    offsets: IndexArray | None


_Reply: TypeAlias = "Future[SamplerOrder | None]"  # None: the process that ran the sampler crashed


def step_plan(facts: Mapping[str, Any], sampler_orders: SamplerOrders) -> StepPlan:
    """Return the plan of a pass; if the user's sampler decides, wait until the data hosts have run it.

    Args:
        facts: The training process's description of the loader and of the pass.
        sampler_orders: Where to get the order of a sampler.

    Raises:
        DataServiceError: The sampler failed, or its orders differ between data hosts.
        ValueError: The sampler yields something that is not an order.
    """
    rank = facts["rank"]
    world_size = facts["world_size"]
    if facts["order"] == "shards":
        return ShardSteps(facts["num_shards"], rank, world_size, facts["first_step"], facts["stop_step"])
    keys: Order
    if facts["order"] in ("sampler", "batch_sampler"):
        keys, offsets = sampler_orders.get(facts)
        if offsets is not None:
            return BatchPlan(keys, offsets, rank, world_size)
    elif facts["order"] == "shuffled":
        template = facts["template"]
        which = {name: template[name] for name in ("seed", "epoch", "pass_index")}
        shuffled = sorted_order if facts["order_version"] == 1 else ShuffledOrder
        keys = shuffled(facts["num_samples"], **which, salt=f"{facts['stage']} {template['loader']}")
    else:
        keys = SequentialOrder(facts["num_samples"])
    if facts["batch_size"] is None:
        return BatchPlan(keys, None, rank, world_size)
    return SamplePlan(keys, facts["batch_size"], facts["drop_last"], rank, world_size)


def lengths(facts: Mapping[str, Any], sampler_orders: SamplerOrders) -> dict[str, Any]:
    """Return the steps of a pass ("num_steps"), and the batches of all ranks that it leaves out ("num_dropped").

    Arguments and errors are those of ``step_plan``.
    """
    num_dropped = 0
    if facts["order"] == "shards":
        num_steps, num_dropped = shard_steps(sampler_orders.get(facts).keys.tolist(), facts["world_size"])
    else:
        num_steps = step_plan(facts, sampler_orders).num_steps or 0
    return {"num_steps": num_steps, "num_dropped": num_dropped}


class SamplerOrders:
    """Gets the orders of samplers from all data hosts that are up, and compares them.

    Args:
        links: The data hosts.
        on_mismatch: Called with the error when a host answers late, and differently.
    """

    def __init__(self, links: Mapping[str, HostLink], on_mismatch: Callable[[DataHostMismatchError], None]) -> None:
        self._links = links
        self._on_mismatch = on_mismatch
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Future[SamplerOrder]] = OrderedDict()
        self._agreements = ThreadPoolExecutor(_NUM_REMEMBERED, thread_name_prefix="sampler order")
        self._requests = ThreadPoolExecutor(4 * max(1, len(links)), thread_name_prefix="sampler order of host")
        self._closed = threading.Event()

    def get(self, facts: Mapping[str, Any]) -> SamplerOrder:
        """Return the order of a pass, as soon as the hosts agree on it.

        Args:
            facts: The training process's description of the loader and of the pass.

        Raises:
            DataServiceError: The sampler failed, or its orders differ between data hosts.
        """
        names = ("opening", "loader", "seed", "epoch", "pass_index")
        request = {**{name: facts["template"][name] for name in names}, "num_shards": facts["num_shards"]}
        key = json.dumps(request, sort_keys=True)
        with self._lock:
            order = self._known.pop(key, None)
            if order is None or (order.done() and order.exception() is not None):
                order = self._agreements.submit(self._agree, request)
            self._known[key] = order
            while len(self._known) > _NUM_REMEMBERED:
                self._known.popitem(last=False)
        try:
            return order.result()
        except Exception as error:
            if self._closed.is_set():  # the thread pools are
                raise DataServiceError("The training has ended.") from error
            raise

    def close(self) -> None:
        """Stop all requests."""
        self._closed.set()
        for pool in (self._agreements, self._requests):
            pool.shutdown(wait=False, cancel_futures=True)

    def _agree(self, request: Mapping[str, Any]) -> SamplerOrder:
        replies: dict[str, _Reply] = {}
        orders: dict[str, SamplerOrder] = {}
        patience_s = _PATIENCE_S
        num_crashes = 0
        while not self._closed.is_set():
            up = {link.name: link for link in self._links.values() if link.state is LinkState.UP}
            for name, link in up.items():
                if name not in replies:
                    replies[name] = self._requests.submit(_request, link, request)
            self._pause([reply for name, reply in replies.items() if name not in orders])
            for name, reply in list(replies.items()):
                if name in orders or not reply.done():
                    continue
                error = reply.exception()
                if isinstance(error, grpc.RpcError):
                    logger.warning("Could not get a sampler's order from data host %s: %s", name, describe(error))
                    del replies[name]
                elif (order := reply.result()) is None:
                    num_crashes += 1
                    del replies[name]
                else:
                    orders[name] = order
            if num_crashes >= _MAX_CRASHES:
                raise DataServiceError(
                    f"The sampler of {request['opening']} crashed the process that ran it {num_crashes} times. See the "
                    "logs of the data hosts for how it ended. An infinite sampler takes all memory."
                )
            _compare(orders, request)
            patience_s -= _PERIOD_S if orders else 0.0
            if orders and (patience_s <= 0.0 or not up.keys() - orders.keys()):
                for name, reply in replies.items():
                    if name not in orders:
                        reply.add_done_callback(partial(self._compare_late, request, orders, name))
                return next(iter(orders.values()))
        raise DataServiceError("The training has ended.")

    def _pause(self, pending: Sequence[_Reply]) -> None:
        """Wait for the first reply; while no host is up, there is none to wait for."""
        if pending:
            wait(pending, _PERIOD_S, FIRST_COMPLETED)
        else:
            self._closed.wait(_PERIOD_S)

    def _compare_late(
        self, request: Mapping[str, Any], orders: Mapping[str, SamplerOrder], name: str, reply: _Reply
    ) -> None:
        if reply.cancelled():
            return
        if reply.exception() is not None:
            logger.warning("Could not get a sampler's order from data host %s: %s", name, reply.exception())
        elif (order := reply.result()) is not None:
            try:
                _compare({**orders, name: order}, request)
            except DataHostMismatchError as error:
                self._on_mismatch(error)


def _request(link: HostLink, request: Mapping[str, Any]) -> SamplerOrder | None:
    """Return a host's order; None if the process that ran the sampler crashed."""
    while True:
        head, _, rest = link.sampler_order(request).partition(b"\n")
        try:
            facts = dict(json.loads(head))
            num_keys = int(facts.get("num_keys", 0))
            num_offsets = int(facts.get("num_offsets", 0))
        except (ValueError, TypeError, RecursionError) as error:
            raise WireError(f"The sampler's order from data host {link.name} is malformed: {error}.") from error
        if "state" in facts:  # the sampler still runs
            continue
        if "lost" in facts:
            logger.warning("The process that ran a sampler on data host %s %s.", link.name, facts["lost"])
            return None
        if "text" in facts:
            source = "the iterable dataset" if request["num_shards"] else "the sampler"
            place = f"data host {link.name}, {source} of {request['opening']}"
            raise RemoteTransformError(with_place(facts["text"], place))
        if "num_keys" not in facts or min(num_keys, num_offsets) < 0 or len(rest) != 8 * (num_keys + num_offsets):
            raise WireError(
                f"The sampler's order from data host {link.name} is malformed: {num_keys} keys and {num_offsets} "
                f"offsets in {len(rest)} bytes."
            )
        values = np.frombuffer(rest, "<i8")
        return SamplerOrder(values[:num_keys], values[num_keys:] if num_offsets else None)


def _compare(orders: Mapping[str, SamplerOrder], request: Mapping[str, Any]) -> None:
    digests = {}
    for name, (keys, offsets) in orders.items():
        digests[name] = digest(keys if offsets is None else np.concatenate([keys, offsets]))
    if len(set(digests.values())) <= 1:
        return
    if request["num_shards"]:
        counts = {name: int(order.keys.sum()) for name, order in orders.items()}
        raise DataHostMismatchError(
            f"The iterable dataset of {request['opening']} yields different batches on each data host (batches in all "
            f"shards: {counts}). All hosts must see the same files. Random draws must come from the global generator "
            "of random, NumPy or torch, which have the same seeds on all hosts."
        )
    raise DataHostMismatchError(
        f"The user's sampler of {request['opening']} yields a different order on each data host: {digests}. Random "
        "draws must come from the global generator of random, NumPy or torch, or from a random generator in the "
        "sampler's attributes, which have the same seeds on all hosts. The order must not depend on time, host names "
        "or unordered sets."
    )
