"""A backend of torch.distributed that lets several ranks share one GPU by staging their tensors through Gloo.

NCCL refuses two ranks on one GPU, and Gloo cannot send GPU tensors between ranks. Like NCCL and unlike Gloo, the
backend accepts only contiguous tensors on the device, and only if all ranks make the same collective call with the same
sizes. Anything it rejects, on the CPU too, would fail or hang on a host with more GPUs. Unlike NCCL, collective calls
block until they are done; only ``send`` and ``recv`` are asynchronous.

Importing this module registers the backend under the name ``staged``.
"""

from __future__ import annotations

import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.futures import Future

NAME = "staged"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _checked(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        if tensor.device.type != DEVICE:
            raise RuntimeError(f"The backend {NAME} sends tensors on {DEVICE}, but this one is on {tensor.device}.")
        if not tensor.is_contiguous():
            raise RuntimeError(f"Tensors must be contiguous, but this one of shape {list(tensor.shape)} is not.")


def _to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    _checked(tensors)
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]


def _fill(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.detach().copy_(value)


def _done(result: Any) -> dist.Work:
    if DEVICE == "cuda":
        torch.cuda.current_stream().synchronize()
    future: Future[Any] = Future()
    future.set_result(result)
    work: dist.Work = c10d._create_work_from_future(future)
    return work


class _FromSelf(dist.Work):  # type: ignore[misc]
    """The receipt of a tensor that this rank sends to itself, maybe later."""

    def __init__(self, take: Callable[[], None]) -> None:
        super().__init__()
        self._take: Callable[[], None] | None = take

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self._take is not None:
            self._take()
            self._take = None
        return True


class _Transfer(dist.Work):  # type: ignore[misc]
    """A transfer in progress, which keeps the memory of its tensor alive until it is done."""

    def __init__(self, work: dist.Work, staged: list[Tensor], finish: Callable[[], None]) -> None:
        super().__init__()
        self._work, self._staged, self._finish = work, staged, finish
        self._is_done = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if not self._is_done:
            self._work.wait()
            self._finish()
            self._is_done = True
        return True

    def is_completed(self) -> bool:
        return bool(self._is_done or self._work.is_completed())


class Staged(dist.ProcessGroup):
    """A process group that sends through a Gloo group."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        # Tensors that this rank has sent to itself, by tag.
        self._own: defaultdict[int, deque[list[Tensor]]] = defaultdict(deque)

    def size(self) -> int:
        return int(self._gloo.size())

    def getBackendName(self) -> str:  # noqa: N802  # torch calls it
        return NAME

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(DEVICE)]

    def _get_backend(self, _device: torch.device) -> Staged:
        return self

    # Attributes of a backend: this class acts as its own backend.
    supports_coalescing = False
    supports_splitting = False

    @property
    def pg_name(self) -> str:
        return str(dist.distributed_c10d._world.pg_names[self])

    @property
    def group_name(self) -> str:
        return self.pg_name

    def _agree(self, call: str, tensors: Sequence[Tensor] = ()) -> None:
        """Raise unless all ranks make the same call: NCCL would hang, or mix up the data of two calls."""
        own = f"{call} {[(list(tensor.shape), str(tensor.dtype)) for tensor in tensors]}"
        code = torch.tensor([zlib.crc32(own.encode())])
        codes = [torch.empty_like(code) for _ in range(self.size())]
        self._gloo.allgather([codes], [code], c10d.AllgatherOptions()).wait()
        if any(int(other) != int(code) for other in codes):
            raise RuntimeError(f"Rank {self.rank()} of {self.size()} calls {own}, but not all others do.")

    def _in_place(self, call: Any, tensors: list[Tensor], opts: Any) -> dist.Work:
        self._agree(call.__name__, tensors)
        staged = _to_host(tensors)
        call(staged, opts).wait()
        _fill(tensors, staged)
        return _done(tensors)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        self._agree("allreduce", tensors)
        opts = opts or c10d.AllreduceOptions()
        staged = _to_host(tensors)
        is_mean = opts.reduceOp == dist.ReduceOp.AVG  # which Gloo lacks
        if is_mean:
            opts.reduceOp = dist.ReduceOp.SUM
        for tensor in staged:
            self._gloo.allreduce([tensor], opts).wait()
            if is_mean:
                # NCCL truncates the mean of integers.
                tensor.div_(self.size(), rounding_mode=None if tensor.is_floating_point() else "trunc")
        _fill(tensors, staged)
        return _done(tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        plain = c10d.AllreduceOptions()
        if opts is not None:
            plain.reduceOp = opts.reduceOp
        return self.allreduce(tensors, plain)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._in_place(self._gloo.broadcast, tensors, opts or c10d.BroadcastOptions())

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._in_place(self._gloo.reduce, tensors, opts or c10d.ReduceOptions())

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        self._agree("allgather", inputs)
        staged = [_to_host(output) for output in outputs]
        self._gloo.allgather(staged, _to_host(inputs), c10d.AllgatherOptions()).wait()
        for output, values in zip(outputs, staged, strict=True):
            _fill(output, values)
        return _done(outputs)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        self._agree("gather", inputs)
        staged = [_to_host(output) for output in outputs]
        self._gloo.gather(staged, _to_host(inputs), opts or c10d.GatherOptions()).wait()
        for output, values in zip(outputs, staged, strict=True):
            _fill(output, values)
        return _done(outputs)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        self._agree("scatter", outputs)
        staged = _to_host(outputs)
        self._gloo.scatter(staged, [_to_host(values) for values in inputs], opts or c10d.ScatterOptions()).wait()
        _fill(outputs, staged)
        return _done(outputs)

    def _allgather_base(self, output: Tensor, own: Tensor, opts: Any = None) -> dist.Work:
        _checked([output, own])
        return self.allgather([list(output.view(self.size(), -1).unbind())], [own.view(-1)])

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        for output, own in zip(outputs, inputs, strict=True):
            self._allgather_base(output, own)
        return _done(outputs)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        for output, values in zip(outputs, inputs, strict=True):
            _checked([output])
            reduction = c10d.AllreduceOptions()
            if opts is not None:
                reduction.reduceOp = opts.reduceOp
            everything = torch.stack([value.reshape(-1) for value in values])
            self.allreduce([everything], reduction)
            output.detach().copy_(everything[self.rank()].view_as(output))
        return _done(outputs)

    def _reduce_scatter_base(self, output: Tensor, own: Tensor, opts: Any = None) -> dist.Work:
        _checked([output, own])
        return self.reduce_scatter([output.view(-1)], [list(own.view(self.size(), -1).unbind())], opts)

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        for output, own in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, own, opts)
        return _done(outputs)

    def alltoall_base(
        self, output: Tensor, own: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> dist.Work:
        self._agree("alltoall")
        staged, sent = _to_host([output, own])
        self._gloo.alltoall_base(staged, sent, output_sizes, input_sizes, c10d.AllToAllOptions()).wait()
        _fill([output], [staged])
        return _done([output])

    # The names that torch calls since 2.14.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    def barrier(self, opts: Any = None) -> dist.Work:
        self._agree("barrier")
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        self._gloo.barrier().wait()
        return _done([])

    def send(self, tensors: list[Tensor], target: int, tag: int = 0) -> dist.Work:
        staged = _to_host(tensors)
        if target == self.rank():  # Gloo does not connect a rank to itself
            self._own[tag].append(staged)
            return _done([])
        return _Transfer(self._gloo.send(staged, target, tag), staged, lambda: None)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> dist.Work:
        if source == self.rank():
            return _FromSelf(lambda: _fill(tensors, self._own[tag].popleft()))
        staged = _to_host(tensors)
        work = self._gloo.recv(staged, source, tag)
        return _Transfer(work, staged, lambda: _fill(tensors, staged))


dist.Backend.register_backend(NAME, Staged, devices=[DEVICE])
