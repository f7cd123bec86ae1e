"""The orders of the user's own samplers: data hosts compute them, the feeder compares them and plans the pass."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, NamedTuple

import grpc
import numpy as np

from lightning_sm import errors
from lightning_sm.data.feeder.agreement import PATIENCE_S, Agreement
from lightning_sm.data.feeder.host_link import HostLink, LinkState, describe
from lightning_sm.data.feeder.pass_buffer import StepPlan
from lightning_sm.data.plan.order import IndexArray, Order, SequentialOrder, ShuffledOrder, sorted_order
from lightning_sm.data.plan.samples import BatchPlan, SamplePlan, num_steps
from lightning_sm.data.plan.shards import ShardSteps, shard_steps
from lightning_sm.data.protocol.failures import with_place
from lightning_sm.errors import DataHostMismatchError, DataServiceError, DataSettingsError, WireError

logger = logging.getLogger(__name__)

# How often hosts that have reconnected, or whose request failed, get a request.
_PERIOD_S = 0.5
# Crashes of the processes that run a sampler after which the sampler is to blame.
_MAX_CRASHES = 4

_PASS = ("opening", "loader", "seed", "epoch", "pass_index")


class SamplerOrder(NamedTuple):
    """What a sampler yields in one pass.

    Attributes:
        num_samples: Samples of all ranks.
        num_batches: Batches of all ranks; without a batch sampler, samples.
        digest: Equal for equal orders.
        keys: What the dataset is indexed with, in this rank's batches, int64; empty if only the digest was wanted.
        offsets: Where each of these batches begins in ``keys``, and where the last one ends.
    """

    num_samples: int
    num_batches: int
    digest: str
    keys: IndexArray
    offsets: IndexArray


class _SamplerCrashedError(Exception):
    """The process that ran a sampler ended, in the way that the text says."""


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
    if facts["order"] in ("sampler", "batch_sampler"):
        order = sampler_orders.get(facts)
        return BatchPlan(order.keys, order.offsets, 0, 1)
    keys: Order = SequentialOrder(facts["num_samples"])
    if facts["order"] == "shuffled":
        template = facts["template"]
        which = {name: template[name] for name in ("seed", "epoch", "pass_index")}
        shuffled = sorted_order if facts["order_version"] == 1 else ShuffledOrder
        keys = shuffled(facts["num_samples"], **which, salt=f"{facts['stage']} {template['loader']}")
    if facts["batch_size"] is None:
        return BatchPlan(keys, None, rank, world_size)
    return SamplePlan(keys, facts["batch_size"], facts["drop_last"], rank, world_size)


def lengths(facts: Mapping[str, Any], sampler_orders: SamplerOrders) -> dict[str, Any]:
    """Return the steps of a pass ("num_steps"), and the batches of all ranks that it leaves out ("num_dropped").

    Args:
        facts: The training process's description of an iterable dataset, or of a loader with a sampler of the user's.
        sampler_orders: Where to get the order of a sampler.

    Raises:
        DataServiceError: The user's code failed, or the data hosts disagree.
    """
    world_size = facts["world_size"]
    if facts["order"] == "shards":
        steps, num_dropped = shard_steps(sampler_orders.shard_sizes(facts), world_size)
        return {"num_steps": steps, "num_dropped": num_dropped}
    order = sampler_orders.agree(_list_request(facts)).reply
    if facts["order"] == "batch_sampler":
        steps = num_steps(order.num_batches, None, drop_last=False, world_size=world_size)
    else:
        steps = num_steps(order.num_samples, facts["batch_size"], drop_last=facts["drop_last"], world_size=world_size)
    return {"num_steps": steps, "num_dropped": 0}


class SamplerOrders:
    """Has the data hosts run samplers and count iterable datasets, and compares what they say.

    All hosts run a sampler and tell its digest; one of them sends the rank's part of the order. Of an iterable dataset
    each host counts a part.

    Args:
        links: The data hosts.
        on_mismatch: Called with the error when a host answers late, and differently.
    """

    def __init__(self, links: Mapping[str, HostLink], on_mismatch: Callable[[DataHostMismatchError], None]) -> None:
        self._links = list(links.values())
        self._on_mismatch = on_mismatch
        self._requests = ThreadPoolExecutor(4 * max(1, len(links)), thread_name_prefix="sampler order of host")
        self._closed = threading.Event()
        self._adding = threading.Lock()

    def get(self, facts: Mapping[str, Any]) -> SamplerOrder:
        """Return this rank's part of the order of a pass, as soon as the hosts agree on it.

        Args:
            facts: The training process's description of the loader and of the pass.

        Raises:
            DataServiceError: The sampler failed, or its orders differ between data hosts.
        """
        request = _list_request(facts)
        agreement = self.agree(request)
        while not self._closed.is_set():
            for link in self._up(facts["rank"]):
                try:
                    order = _listed(link, {**request, "wants_keys": True})
                except (grpc.RpcError, _SamplerCrashedError) as error:
                    _warn(link.name, error)
                    continue
                with self._adding:
                    agreement.add(link.name, order, time.monotonic())
                return order
            self._closed.wait(_PERIOD_S)
        raise DataServiceError("The training has ended.")

    def agree(self, request: Mapping[str, Any]) -> Agreement[SamplerOrder]:
        """Have all hosts run a sampler, and return the agreement on its size and digest once it is reached.

        Args:
            request: What to ask for, without the keys.

        Raises:
            DataServiceError: The sampler failed, or its orders differ between data hosts.
        """
        agreement = _order_agreement(request["opening"])
        replies: dict[str, Future[SamplerOrder]] = {}
        num_crashes = 0
        while not self._closed.is_set():
            up = {link.name: link for link in self._up()}
            for name in up.keys() - replies.keys():
                replies[name] = self._submit(_listed, up[name], request)
            missing = {name: reply for name, reply in replies.items() if name not in agreement.replies}
            if not missing:  # no host is up
                self._closed.wait(_PERIOD_S)
            wait(missing.values(), _PERIOD_S, FIRST_COMPLETED)
            for name, reply in missing.items():
                if not reply.done():
                    continue
                problem = reply.exception()
                if isinstance(problem, (grpc.RpcError, _SamplerCrashedError)):
                    _warn(name, problem)
                    del replies[name]
                    num_crashes += isinstance(problem, _SamplerCrashedError)
                else:
                    agreement.add(name, reply.result(), time.monotonic())
            if num_crashes >= _MAX_CRASHES:
                raise DataServiceError(
                    f"The sampler of {request['opening']} crashed the process that ran it {num_crashes} times. See the "
                    "logs of the data hosts for how it ended. An infinite sampler takes all memory."
                )
            if agreement.reach(len(up.keys() | agreement.replies.keys()), time.monotonic()):
                for name in replies.keys() - agreement.replies.keys():
                    replies[name].add_done_callback(partial(self._add_late, agreement, name))
                return agreement
        raise DataServiceError("The training has ended.")

    def _add_late(self, agreement: Agreement[SamplerOrder], name: str, reply: Future[SamplerOrder]) -> None:
        try:
            with self._adding:
                agreement.add(name, reply.result(), time.monotonic())
        except DataHostMismatchError as error:
            self._on_mismatch(error)
        except Exception as error:  # noqa: BLE001  # the training does not need this host's order
            if not self._closed.is_set():
                _warn(name, error)

    def shard_sizes(self, facts: Mapping[str, Any]) -> list[int]:
        """Have the hosts count the batches in every shard of an iterable dataset, each a part of them.

        Args:
            facts: The training process's description of the loader and of the pass.

        Raises:
            DataServiceError: The user's code failed, or the hosts see different data.
        """
        num_parts = min(len(self._links), facts["num_shards"])
        request = {name: facts["template"][name] for name in _PASS}
        request |= {"num_shards": facts["num_shards"], "num_parts": num_parts}
        counts = [self._submit(self._counted, {**request, "part": part}) for part in range(num_parts)]
        sizes = [0] * facts["num_shards"]
        agreement: Agreement[int] = Agreement(
            f"Data hosts read different data from the iterable dataset of {request['opening']}",
            "All hosts must see the same files. Random draws must come from the global generator of random, NumPy or "
            "torch, which have the same seeds on all hosts.",
            lambda first: {f"batches in shard 0 of {facts['num_shards']}": str(first)},
        )
        for part, count in enumerate(counts):
            name, sizes[part::num_parts], first = count.result()
            agreement.add(name, first, time.monotonic())
        agreement.check()
        return sizes

    def close(self) -> None:
        """Stop all requests."""
        self._closed.set()
        self._requests.shutdown(wait=False)  # those that wait in it notice that this is closed

    def _submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        try:
            return self._requests.submit(function, *arguments)
        except RuntimeError as error:  # it is shut down
            raise DataServiceError("The training has ended.") from error

    def _up(self, first: int = 0) -> list[HostLink]:
        """Return the hosts that are up; ranks that name another first one get them in another order."""
        first %= max(1, len(self._links))
        links = [*self._links[first:], *self._links[:first]]
        return [link for link in links if link.state is LinkState.UP]

    def _counted(self, request: Mapping[str, Any]) -> tuple[str, list[int], int]:
        """Return the name of a host, the batches in the shards of a part, and those in shard 0.

        The same host counts a part for all ranks. Another one does if that one does not come.
        """
        own = self._links[request["part"]]
        deadline = time.monotonic() + PATIENCE_S
        while not self._closed.is_set():
            up = self._up(request["part"])
            if up and (up[0] is own or time.monotonic() >= deadline):
                try:
                    facts = _parsed(up[0], up[0].count(request), "count of an iterable dataset")
                except grpc.RpcError as error:
                    logger.warning("Data host %s could not count the batches: %s", up[0].name, describe(error))
                else:
                    if "state" in facts:  # the workers still read
                        continue
                    _raise_problem(facts, up[0], f"the iterable dataset of {request['opening']}")
                    sizes, first = facts.get("sizes"), facts.get("first")
                    num_own = len(range(request["part"], request["num_shards"], request["num_parts"]))
                    if not isinstance(sizes, list) or [type(size) for size in [*sizes, first]] != [int] * (num_own + 1):
                        raise WireError(f"The count from data host {up[0].name} is malformed: {str(facts)[:200]}.")
                    return up[0].name, sizes, facts["first"]
            self._closed.wait(_PERIOD_S)
        raise DataServiceError("The training has ended.")


def _order_agreement(opening: str) -> Agreement[SamplerOrder]:
    return Agreement(
        f"Data hosts get different orders from the user's sampler of {opening}",
        "Random draws must come from the global generator of random, NumPy or torch, or from a random generator in the "
        "sampler's attributes, which have the same seeds on all hosts. The order must not depend on time, host names "
        "or unordered sets.",
        lambda order: {"samples": str(order.num_samples), "digest": order.digest},
    )


def _warn(host: str, error: Any) -> None:
    what = describe(error) if isinstance(error, grpc.RpcError) else error
    logger.warning("Could not get a sampler's order from data host %s: %s", host, what)


def _list_request(facts: Mapping[str, Any]) -> dict[str, Any]:
    request = {name: facts["template"][name] for name in _PASS}
    part = {name: facts[name] for name in ("rank", "world_size", "drop_last")}
    return {**request, **part, "batch_size": facts["batch_size"] or 0, "wants_keys": False}


def _listed(link: HostLink, request: Mapping[str, Any]) -> SamplerOrder:
    """Return a host's order.

    Raises:
        _SamplerCrashedError: The process that ran the sampler crashed.
    """
    while True:
        head, _, rest = link.sampler_order(request).partition(b"\n")
        facts = _parsed(link, head, "sampler's order")
        if "state" in facts:  # the sampler still runs
            continue
        if "lost" in facts:
            raise _SamplerCrashedError(f"the process that ran it {facts['lost']}")
        _raise_problem(facts, link, f"the sampler of {request['opening']}")
        num_keys = facts.get("num_keys", 0)
        sizes: list[Any] = [facts.get("num_samples"), facts.get("num_batches"), num_keys]
        if not all(type(size) is int and size >= 0 for size in sizes) or len(rest) % 8 or len(rest) < 8 * num_keys:
            raise WireError(
                f"The sampler's order from data host {link.name} is malformed: {head[:200]!r} and {len(rest)} bytes."
            )
        values = np.frombuffer(rest, "<i8")
        return SamplerOrder(sizes[0], sizes[1], str(facts.get("digest")), values[:num_keys], values[num_keys:])


def _parsed(link: HostLink, data: bytes, what: str) -> dict[str, Any]:
    try:
        return dict(json.loads(data))
    except (ValueError, TypeError, RecursionError) as error:
        raise WireError(f"The {what} from data host {link.name} is malformed: {error}.") from error


def _raise_problem(facts: Mapping[str, Any], link: HostLink, source: str) -> None:
    """Raise the error of the user's code, if that is what a host answers."""
    if "error" not in facts:
        return
    kind = getattr(errors, str(facts["error"]), None)
    if not (isinstance(kind, type) and issubclass(kind, DataServiceError)):
        raise WireError(f"Data host {link.name} answered with an unknown error: {str(facts)[:200]}.")
    text = str(facts.get("text"))
    if kind is DataSettingsError:
        raise DataSettingsError(text)
    raise kind(with_place(text, ", ".join(filter(None, (f"data host {link.name}", facts.get("where"), source)))))
