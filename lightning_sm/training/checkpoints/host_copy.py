"""A copy of a checkpoint in the memory of the host, which later steps do not change."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from lightning_sm._text import size
from lightning_sm.errors import CheckpointError


class HostCopy:
    """A copy of one checkpoint at a time, whose memory the next one uses again.

    Tensors of a GPU are copied by a stream of their own, into page-locked memory. Those that only an optimizer changes
    are copied while the GPU computes gradients; for all others, the GPU waits.

    Args:
        device: The device of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self._buffers: list[torch.Tensor] = []
        self._side = _SideStream(device) if device.type == "cuda" else None
        self._later: list[torch.Tensor] = []
        self._first_values: list[torch.Tensor] = []

    def take(self, checkpoint: PickledCheckpoint, changed_later: Set[int] = frozenset()) -> CopiedCheckpoint:
        """Return a copy of a checkpoint, which is complete after ``wait``.

        Args:
            checkpoint: The checkpoint.
            changed_later: Addresses (``data_ptr``) of tensors that do not change before the caller calls ``wait``.

        Raises:
            CheckpointError: The host has no memory for it.
        """
        tensors = [one for one in checkpoint.tensors if _is_strided(one)]
        changed_now = [one for one in tensors if one.data_ptr() not in changed_later]
        if self._side is not None:
            self._later = [one for one in tensors if one.is_cuda and one.data_ptr() in changed_later]
            self._first_values = first_values(self._later)
        buffers = iter(self._buffers)
        copies: dict[Any, torch.Tensor] = {}
        if self._side is not None:
            self._side.begin()
        self._copy(changed_now, copies, buffers)
        if self._side is not None:
            self._side.let_gpu_wait()
        self._copy(tensors, copies, buffers)
        if self._side is not None:
            self._side.end()
        self._buffers = list(copies.values())
        copied = [copies[_place(one)] if _is_strided(one) else one.to("cpu", copy=True) for one in checkpoint.tensors]
        return CopiedCheckpoint(checkpoint.content, [*zip(copied, checkpoint.needs_gradients, strict=True)])

    def wait(self) -> float:
        """Wait until the copy is complete; return how many seconds the GPU has copied, 0 without a GPU."""
        return 0.0 if self._side is None else self._side.wait()

    def is_intact(self) -> bool:
        """Return whether the tensors that should have changed later are still those of the copy; call it once."""
        later, self._later = self._later, []
        return all(map(torch.equal, self._first_values, first_values(later)))

    def _copy(
        self, tensors: Sequence[torch.Tensor], copies: dict[Any, torch.Tensor], buffers: Iterator[torch.Tensor]
    ) -> None:
        for tensor in tensors:
            place = _place(tensor)
            if place in copies:  # of weights that layers share
                continue
            copies[place] = buffer = _fitting(tensor, next(buffers, None))
            if self._side is None or not tensor.is_cuda:
                buffer.copy_(tensor.detach())
            else:
                self._side.copy(tensor.detach(), buffer)


@dataclass(frozen=True)
class PickledCheckpoint:
    """A checkpoint, of which all but the tensors is that of its moment.

    Attributes:
        content: It, pickled, with a number in place of each tensor. The Trainer goes on changing its lists and dicts.
        tensors: For each number, the tensor.
        needs_gradients: For each number, whether the tensor requires gradients.
    """

    content: bytes
    tensors: Sequence[torch.Tensor]
    needs_gradients: Sequence[bool]

    @classmethod
    def of(cls, checkpoint: dict[str, Any]) -> PickledCheckpoint:
        """Pickle a checkpoint.

        Args:
            checkpoint: The checkpoint, which may hold any object that ``torch.save`` accepts.
        """
        content = io.BytesIO()
        pickler = _CheckpointPickler(content)
        pickler.dump(checkpoint)
        return cls(content.getvalue(), pickler.tensors, [one.requires_grad for one in pickler.tensors])


@dataclass(frozen=True)
class CopiedCheckpoint:
    """A copy of a checkpoint.

    Attributes:
        content: It, pickled, with a number in place of each tensor.
        tensors: For each number, the copy of a tensor, and whether it requires gradients.
    """

    content: bytes
    tensors: Sequence[tuple[torch.Tensor, bool]]

    @property
    def num_bytes(self) -> int:
        """The bytes of its tensors."""
        return sum(one.nbytes for one, _ in self.tensors)

    def load(self) -> dict[str, Any]:
        """Return the checkpoint, with the copied tensors."""
        checkpoint: dict[str, Any] = _CheckpointUnpickler(io.BytesIO(self.content), self.tensors).load()
        return checkpoint


class _CheckpointPickler(pickle.Pickler):
    """A pickler that leaves tensors out, wherever they are: hyperparameters may hold a whole model on a GPU."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, value: Any) -> int | None:
        """Return the number of a tensor; None for any other object, which is pickled."""
        if type(value) is not torch.Tensor:  # parameters and the like are pickled as objects with tensors in them
            return None
        self.tensors.append(value)
        return len(self.tensors) - 1


class _CheckpointUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[tuple[torch.Tensor, bool]]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, number: int) -> torch.Tensor:
        tensor, requires_grad = self._tensors[number]
        return tensor.detach().requires_grad_(requires_grad)


class _SideStream:
    """A stream of a GPU that copies beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Let the copies begin when the GPU has computed what it was told so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._began.record(self._stream)

    def copy(self, tensor: torch.Tensor, buffer: torch.Tensor) -> None:
        """Copy a tensor into page-locked memory."""
        with torch.cuda.stream(self._stream):
            buffer.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)

    def let_gpu_wait(self) -> None:
        """Let what the GPU computes from now on wait for what was copied so far."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def end(self) -> None:
        """Mark the end of the copies."""
        self._ended.record(self._stream)

    def wait(self) -> float:
        """Wait for the end of the copies; return how many seconds they took."""
        self._ended.synchronize()
        return float(self._began.elapsed_time(self._ended)) / 1000


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from tensors_of(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors_of(one)


def first_values(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return one value of each tensor: an update of ``weight.data`` leaves no other trace."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for one in tensors:
        groups.setdefault((one.device, one.dtype), []).append(one.detach().reshape(-1)[:1])
    return [torch.cat(values) for values in groups.values()]


def num_bytes(value: Any) -> int:
    """Return the bytes of the tensors in dicts, lists and tuples."""
    return sum(one.nbytes for one in tensors_of(value))


def _is_strided(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is none of the rare kinds, such as sparse ones, which have memory of several parts."""
    return tensor.layout is torch.strided and not tensor.is_quantized


def _place(tensor: torch.Tensor) -> Any:
    """Return what tensors have in common that are the same memory."""
    own = id(tensor) if tensor.numel() == 0 else tensor.data_ptr()
    return tensor.device, own, tensor.shape, tensor.stride(), tensor.dtype


def _fitting(tensor: torch.Tensor, buffer: torch.Tensor | None) -> torch.Tensor:
    """Return memory for a tensor: a buffer, if it fits."""
    if buffer is not None and buffer.is_pinned() == tensor.is_cuda:
        layout = (tensor.shape, tensor.stride(), tensor.dtype)
        if layout == (buffer.shape, buffer.stride(), buffer.dtype):
            return buffer
    try:
        return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
    except RuntimeError as error:
        raise CheckpointError(f"no memory for a copy of {size(tensor.nbytes)}: {error}") from error
