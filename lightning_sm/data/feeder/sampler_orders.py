"""The orders of the user's own samplers: data hosts compute them; the feeder compares them and plans passes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from msgspec.structs import asdict, replace

from lightning_sm.data.feeder.agreement import PATIENCE_S, Agreement
from lightning_sm.data.feeder.host_link import HostLink, LinkState
from lightning_sm.data.feeder.pass_buffer import StepPlan
from lightning_sm.data.ipc.feeder_messages import Length, PassRequest
from lightning_sm.data.plan.order import IndexArray, Order, SequentialOrder, ShuffledOrder
from lightning_sm.data.plan.samples import BatchPlan, ReceivedPlan, SamplePlan, Tail, num_steps
from lightning_sm.data.plan.shards import ShardSteps, shard_steps
from lightning_sm.data.protocol import calls
from lightning_sm.data.protocol.calls import CountRequest, ListRequest, OrderSize, ShardSizes
from lightning_sm.data.protocol.grpc_status import CallError
from lightning_sm.errors import DataHostMismatchError, DataServiceError, WireError

logger = logging.getLogger(__name__)

# Pause before asking hosts that have reconnected, or whose request failed.
_PERIOD_S = 0.5
# After this many crashes of processes that run a sampler, the sampler is to blame.
_MAX_CRASHES = 4

_Size = TypeVar("_Size", OrderSize, ShardSizes)


class SamplerOrder(NamedTuple):
    """The order of a sampler in one pass, as far as this rank needs it.

    Attributes:
        size: Size and digest of the whole order.
        keys: Keys for the dataset in this rank's batches, int64; empty if they are not wanted.
        offsets: Where each of these batches begins in ``keys``, and where the last one ends.
        positions: Where each of these batches begins in the whole order.
    """

    size: OrderSize
    keys: IndexArray
    offsets: IndexArray
    positions: IndexArray


class _SamplerCrashedError(Exception):
    """The process that ran a sampler has crashed; the text says how."""


def plan_pass(request: PassRequest, sampler_orders: SamplerOrderClient) -> tuple[StepPlan, Tail]:
    """Return the plan of a pass, and its last step. For the user's sampler, wait until data hosts have run it.

    Args:
        request: The pass.
        sampler_orders: Source of orders.

    Raises:
        DataServiceError: The sampler failed, or its orders differ between data hosts.
        ValueError: The sampler yields something that is not an order.
    """
    loader, place, position = request.loader, request.place, request.position
    pads = position.tail == "pad"
    if loader.order == "shards":
        plan = ShardSteps(place.num_shards, place.rank, place.world_size, position.first_step, position.stop_step)
        return plan, Tail()
    if loader.order in ("sampler", "batch_sampler"):
        order = sampler_orders.get(request)
        are_batches = loader.order == "batch_sampler"
        num_samples = order.size.num_batches if are_batches else order.size.num_samples
        tail = _tail(request, num_samples, None if are_batches else loader.batch_size)
        return ReceivedPlan(order.keys, order.offsets, order.positions, order.size.num_samples), tail
    num_samples = loader.num_samples or 0
    keys: Order = SequentialOrder(num_samples)
    if loader.order == "shuffled":
        keys = ShuffledOrder(
            num_samples,
            seed=place.seed,
            epoch=position.epoch,
            pass_index=position.pass_index,
            salt=f"{place.stage} {place.index}",
        )
    tail = _tail(request, num_samples, loader.batch_size)
    if loader.batch_size is None:
        return BatchPlan(keys, None, place.rank, place.world_size), tail
    return SamplePlan(keys, loader.batch_size, loader.drop_last, place.rank, place.world_size, pads=pads), tail


def _tail(request: PassRequest, num_samples: int, batch_size: int | None) -> Tail:
    # The samples that fill a padded step count, as those of a DistributedSampler do.
    if request.position.tail == "pad":
        return Tail()
    place = request.place
    return Tail.of(
        num_samples, batch_size, drop_last=request.loader.drop_last, rank=place.rank, world_size=place.world_size
    )


def length_of(request: PassRequest, sampler_orders: SamplerOrderClient) -> Length:
    """Return the length of a pass.

    Args:
        request: A pass over an iterable dataset, or over a loader with a sampler of the user's.
        sampler_orders: Source of orders and lengths.

    Raises:
        DataServiceError: The user's code failed, or the data hosts disagree.
    """
    loader, world_size = request.loader, request.place.world_size
    if loader.order == "shards":
        return Length(request.pass_id, *shard_steps(sampler_orders.shard_sizes(request), world_size))
    size = sampler_orders.agree(request).reply.size
    if loader.order == "batch_sampler":
        steps = num_steps(size.num_batches, None, drop_last=False, world_size=world_size)
    else:
        steps = num_steps(size.num_samples, loader.batch_size, drop_last=loader.drop_last, world_size=world_size)
    return Length(request.pass_id, steps, 0, digest=size.digest, is_cut=size.is_cut)


class SamplerOrderClient:
    """The client for orders and lengths: has the data hosts run samplers and count iterable datasets.

    All hosts run a sampler and report its digest; one of them sends the rank's part of the order. Each host counts a
    part of an iterable dataset.

    Args:
        links: The data hosts.
        on_mismatch: Called with the error when a late answer differs.
        patience_s: Seconds that a pass waits for late hosts after the first answer, and that a host which counts may be
            missing before another one counts for it.
    """

    def __init__(
        self,
        links: Mapping[str, HostLink],
        on_mismatch: Callable[[DataHostMismatchError], None],
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._links = list(links.values())
        self._on_mismatch = on_mismatch
        self._patience_s = patience_s
        self._requests = ThreadPoolExecutor(4 * max(1, len(links)), thread_name_prefix="sampler order of host")
        self._closed = threading.Event()
        self._adding = threading.Lock()

    def get(self, request: PassRequest) -> SamplerOrder:
        """Return this rank's part of the order of a pass, as soon as the hosts agree on it.

        Raises:
            DataServiceError: The sampler failed, or its orders differ between data hosts.
        """
        list_request, name = _list_request(request), request.loader.name
        agreement = self.agree(request)
        while not self._closed.is_set():
            for link in self._up(list_request.rank):
                try:
                    order = _fetch_order(link, replace(list_request, wants_keys=True), name)
                except (CallError, _SamplerCrashedError) as error:
                    _warn(link.name, error)
                    continue
                with self._adding:
                    agreement.add(link.name, order, time.monotonic())
                return order
            self._closed.wait(_PERIOD_S)
        raise DataServiceError("Training has ended.")

    def agree(self, request: PassRequest) -> Agreement[SamplerOrder]:
        """Have all hosts run a sampler, and return the agreement on its size and digest once it is reached.

        Args:
            request: The pass.

        Raises:
            DataServiceError: The sampler failed, or its orders differ between data hosts.
        """
        list_request, name = _list_request(request), request.loader.name
        agreement = _order_agreement(name, self._patience_s)
        replies: dict[str, Future[SamplerOrder]] = {}
        num_crashes = 0
        while not self._closed.is_set():
            up = {link.name: link for link in self._up()}
            for host in up.keys() - replies.keys():
                replies[host] = self._submit(_fetch_order, up[host], list_request, name)
            missing = {host: reply for host, reply in replies.items() if host not in agreement.replies}
            if not missing:  # no host is up: avoid a busy loop
                self._closed.wait(_PERIOD_S)
            wait(missing.values(), _PERIOD_S, FIRST_COMPLETED)
            for host, reply in missing.items():
                if not reply.done():
                    continue
                problem = reply.exception()
                if isinstance(problem, (CallError, _SamplerCrashedError)):
                    _warn(host, problem)
                    del replies[host]
                    num_crashes += isinstance(problem, _SamplerCrashedError)
                else:
                    agreement.add(host, reply.result(), time.monotonic())
            if num_crashes >= _MAX_CRASHES:
                raise DataServiceError(
                    f"The sampler of {name} crashed its process {num_crashes} times. See the "
                    "logs of the data hosts for how it ended. An infinite sampler takes all memory."
                )
            if agreement.reach(len(up.keys() | agreement.replies.keys()), time.monotonic()):
                for host in replies.keys() - agreement.replies.keys():
                    replies[host].add_done_callback(partial(self._add_late, agreement, host))
                return agreement
        raise DataServiceError("Training has ended.")

    def _add_late(self, agreement: Agreement[SamplerOrder], host: str, reply: Future[SamplerOrder]) -> None:
        try:
            with self._adding:
                agreement.add(host, reply.result(), time.monotonic())
        except DataHostMismatchError as error:
            self._on_mismatch(error)
        except Exception as error:  # noqa: BLE001  # the training does not need this host's order
            if not self._closed.is_set():
                _warn(host, error)

    def shard_sizes(self, request: PassRequest) -> list[int]:
        """Have the hosts count the batches in every shard of an iterable dataset, each a part of them.

        Raises:
            DataServiceError: The user's code failed, or the hosts see different data.
        """
        loader_pass, num_shards, name = request.loader_pass, request.place.num_shards, request.loader.name
        num_parts = min(len(self._links), num_shards)
        parts = [
            CountRequest(**asdict(loader_pass), num_shards=num_shards, part=part, num_parts=num_parts)
            for part in range(num_parts)
        ]
        counts = [self._submit(self._count_part, part, name) for part in parts]
        sizes = [0] * num_shards
        agreement: Agreement[int] = Agreement(
            f"Data hosts read different data from the iterable dataset of {name}",
            "All hosts must see the same files. Random draws must come from the global generator of random, NumPy or "
            "torch, or from a random generator that the dataset holds, which have the same seeds on all hosts.",
            lambda first: {f"batches in shard 0 of {num_shards}": str(first)},
        )
        for part, count in enumerate(counts):
            host, counted = count.result()
            sizes[part::num_parts] = counted.sizes
            agreement.add(host, counted.first, time.monotonic())
        agreement.check()
        return sizes

    def close(self) -> None:
        """Stop all requests."""
        self._closed.set()
        self._requests.shutdown(wait=False)  # requests that wait notice ``_closed``

    def _submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        try:
            return self._requests.submit(function, *arguments)
        except RuntimeError as error:  # it is shut down
            raise DataServiceError("Training has ended.") from error

    def _up(self, first: int = 0) -> list[HostLink]:
        """Return the hosts that are up, beginning with number ``first``, so that ranks spread over the hosts."""
        first %= max(1, len(self._links))
        links = [*self._links[first:], *self._links[:first]]
        return [link for link in links if link.state is LinkState.UP]

    def _count_part(self, request: CountRequest, name: str) -> tuple[str, ShardSizes]:
        """Return the name of a host, and the batches that it has counted in the dataset of a loader.

        All ranks ask the same host for a part, which then counts once. If it is not up in time, another one counts.
        """
        own = self._links[request.part]
        deadline = time.monotonic() + self._patience_s
        while not self._closed.is_set():
            up = self._up(request.part)
            if up and (up[0] is own or time.monotonic() >= deadline):
                try:
                    data = up[0].count(request)
                except CallError as error:
                    logger.warning("Data host %s could not count the batches: %s", up[0].name, error)
                else:
                    counted = _parse_or_wait(data, ShardSizes, up[0], f"iterable dataset of {name}")
                    if counted is None:
                        continue
                    if len(counted.sizes) != len(range(request.part, request.num_shards, request.num_parts)):
                        raise WireError(f"The count from data host {up[0].name} is malformed: {str(counted)[:200]}.")
                    return up[0].name, counted
            self._closed.wait(_PERIOD_S)
        raise DataServiceError("Training has ended.")


def _order_agreement(name: str, patience_s: float) -> Agreement[SamplerOrder]:
    return Agreement(
        f"Data hosts got different orders from the sampler of {name}",
        "Random draws must come from the global generator of random, NumPy or torch, or from a random generator in the "
        "sampler's attributes, which have the same seeds on all hosts. The order must not depend on time, host names "
        "or unordered sets.",
        lambda order: {"samples": str(order.size.num_samples), "digest": order.size.digest},
        patience_s,
    )


def _warn(host: str, error: Any) -> None:
    logger.warning("Could not get a sampler's order from data host %s: %s", host, error)


def _list_request(request: PassRequest) -> ListRequest:
    loader, place = request.loader, request.place
    return ListRequest(
        **asdict(request.loader_pass),
        rank=place.rank,
        world_size=place.world_size,
        batch_size=loader.batch_size or 0,
        drop_last=loader.drop_last,
        pads=request.position.tail == "pad",
        wants_keys=False,
        timeout_s=place.timeout_s,
    )


def _fetch_order(link: HostLink, request: ListRequest, name: str) -> SamplerOrder:
    """Fetch a host's order of the sampler of a loader.

    Raises:
        _SamplerCrashedError: The process that ran the sampler crashed.
    """
    while True:
        head, _, rest = link.sampler_order(request).partition(b"\n")
        size = _parse_or_wait(head, OrderSize, link, f"sampler of {name}")
        if size is not None:
            break
    if len(rest) % 8 or len(rest) < 8 * size.num_keys:
        raise WireError(f"The order from data host {link.name} is malformed: {head[:200]!r} and {len(rest)} bytes.")
    values = np.frombuffer(rest, "<i8")
    keys, others = values[: size.num_keys], values[size.num_keys :]
    num_offsets = len(others) // 2 + 1
    return SamplerOrder(size, keys, others[:num_offsets], others[num_offsets:])


def _parse_or_wait(data: bytes, kind: type[_Size], link: HostLink, source: str) -> _Size | None:
    """Parse the answer of a host; return None while the user's code runs there.

    Args:
        data: The answer.
        kind: Expected kind of answer.
        link: The host.
        source: Description of the user's code.

    Raises:
        _SamplerCrashedError: The process that ran the user's code crashed.
        DataServiceError: The user's code failed.
        WireError: The answer is malformed.
    """
    what = f"answer of data host {link.name} for the {source}"
    match reply := calls.parse_reply(data, what, kind, calls.Running, calls.Crashed, calls.Problem):
        case calls.Running():
            return None
        case calls.Crashed(how):
            raise _SamplerCrashedError(f"the process that ran it {how}")
        case calls.Problem():
            raise reply.exception(link.name, f"the {source}")
    return cast("_Size", reply)
