"""The orders of the user's samplers on a data host: the main process runs them, and trainers get their parts."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from lightning_sm.data.ipc.host_messages import SamplerOutput
from lightning_sm.data.plan.order import IndexArray
from lightning_sm.data.plan.samples import BatchPlan, SamplePlan
from lightning_sm.data.protocol.calls import Crashed, ListRequest, LoaderPass, OrderSize, Problem, Running
from lightning_sm.data.protocol.spec import CHUNK_BYTES

# Ranks are at most an epoch apart. For a slower rank the sampler runs again.
_NUM_KEPT = 2


@dataclass
class _StoredOrder:
    """The order of a sampler in one pass.

    Attributes:
        size: Its size and digest, or why there is none.
        keys: What the dataset is indexed with.
        offsets: For batch samplers, where each batch starts, and where the last one ends.
    """

    size: OrderSize | Running | Crashed | Problem
    keys: IndexArray | None = None
    offsets: IndexArray | None = None


class SamplerOrderCache:
    """The cache of orders: has samplers run, and keeps the orders of the two newest passes of each loader.

    Args:
        run_sampler: Asks the main process to run a sampler within some seconds; ``take`` gets its order.
    """

    def __init__(self, run_sampler: Callable[[LoaderPass, float], None]) -> None:
        self._run_sampler = run_sampler
        self._changed = threading.Condition()
        self._orders: dict[LoaderPass, _StoredOrder] = {}  # the newest is last

    @property
    def num_running(self) -> int:
        """Samplers that have not ended."""
        with self._changed:
            return sum(order.size == Running() for order in self._orders.values())

    def is_known(self, request: LoaderPass) -> bool:
        """Return whether a sampler has run for a pass, or is running."""
        with self._changed:
            return request.loader_pass in self._orders

    def answer(self, request: ListRequest, timeout_s: float) -> Iterator[bytes]:
        """Yield a line of JSON about the order, and the batches of a rank, if it wants them, as raw int64.

        These are their keys, where each batch begins in the keys and the last one ends, and where each begins in the
        whole order.

        Args:
            request: The request.
            timeout_s: How long to wait for the sampler, which keeps running.

        Raises:
            ValueError: The rank does not exist, or its batch size is negative.
        """
        loader_pass = request.loader_pass
        with self._changed:
            if loader_pass not in self._orders:
                self._orders[loader_pass] = _StoredOrder(Running())
                self._run_sampler(loader_pass, request.timeout_s)
            self._changed.wait_for(lambda: self._order(loader_pass).size != Running(), timeout_s)
            order = self._order(loader_pass)
            if isinstance(order.size, Crashed):  # the sampler runs again for the next trainer that asks
                self._orders.pop(loader_pass, None)
        if not isinstance(order.size, OrderSize) or order.keys is None or not request.wants_keys:
            yield order.size.encode() + b"\n"
            return
        rank, world_size = request.rank, request.world_size
        plan: SamplePlan | BatchPlan
        if order.offsets is not None or request.batch_size == 0:
            plan = BatchPlan(order.keys, order.offsets, rank, world_size)
        else:
            plan = SamplePlan(order.keys, request.batch_size, request.drop_last, rank, world_size, pads=request.pads)
        keys, offsets = plan.batches()
        yield replace(order.size, num_keys=len(keys)).encode() + b"\n"
        for part in (keys, offsets, plan.positions()):
            data = part.astype("<i8", copy=False).data.cast("B") if len(part) else b""
            for start in range(0, len(data), CHUNK_BYTES):
                yield bytes(data[start : start + CHUNK_BYTES])

    def take(self, output: SamplerOutput) -> None:
        """Keep the order of a sampler."""
        loader_pass, size = output.loader_pass, output.outcome
        if not isinstance(size, OrderSize):
            order = _StoredOrder(size)
        elif output.fds:
            order = _read(output.fds[0], size)
        else:
            order = _StoredOrder(Crashed("sent its order to a process that has no descriptor left"))
        for fd in output.fds:
            os.close(fd)
        with self._changed:
            self._orders.pop(loader_pass, None)
            self._orders[loader_pass] = order
            # Drop orders of other runs of the Trainer and of older passes of this loader, but none that is awaited.
            done = [key for key, other in self._orders.items() if other.size != Running()]
            same = [key for key in done if _loader_of(key) == _loader_of(loader_pass)]
            for key in [
                *same[:-_NUM_KEPT],
                *(key for key in done if _trainer_run_of(key) != _trainer_run_of(loader_pass)),
            ]:
                del self._orders[key]
            self._changed.notify_all()

    def _order(self, loader_pass: LoaderPass) -> _StoredOrder:
        return self._orders.get(loader_pass, _StoredOrder(Running()))


def _read(fd: int, size: OrderSize) -> _StoredOrder:
    # Mapped, not copied: the arrays keep the memory alive. An empty file cannot be mapped.
    values = np.frombuffer(mmap.mmap(fd, 0), "<i8") if os.fstat(fd).st_size else np.empty(0, "<i8")
    keys, offsets = values[: size.num_samples], values[size.num_samples :]
    return _StoredOrder(size, keys, offsets if len(offsets) else None)


def _trainer_run_of(loader_pass: LoaderPass) -> str:
    return loader_pass.opening.partition("/")[0]


def _loader_of(loader_pass: LoaderPass) -> tuple[str, int]:
    return loader_pass.opening.rpartition("/")[0], loader_pass.loader
