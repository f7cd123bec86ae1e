"""The orders that samplers of the user give: data hosts compute them, and they are compared here."""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import grpc
import numpy as np

from lightning_sm.data.feeder.host_link import HostLink
from lightning_sm.data.plan.samples import BatchPlan, IndexArray, SamplePlan, digest, epoch_order
from lightning_sm.data.plan.shards import ShardSteps, shard_steps
from lightning_sm.errors import DataHostMismatchError, DataServiceError, RemoteTransformError, WireError

logger = logging.getLogger(__name__)

# Hosts that answer this much later than the first do not hold up the pass; they are compared when they do.
_PATIENCE_S = 5.0
# How often hosts that came back, or were busy, are asked.
_PERIOD_S = 0.5
# Deaths of the processes that run a sampler after which it is to blame.
_MAX_DEATHS = 4
# The pass that runs, the one to come, and those of a few other loaders.
_NUM_REMEMBERED = 8


class Listing(NamedTuple):
    """What a sampler gives in one pass.

    Attributes:
        keys: What the dataset is indexed with, int64 of shape (samples,).
        offsets: For batch samplers, where each batch starts, and where the last one ends.
    """

    keys: IndexArray
    offsets: IndexArray | None


class Listings:
    """Asks all data hosts that are there for the same listings.

    Args:
        links: The data hosts.
        odd: Called with what is wrong when a host answers late, and differently.
    """

    def __init__(self, links: Mapping[str, HostLink], odd: Callable[[DataHostMismatchError], None]) -> None:
        self._links = links
        self._odd = odd
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Future[Listing]] = OrderedDict()
        self._agreeing = ThreadPoolExecutor(_NUM_REMEMBERED, thread_name_prefix="listing")
        self._asking = ThreadPoolExecutor(4 * max(1, len(links)), thread_name_prefix="listing of host")
        self._is_closed = False

    def get(self, request: Mapping[str, Any]) -> Future[Listing]:
        """Return the listing that a pass needs, once the hosts agree on it.

        Args:
            request: Opening, loader, seed, epoch and pass.
        """
        name = json.dumps(request, sort_keys=True)
        with self._lock:
            known = self._known.pop(name, None)
            if known is None or (known.done() and known.exception() is not None):
                known = self._agreeing.submit(self._agree, request)
            self._known[name] = known
            while len(self._known) > _NUM_REMEMBERED:
                self._known.popitem(last=False)
            return known

    def close(self) -> None:
        """Ask nobody any more."""
        self._is_closed = True
        for pool in (self._agreeing, self._asking):
            pool.shutdown(wait=False, cancel_futures=True)

    def _agree(self, request: Mapping[str, Any]) -> Listing:
        answers: dict[str, Listing] = {}
        asked: dict[str, Future[bytes]] = {}
        patience_s, num_deaths = _PATIENCE_S, 0
        while not self._is_closed:
            present = {link.name: link for link in self._links.values() if not link.why}
            for name, link in present.items():
                if name not in asked:
                    asked[name] = self._asking.submit(_ask, link, request)
            wait([future for name, future in asked.items() if name not in answers], _PERIOD_S, FIRST_COMPLETED)
            for name, future in list(asked.items()):
                if name in answers or not future.done():
                    continue
                answer = _answer(future, name)
                if answer is None:
                    num_deaths += future.exception() is None
                    _check_deaths(num_deaths, request)
                    del asked[name]
                else:
                    answers[name] = answer
            _compare(answers, request)
            patience_s -= _PERIOD_S if answers else 0.0
            if answers and (patience_s <= 0.0 or not present.keys() - answers.keys()):
                self._compare_late(asked, answers, request)
                return next(iter(answers.values()))
        raise DataServiceError("The training is over.")

    def _compare_late(
        self, asked: Mapping[str, Future[bytes]], answers: Mapping[str, Listing], request: Mapping[str, Any]
    ) -> None:
        def compare(future: Future[bytes], name: str) -> None:
            if future.cancelled() or (answer := _answer(future, name)) is None:
                return
            try:
                _compare({**answers, name: answer}, request)
            except DataHostMismatchError as error:
                self._odd(error)

        for name, future in asked.items():
            if name not in answers:
                future.add_done_callback(lambda future, name=name: compare(future, name))  # type: ignore[misc]


def needs_listing(order: str) -> bool:
    """Tell whether data hosts must be asked before there is a plan.

    Args:
        order: Who decides on the order.
    """
    return order in ("sampler", "batch_sampler")


