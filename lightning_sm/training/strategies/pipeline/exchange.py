"""The exchange of nested values between the ranks of a replica: tensors are sent directly, and the rest is pickled."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_sm.errors import StrategyError


@dataclass(frozen=True)
class _Gap:
    """A placeholder for a tensor in the pickled part of a value."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool


class Replica:
    """The process groups of one replica of the model.

    Pickled values are sent over a Gloo group: NCCL would copy each to the device and back, and the process would wait
    for the device's queue.

    Args:
        group: The group for tensors.
        objects: The group for pickled values: the same ranks on Gloo.
        ranks: The replica's global ranks, by position in the pipeline, in ascending order.
        device: This rank's device.
    """

    def __init__(
        self, group: dist.ProcessGroup, objects: dist.ProcessGroup, ranks: list[int], device: torch.device
    ) -> None:
        self.group = group
        self._objects = objects
        self.ranks = ranks
        self.position = ranks.index(dist.get_rank())
        self.last = len(ranks) - 1
        self.is_first = self.position == 0
        self.is_last = self.position == self.last
        self._raised: Exception | None = None
        self.device = device

    def broadcast(self, value: Any, position: int) -> Any:
        """Return one position's value on all ranks of the replica.

        Args:
            value: Any value; used only at the given position.
            position: The position in the pipeline.
        """
        tensors: list[Tensor] = []
        around = [self._without_tensors(value, tensors) if self.position == position else None]
        dist.broadcast_object_list(around, group=self._objects, group_src=position)
        return self._with_tensors(around[0], tensors, partial(dist.broadcast, group=self.group, group_src=position))

    def send(self, value: Any, position: int) -> None:
        """Send a value to a position; the rank there must call ``receive``."""
        wait_for(self._start_sending(value, position))

    def receive(self, position: int, *, to_host: bool = False) -> Any:
        """Return the value that the rank at a position sends.

        Args:
            position: The position in the pipeline.
            to_host: Whether to move each tensor to main memory before the next one arrives.
        """
        receive = partial(dist.recv, src=self.ranks[position])
        length = torch.empty(1, dtype=torch.int64)
        receive(length, group=self._objects)
        around = torch.empty(int(length), dtype=torch.uint8)
        receive(around, group=self._objects)
        structure = pickle.loads(around.numpy().tobytes())  # noqa: S301  # from another rank of this job
        return self._with_tensors(structure, [], partial(receive, group=self.group), to_host=to_host)

    def gather(self, value: Any) -> list[Any] | None:
        """Return the values of all positions, in main memory, if this is position 0; elsewhere, return None.

        Tensors are gathered and moved one by one, so a device needs memory for only one additional tensor.

        Args:
            value: This rank's value.
        """
        if not self.is_first:
            self.send(value, 0)
            return None
        own = apply_to_collection(value, Tensor, Tensor.cpu)
        return [own, *(self.receive(position, to_host=True) for position in range(1, len(self.ranks)))]

    def relay(self, given: Sequence[Any], run: Callable[[int, Any], Any], *, is_backward: bool = False) -> list[Any]:
        """Pass microbatches from rank to rank: take values from one, run this rank's part, and send others to the next.

        Call it within ``together``. After an error, ranks send None, so that no rank waits for values.

        Args:
            given: For each microbatch, the values for the rank that begins; the other ranks use only the length.
            run: Called with the number of a microbatch and the values that arrived. Returns the values to send.
            is_backward: Whether values go from the last rank to the first.

        Returns:
            On the rank that ends, the results of ``run``, fewer if a rank has failed. On other ranks, nothing.

        Raises:
            Exception: The error of ``run`` on this rank, after all microbatches.
        """
        begins, ends, ahead = (self.is_last, self.is_first, -1) if is_backward else (self.is_first, self.is_last, 1)
        results: list[Any] = []
        sending: list[dist.Work] = []
        error: Exception | None = None
        for number, values in enumerate(given):
            arrived = values if begins else self.receive(self.position - ahead)
            result: Any = None
            if arrived is not None and error is None:
                try:
                    result = run(number, arrived)
                except Exception as raised:  # noqa: BLE001  # raised below
                    error = raised
            if not ends:
                # Wait only now, so that this rank has computed while the values of the previous microbatch were sent.
                wait_for(sending)
                sending = self._start_sending(result, self.position + ahead)
            elif result is not None:
                results.append(result)
        wait_for(sending)
        if error is not None:
            raise error
        return results

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise an error from the block on all ranks of the replica; a collective call, which may be nested.

        Raises:
            Exception: On a rank with an error, that error.
            StrategyError: On the other ranks. The message names the first rank with an error, and quotes the error.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            if raised is self._raised:
                raise
            error = raised
        failed = torch.tensor(int(error is not None))
        dist.all_reduce(failed, group=self._objects)
        if not failed:
            return
        texts: list[str | None] = [None] * len(self.ranks)
        text = None if error is None else f"{type(error).__name__}: {error}"
        dist.all_gather_object(texts, text, group=self._objects)
        if error is None:
            first = next(position for position, text in enumerate(texts) if text is not None)
            error = StrategyError(f"Rank {self.ranks[first]} of this replica failed: {texts[first]}")
        self._raised = error
        raise error

    def _start_sending(self, value: Any, position: int) -> list[dist.Work]:
        """Send a value, which must not change before it has arrived, and return what to wait for."""
        tensors: list[Tensor] = []
        around = torch.frombuffer(bytearray(pickle.dumps(self._without_tensors(value, tensors))), dtype=torch.uint8)
        start: Any = partial(dist.isend, dst=self.ranks[position])
        sent = [start(part, group=self._objects) for part in (torch.tensor([len(around)]), around)]
        return [*sent, *(start(tensor, group=self.group) for tensor in tensors)]

    def _without_tensors(self, value: Any, tensors: list[Tensor]) -> Any:
        def take(value: Tensor | bytes) -> Any:
            # Return bytes whole: Lightning would visit each byte, and a random state has thousands.
            if isinstance(value, bytes):
                return value
            # NCCL sends only strided tensors on this rank's device; all others are pickled.
            if value.device.type != self.device.type or value.layout is not torch.strided:
                return value.cpu()
            # Not detach(): to torch, NCCL's broadcast changes the tensor in place, and an autograd graph may need it.
            tensors.append(value.data.contiguous())
            return _Gap(value.shape, value.dtype, value.requires_grad)

        return apply_to_collection(value, (Tensor, bytes), take)

    def _with_tensors(
        self, around: Any, tensors: list[Tensor], transfer: Callable[[Tensor], Any], *, to_host: bool = False
    ) -> Any:
        own = iter(tensors)

        def fill(gap: _Gap | bytes) -> Any:
            if isinstance(gap, bytes):
                return gap
            tensor = next(own, None)
            if tensor is None:
                tensor = torch.empty(gap.shape, dtype=gap.dtype, device=self.device)
            transfer(tensor)
            return (tensor.cpu() if to_host else tensor).requires_grad_(gap.requires_grad)

        return apply_to_collection(around, (_Gap, bytes), fill)


def wait_for(started: Iterable[dist.Work]) -> None:
    """Wait until transfers are done.

    Args:
        started: The transfers.
    """
    for work in started:
        work.wait()
