"""The orders of the user's samplers on a data host: the main process runs them, and trainers get their parts."""

from __future__ import annotations

import json
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from lightning_sm.data.plan.order import IndexArray
from lightning_sm.data.plan.samples import BatchPlan, SamplePlan
from lightning_sm.data.protocol.spec import CHUNK_BYTES

# Ranks are at most an epoch apart. For a slower rank the sampler runs again.
_NUM_KEPT = 2

_Which: TypeAlias = tuple[str, int, int, int, int]


@dataclass
class _Order:
    """What a sampler yields in one pass.

    Attributes:
        head: Its size and digest, or why there is none; None while the sampler runs.
        keys: What the dataset is indexed with.
        offsets: For batch samplers, where each batch starts, and where the last one ends.
    """

    head: dict[str, Any] | None = None
    keys: IndexArray | None = None
    offsets: IndexArray | None = None


class SamplerOrders:
    """Has the samplers run, and keeps the orders of the two newest passes of each loader.

    Args:
        run: Asks the main process to run a sampler; ``take`` gets what it yields.
    """

    def __init__(self, run: Callable[[dict[str, Any]], None]) -> None:
        self._run = run
        self._changed = threading.Condition()
        self._orders: dict[_Which, _Order] = {}  # the newest is last

    @property
    def num_running(self) -> int:
        """Samplers that have not ended."""
        with self._changed:
            return sum(order.head is None for order in self._orders.values())

    def is_known(self, facts: Mapping[str, Any]) -> bool:
        """Return whether the sampler has run for a pass, or runs."""
        with self._changed:
            return _which(facts) in self._orders

    def answer(self, facts: dict[str, Any], timeout_s: float) -> Iterator[bytes]:
        """Yield a line of JSON about the order, and the batches of a rank, if it wants them, as raw int64.

        Args:
            facts: The request.
            timeout_s: How long to wait for the sampler, which goes on running.

        Raises:
            ValueError: The rank does not exist, or its batch size is negative.
        """
        which = _which(facts)
        with self._changed:
            if which not in self._orders:
                self._orders[which] = _Order()
                self._run({name: facts[name] for name in ("opening", "loader", "seed", "epoch", "pass_index")})
            self._changed.wait_for(lambda: self._order(which).head is not None, timeout_s)
            order = self._order(which)
            if order.head is not None and "lost" in order.head:  # the sampler runs again for the next trainer that asks
                self._orders.pop(which, None)
        if order.head is None or order.keys is None or not facts["wants_keys"]:
            yield json.dumps(order.head or {"state": "listing"}).encode() + b"\n"
            return
        keys, offsets = _part(order.keys, order.offsets, facts)
        yield json.dumps({**order.head, "num_keys": len(keys)}).encode() + b"\n"
        for part in (keys, offsets):
            data = part.astype("<i8", copy=False).data.cast("B") if len(part) else b""
            for start in range(0, len(data), CHUNK_BYTES):
                yield bytes(data[start : start + CHUNK_BYTES])

    def take(self, facts: Mapping[str, Any], fd: int) -> None:
        """Keep what a sampler has yielded.

        Args:
            facts: The pass, and why the process that ran the sampler ended, if it crashed ("why").
            fd: Memory with the answer: a line of JSON, keys and offsets.
        """
        order = _Order({"lost": facts["why"]}) if facts["why"] else _read(fd)
        os.close(fd)
        which = _which(facts)
        with self._changed:
            self._orders.pop(which, None)
            self._orders[which] = order
            # Those of other runs, and of older passes of this loader. A sampler that runs is awaited.
            done = [key for key, other in self._orders.items() if other.head is not None]
            same = [key for key in done if _loader_of(key) == _loader_of(which)]
            for key in [*same[:-_NUM_KEPT], *(key for key in done if _run_of(key) != _run_of(which))]:
                del self._orders[key]
            self._changed.notify_all()

    def _order(self, which: _Which) -> _Order:
        return self._orders.get(which, _Order())


def _read(fd: int) -> _Order:
    with mmap.mmap(fd, 0) as memory:
        size = memory.find(b"\n") + 1
        head = json.loads(memory[:size])
    if "error" in head:
        return _Order(head)
    num_keys, num_offsets = head["num_samples"], head.pop("num_offsets")
    # Mapped, not copied: the arrays keep the memory alive.
    values = np.frombuffer(mmap.mmap(fd, 0), "<i8", num_keys + num_offsets, offset=size)
    return _Order(head, values[:num_keys], values[num_keys:] if num_offsets else None)


def _part(keys: IndexArray, offsets: IndexArray | None, facts: Mapping[str, Any]) -> tuple[IndexArray, IndexArray]:
    rank, world_size = facts["rank"], facts["world_size"]
    if offsets is not None or facts["batch_size"] == 0:
        return BatchPlan(keys, offsets, rank, world_size).batches()
    return SamplePlan(keys, facts["batch_size"], facts["drop_last"], rank, world_size).batches()


def _which(facts: Mapping[str, Any]) -> _Which:
    return facts["opening"], facts["loader"], facts["seed"], facts["epoch"], facts["pass_index"]


def _run_of(which: _Which) -> str:
    return which[0].partition("/")[0]


def _loader_of(which: _Which) -> tuple[str, int]:
    return which[0].rpartition("/")[0], which[1]