def lengths(facts: Mapping[str, Any], listing: Listing | None) -> dict[str, Any]:
    """Return the steps of a pass ("num_steps"), and the batches of all ranks that it leaves out ("num_dropped").

    Args:
        facts: What the training process said of the loader and of the pass.
        listing: What the sampler gives; for shards, the batches in each.
    """
    if facts["order"] == "shards" and listing is not None:
        steps, num_dropped = shard_steps(listing.keys.tolist(), facts["world_size"])
        return {"num_steps": steps, "num_dropped": num_dropped}
    return {"num_steps": step_plan(facts, listing).num_steps or 0, "num_dropped": 0}


def step_plan(facts: Mapping[str, Any], listing: Listing | None) -> SamplePlan | BatchPlan | ShardSteps:
    """Return the plan of a pass.

    Args:
        facts: What the training process said of the loader and of the pass.
        listing: What the sampler gives; None if no sampler of the user's decides.
    """
    ranks = facts["rank"], facts["world_size"]
    if facts["order"] == "shards":
        return ShardSteps(facts["num_shards"], *ranks, facts["first_step"], facts["stop_step"])
    if listing is not None and listing.offsets is not None:
        return BatchPlan(listing.keys, listing.offsets, *ranks)
    if listing is not None:
        order = listing.keys
    elif facts["order"] == "shuffled":
        pass_, salt = facts["template"], f"{facts['stage']} {facts['template']['loader']}"
        seeds = {name: pass_[name] for name in ("seed", "epoch", "pass_index")}
        order = epoch_order(facts["num_samples"], **seeds, salt=salt)
    else:
        order = np.arange(facts["num_samples"], dtype=np.int64)
    return SamplePlan(order, facts["batch_size"] or 1, facts["drop_last"], *ranks)


def listing_request(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a data host must know to run a sampler, or to count the batches of an iterable dataset.

    Args:
        facts: What the training process said of the loader and of the pass.
    """
    names = ("opening", "loader", "seed", "epoch", "pass_index")
    return {**{name: facts["template"][name] for name in names}, "num_shards": facts["num_shards"]}


def _ask(link: HostLink, request: Mapping[str, Any]) -> bytes:
    while True:
        data = link.listing(request)
        if not data.startswith(b'{"state"'):
            return data


def _answer(future: Future[bytes], name: str) -> Listing | None:
    """Return a host's listing; None if it should be asked again."""
    try:
        return _parsed(future.result(), name)
    except grpc.RpcError as error:
        logger.warning("Data host %s could not be asked for the order of a sampler: %s", name, error.code().name)
        return None


def _parsed(data: bytes, name: str) -> Listing | None:
    head, _, rest = data.partition(b"\n")
    try:
        facts = dict(json.loads(head))
        num_keys, num_offsets = int(facts.get("num_keys", 0)), int(facts.get("num_offsets", 0))
    except (ValueError, TypeError, RecursionError) as error:
        raise WireError(f"The list of keys that came from {name} is malformed: {error}.") from error
    if "lost" in facts:
        logger.warning("Data host %s: the process that ran a sampler %s.", name, facts["lost"])
        return None
    if "text" in facts:
        raise RemoteTransformError(f"The user's sampler or dataset failed on data host {name}:\n{facts['text']}")
    if "num_keys" not in facts or min(num_keys, num_offsets) < 0 or len(rest) != 8 * (num_keys + num_offsets):
        raise WireError(f"A list of {num_keys} keys and {num_offsets} offsets came in {len(rest)} bytes from {name}.")
    values = np.frombuffer(rest, "<i8")
    return Listing(values[:num_keys], values[num_keys:] if num_offsets else None)


def _check_deaths(num_deaths: int, request: Mapping[str, Any]) -> None:
    if num_deaths >= _MAX_DEATHS:
        raise DataServiceError(
            f"The sampler of {request['opening']} killed the process that ran it, {num_deaths} times. The logs of the "
            "data hosts tell how it ended; a sampler without an end takes all memory."
        )


def _compare(answers: Mapping[str, Listing], request: Mapping[str, Any]) -> None:
    digests = {
        name: digest(np.concatenate([part for part in answer if part is not None])) for name, answer in answers.items()
    }
    if len(set(digests.values())) > 1 and request["num_shards"]:
        counts = {name: int(answer.keys.sum()) for name, answer in answers.items()}
        raise DataHostMismatchError(
            f"The iterable dataset of {request['opening']} has other batches on every data host: {counts} in all. All "
            "must see the same files, and what the dataset draws at random must come from random, NumPy's or torch's "
            "global generator, which are seeded alike on all hosts."
        )
    if len(set(digests.values())) > 1:
        raise DataHostMismatchError(
            f"The user's sampler of {request['opening']} gives another order on every data host: {digests}. It must "
            "draw from random, NumPy's or torch's global generator, or from its own generator attribute, which are "
            "seeded alike on all hosts; not from the time, the host's name or unordered sets."
        )
