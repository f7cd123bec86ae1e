"""Pickles objects into snapshots: sources for the data hosts, and results of hooks."""

from __future__ import annotations

import io
import logging
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from itertools import islice
from multiprocessing.sharedctypes import SynchronizedBase
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import cloudpickle
import torch
from torch.utils.data import DataLoader

from lightning_sm._lightning import LightningModule, Trainer
from lightning_sm.data.batch.pickled import NUMPY_DTYPES
from lightning_sm.data.host.parts import Parts
from lightning_sm.data.host.snapshot import ALIGNMENT, NUMBER
from lightning_sm.data.host.trainer_view import TrainerView
from lightning_sm.data.protocol.spec import snapshot_hash
from lightning_sm.errors import DataSettingsError

logger = logging.getLogger(__name__)

# Smaller pieces of memory are part of the pickle: 50,000 small arrays out of band would be 50,000 entries in the head.
_MIN_OUT_OF_BAND_BYTES = 1 << 14
# Attributes whose pickles are larger are data, rather than numbers and names.
_MAX_SMALL_BYTES = 1 << 16
# Paths to what cannot be pickled have at most so many steps.
_MAX_DEPTH = 8
_MAX_PARTS = 10_000

_FILES = (io.TextIOWrapper, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.FileIO)

_ABSENT = object()

# Of what pickle gets of an object whose class leaves it to Python: function, arguments, state, list and dict items.
_LEN_BY_DEFAULT = 5


class PickledObject:
    """A pickled object, whose arrays and tensors are not copied before it is written.

    Args:
        parts: The pickle, and the memory of arrays and tensors.

    Attributes:
        digest: Equal for equal contents, 32 hexadecimal digits.
        num_bytes: Its size as a snapshot.
    """

    def __init__(self, parts: Sequence[memoryview]) -> None:
        sizes = [len(parts), *(part.nbytes for part in parts)]
        head = b"".join(map(NUMBER.pack, sizes))
        self._parts = [memoryview(head)]
        end = len(head)
        for part in parts:
            # Padding is a part, too: the digest is that of all bytes.
            self._parts += [memoryview(bytes(-end % ALIGNMENT)), part]
            end += -end % ALIGNMENT + part.nbytes
        self._measure()

    @classmethod
    def of_snapshot(cls, snapshot: bytes) -> PickledObject:
        """Return the object whose snapshot another process has joined."""
        own = object.__new__(cls)
        own._parts = [memoryview(snapshot)]
        own._measure()
        return own

    def _measure(self) -> None:
        self.num_bytes = sum(part.nbytes for part in self._parts)
        digest = snapshot_hash()
        for part in self._parts:
            digest.update(part)
        self.digest = digest.hexdigest()

    def joined(self) -> bytes:
        """Return the snapshot."""
        return b"".join(self._parts)

    def write(self) -> int:
        """Write the snapshot to memory without a name, and return the descriptor, which the caller closes."""
        fd = os.memfd_create("lightning_sm_snapshot", os.MFD_CLOEXEC)
        try:
            for part in self._parts:
                rest = part.cast("B") if part.nbytes else part
                while rest.nbytes:  # one call writes 2 GiB at most
                    rest = rest[os.write(fd, rest) :]
        except BaseException:
            os.close(fd)
            raise
        return fd


def pickle_object(
    value: Any, *, by_name: bool, named: Mapping[str, Any], advice: str, parts: Parts | None = None
) -> PickledObject:
    """Pickle an object. A Trainer in it becomes a ``TrainerView``.

    Args:
        value: The object.
        by_name: Whether the recipients have run this script: its classes and functions are then theirs, so that
            ``isinstance`` and ``globals()`` see what they see here. Otherwise, they travel by value.
        named: Parts of the object by the names under which its user knows them, for the error.
        advice: End of the error: who gets the object, and what to do.
        parts: What is not pickled.

    Raises:
        DataSettingsError: Something in it cannot be pickled.
    """
    file = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    kind: _NewPickler = _Pickler if parts is None else partial(_PartsPickler, parts)
    new = partial(kind, by_name=by_name)
    try:
        new(file=file, buffers=buffers).dump(value)
    except Exception as error:
        path, culprit, reason = _Search(new).culprit(named, error)
        raise DataSettingsError(
            f"{path} is a {type(culprit).__name__}, which cannot be pickled: {reason}. {advice}"
        ) from error
    return PickledObject([file.getbuffer(), *(buffer.raw() for buffer in buffers)])


class Attributes(dict[str, tuple[Any, bytes | None]]):
    """The attributes of a DataModule, with the pickles of those that are small: up to 64 KB, without large arrays.

    Args:
        owner: The DataModule.
        left_out: Names of attributes that are left out.
        by_name: See ``pickle_object``.
    """

    def __init__(self, owner: Any, left_out: Sequence[str], *, by_name: bool) -> None:
        self._parts = Parts({"owner": owner, "trainer": owner.trainer}, by_id=True)  # it keeps what it tells apart
        own = {name: value for name, value in vars(owner).items() if name not in left_out}
        super().__init__(
            {name: (value, _small_pickle(value, self._parts, by_name=by_name)) for name, value in own.items()}
        )

    def changed(self, before: Attributes) -> dict[str, tuple[Any, bytes | None]]:
        """Return those that are new, have another value, or were changed."""

        def is_same(name: str) -> bool:
            (old, old_pickle), (new, new_pickle) = before.get(name, (_ABSENT, None)), self[name]
            return old_pickle == new_pickle if new_pickle is not None else old is new

        return {name: item for name, item in self.items() if not is_same(name)}


def _small_pickle(value: Any, parts: Parts, *, by_name: bool) -> bytes | None:
    file, buffers = _LimitedFile(), list[pickle.PickleBuffer]()
    pickler = _PartsPickler(parts, file, buffers, by_name=by_name)
    try:
        pickler.dump(value)
    except Exception:  # noqa: BLE001  # what the user's classes raise
        return None
    return None if buffers else file.getvalue()


class _LimitedFile(io.BytesIO):
    """A file that takes a small pickle: that of a large value ends early."""

    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > _MAX_SMALL_BYTES:
            raise pickle.PicklingError("it is too large")
        return super().write(data)


@cache
def _warn_of_shared_memory() -> None:
    logger.warning(
        "The dataset of a loader has a tensor in shared memory (share_memory_()), which other machines do not see: "
        "data hosts get a copy with each iterator. What is written to it here arrives with the next iterator, and what "
        "workers write stays there."
    )


def _reduce_module(module: ModuleType) -> Any:
    return import_module, (module.__name__,)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no type information
    """A pickler that leaves large memory out of band, and the Trainer at home."""

    # Where a function says "self.classes", cloudpickle takes it for a use of the module torch.classes, whose class it
    # does not know.
    dispatch_table = cloudpickle.Pickler.dispatch_table.new_child({type(torch.classes): _reduce_module})

    def __init__(
        self,
        file: io.BytesIO,
        buffers: list[pickle.PickleBuffer],
        *,
        by_name: bool,
        keeps_arguments: bool = False,
    ) -> None:
        def takes_in_band(buffer: pickle.PickleBuffer) -> bool:
            if buffer.raw().nbytes < _MIN_OUT_OF_BAND_BYTES:
                return True
            buffers.append(buffer)
            return False

        super().__init__(file, protocol=5, buffer_callback=takes_in_band)
        self._is_by_name = by_name
        self._keeps_arguments = keeps_arguments

    def reducer_override(self, obj: Any) -> Any:
        """Return how an object that is not built in is pickled."""
        if isinstance(obj, Trainer):
            return _itself, (TrainerView.of(obj),)
        # cloudpickle would read what is left of a file that is open for reading, into a text in memory.
        if isinstance(obj, _FILES) and obj not in (sys.stdout, sys.stderr):
            raise pickle.PicklingError("it is an open file")
        if isinstance(obj, SynchronizedBase):
            raise pickle.PicklingError(
                "it is in shared memory, which other machines do not see; with a plain attribute, data hosts get the "
                "value that it has when an iterator begins"
            )
        if isinstance(obj, torch.Tensor) and (reduced := self._reduce_tensor(obj)) is not None:
            return reduced
        if self._is_by_name and isinstance(obj, (type, FunctionType)) and _main_name(obj):
            return _main_name(obj)
        if isinstance(obj, DataLoader):
            # An iterator, of a loader with persistent workers, belongs to this process. Lightning keeps it a second
            # time, to make the loader again, if it watches loaders at that moment: within the hooks for loaders, and
            # for ever once one of them has raised (_replace_dunder_methods).
            kept = {
                name: value
                for name, value in vars(obj).items()
                if self._keeps_arguments or not name.startswith("__pl_")
            }
            state = {**kept, "_iterator": None}
            # A loader with workers on data hosts has a class of ours, with what belongs to this process, too.
            return object.__new__, (getattr(obj, "users_class", type(obj)),), state
        if isinstance(obj, LightningModule) and _is_attached(obj):
            # A collate function of the model brings it along.
            reduced = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            if len(reduced) == _LEN_BY_DEFAULT:
                return *reduced, partial(_restore_attached, TrainerView.of(obj.trainer))
        return super().reducer_override(obj)

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        """Return how a tensor is pickled; None: as torch does it."""
        if tensor.device.type not in ("cpu", "meta"):
            # Of a model that the strategy has moved to the GPU, for example: data hosts build batches on the CPU.
            return _on_cpu(tensor).__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]  # torch's
        if tensor.is_shared():  # type: ignore[no-untyped-call]  # torch's
            _warn_of_shared_memory()
        if _is_plain_tensor(tensor):
            return torch.from_numpy, (tensor.numpy(),)  # NumPy pickles its memory out of band
        return None


class _PartsPickler(_Pickler):
    """A pickler that leaves parts where they are."""

    def __init__(
        self, parts: Parts, file: io.BytesIO, buffers: list[pickle.PickleBuffer], *args: Any, **kwargs: Any
    ) -> None:
        # The trainers' Lightning makes some loaders again, from the arguments that it has recorded.
        super().__init__(file, buffers, *args, keeps_arguments=True, **kwargs)
        self._parts = parts

    def persistent_id(self, obj: Any) -> Any:
        """Return what stands in place of a part."""
        return self._parts.persistent_id(obj)


_NewPickler: TypeAlias = Callable[..., _Pickler]


def _is_attached(model: LightningModule) -> bool:
    """Return whether a model knows the Trainer, here or on a data host."""
    try:
        return isinstance(model.trainer, (Trainer, TrainerView))
    except RuntimeError:  # "not attached to a Trainer"
        return False


def _itself(value: Any) -> Any:
    return value


def _restore_attached(trainer: Any, model: Any, state: Any) -> None:
    """Set the state of a model, and its Trainer, which Lightning leaves out of the state: its epoch would be 0."""
    model.__setstate__(state)
    model.trainer = trainer
    if model.device.type not in ("cpu", "meta"):
        model.to("cpu")  # its tensors are there; what it says of its device must not differ


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor, or of a parameter, on the CPU."""
    copied = tensor.detach().cpu()
    if isinstance(tensor, torch.nn.Parameter):
        copied = torch.nn.Parameter(copied, tensor.requires_grad)
    else:
        copied.requires_grad_(tensor.requires_grad)
    vars(copied).update(vars(tensor))
    return copied


def _is_plain_tensor(tensor: torch.Tensor) -> bool:
    """Return whether NumPy can express everything about a tensor."""
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.dtype in NUMPY_DTYPES
        and tensor.is_contiguous()
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or vars(tensor))
    )


def _main_name(obj: Any) -> str | None:
    """Return the name of a class or function of the script, if the script has it under that name."""
    if obj.__module__ != "__main__":
        return None
    found: Any = sys.modules["__main__"]
    for part in obj.__qualname__.split("."):
        found = getattr(found, part, None)
    return obj.__qualname__ if found is obj else None


class _Search:
    """The search for what cannot be pickled, by trying out the parts of objects."""

    def __init__(self, new: _NewPickler) -> None:
        self._new = new

    def culprit(self, roots: Mapping[str, Any], error: Exception) -> tuple[str, Any, Exception]:
        """Return the path to the innermost part that cannot be pickled, the part, and why.

        Args:
            roots: Where to begin, by path.
            error: What the pickler raised for all of them together.
        """
        path, culprit = "", None
        seen: set[int] = set()
        parts: Iterator[tuple[str, Any]] = iter(roots.items())
        for _ in range(_MAX_DEPTH):
            for step, part in islice(parts, _MAX_PARTS):
                if id(part) not in seen and (problem := self._problem_of(part)) is not None:
                    seen.add(id(part))
                    path, culprit, error = path + step, part, problem
                    break
            else:
                break
            parts = self._parts_of(culprit)
        return path, culprit, error

    def _problem_of(self, part: Any) -> Exception | None:
        try:
            self._new(file=io.BytesIO(), buffers=[]).dump(part)
        except Exception as problem:  # noqa: BLE001  # what the user's classes raise
            return problem
        return None

    def _parts_of(self, value: Any) -> Iterator[tuple[str, Any]]:
        """Yield the parts of an object that its pickle has, and how code reaches them."""
        if isinstance(value, SynchronizedBase):
            return
        if isinstance(value, Mapping):
            yield from ((f"[{key!r}]", item) for key, item in value.items())
        elif isinstance(value, (list, tuple, set, frozenset)):
            yield from ((f"[{number}]", item) for number, item in enumerate(value))
        if isinstance(value, MethodType):
            yield ".__self__", value.__self__
        if isinstance(value, FunctionType) and value.__closure__:
            for name, cell in zip(value.__code__.co_freevars, value.__closure__, strict=True):
                yield f" ({name} in its closure)", cell.cell_contents
        if isinstance(value, partial):
            yield ".func", value.func
            yield ".args", value.args
            yield ".keywords", value.keywords
        state = getattr(value, "__dict__", {})
        if not isinstance(value, (type, FunctionType)):
            yield from ((f".{name}", item) for name, item in state.items())
