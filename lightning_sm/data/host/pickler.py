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
from lightning_sm.data.batch.script_classes import with_slots, without_changes
from lightning_sm.data.batch.serialization import NUMPY_DTYPES, is_plain
from lightning_sm.data.host.snapshot import ALIGNMENT, NUMBER
from lightning_sm.data.host.stand_ins import Parts
from lightning_sm.data.host.trainer_view import TrainerView
from lightning_sm.data.protocol.spec import snapshot_hash
from lightning_sm.errors import DataSettingsError

logger = logging.getLogger(__name__)

# Smaller buffers stay in the pickle: 50,000 small arrays out of band would take 50,000 entries in the header.
_MIN_OUT_OF_BAND_BYTES = 1 << 14
# Attributes with larger pickles count as data, not as mere numbers and names.
_MAX_SMALL_BYTES = 1 << 16
# Limits when searching for what cannot be pickled: steps in a path, and parts of an object.
_MAX_DEPTH = 8
_MAX_PARTS = 10_000

_FILES = (io.TextIOWrapper, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.FileIO)

_ABSENT = object()

# Length of Python's default reduced value: function, arguments, state, list items, dict items.
_LEN_BY_DEFAULT = 5


class PickledObject:
    """A pickled object, whose arrays and tensors are not copied until it is written.

    Args:
        parts: The snapshot, in parts.

    Attributes:
        digest: Hash of the contents, as 32 hexadecimal digits.
        num_bytes: Size of the snapshot in bytes.
    """

    def __init__(self, parts: Sequence[memoryview]) -> None:
        self._parts = parts
        self.num_bytes = sum(part.nbytes for part in parts)
        digest = snapshot_hash()
        for part in parts:
            digest.update(part)
        self.digest = digest.hexdigest()

    def joined(self) -> bytes:
        """Return the snapshot."""
        return b"".join(self._parts)

    def write(self) -> int:
        """Write the snapshot to anonymous memory, and return the descriptor, which the caller must close."""
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
        by_name: Whether the recipients have run this script. Its classes and functions are then pickled by name, so
            that ``isinstance`` and ``globals()`` work as they do here; otherwise, they are pickled by value.
        named: Parts of the object, by the names that the user knows, for error messages.
        advice: End of the error message, which says who gets the object and what to do.
        parts: Collects the parts that stay on this host and are not pickled, if any.

    Raises:
        DataSettingsError: Part of the object cannot be pickled.
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
    return PickledObject(_laid_out([file.getbuffer(), *(buffer.raw() for buffer in buffers)]))


def _laid_out(parts: Sequence[memoryview]) -> list[memoryview]:
    """Return the parts of a snapshot with its header and padding: ``parts_in`` finds them again."""
    sizes = [len(parts), *(part.nbytes for part in parts)]
    head = b"".join(map(NUMBER.pack, sizes))
    laid_out = [memoryview(head)]
    end = len(head)
    for part in parts:
        laid_out += [memoryview(bytes(-end % ALIGNMENT)), part]
        end += -end % ALIGNMENT + part.nbytes
    return laid_out


class Attributes(dict[str, tuple[Any, bytes | None]]):
    """The attributes of a DataModule, with pickles of the small ones (up to 64 KB, without large arrays).

    Args:
        owner: The DataModule.
        left_out: Names of attributes to leave out.
        by_name: See ``pickle_object``.
    """

    def __init__(self, owner: Any, left_out: Sequence[str], *, by_name: bool) -> None:
        self._parts = Parts({"owner": owner, "trainer": owner.trainer}, by_id=True)  # keeps the ids valid
        kept = {name: value for name, value in vars(owner).items() if name not in left_out}
        pickled = partial(_small_pickle, parts=self._parts, by_name=by_name)
        super().__init__({name: (value, pickled(value)) for name, value in kept.items()})

    def changed(self, before: Attributes) -> dict[str, tuple[Any, bytes | None]]:
        """Return the attributes that are new, were replaced, or were modified in place."""

        def is_same(name: str) -> bool:
            (old, old_pickle), (new, new_pickle) = before.get(name, (_ABSENT, None)), self[name]
            return old_pickle == new_pickle if new_pickle is not None else old is new

        return {name: item for name, item in self.items() if not is_same(name)}


def _small_pickle(value: Any, parts: Parts, *, by_name: bool) -> bytes | None:
    file, buffers = _LimitedFile(), list[pickle.PickleBuffer]()
    pickler = _PartsPickler(parts, file, buffers, by_name=by_name)
    try:
        pickler.dump(value)
    except Exception:  # noqa: BLE001  # user classes may raise anything
        return None
    return None if buffers else file.getvalue()


class _LimitedFile(io.BytesIO):
    """A file that accepts only small pickles, so that pickling a large value stops early."""

    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > _MAX_SMALL_BYTES:
            raise pickle.PicklingError("it is too large")
        return super().write(data)


@cache
def _warn_of_shared_memory() -> None:
    logger.warning(
        "A loader's dataset has a tensor in shared memory (share_memory_()), which other machines cannot see: "
        "data hosts get a copy with each iterator. Your changes reach them with the next iterator (never with "
        "persistent_workers=True), and changes by workers never come back."
    )


def _reduce_module(module: ModuleType) -> Any:
    return import_module, (module.__name__,)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no type information
    """A pickler that keeps large buffers out of band, and replaces the Trainer with a view."""

    # If a function uses "self.classes", cloudpickle mistakes the name for the module torch.classes, whose class cannot
    # be pickled.
    dispatch_table = cloudpickle.Pickler.dispatch_table.new_child({type(torch.classes): _reduce_module})

    # Whether to keep the arguments of loaders that Lightning has recorded.
    _keeps_arguments = False

    def __init__(self, file: io.BytesIO, buffers: list[pickle.PickleBuffer], *, by_name: bool) -> None:
        def takes_in_band(buffer: pickle.PickleBuffer) -> bool:
            if buffer.raw().nbytes < _MIN_OUT_OF_BAND_BYTES:
                return True
            buffers.append(buffer)
            return False

        super().__init__(file, protocol=5, buffer_callback=takes_in_band)
        self._is_by_name = by_name

    def reducer_override(self, obj: Any) -> Any:
        """Return the reduced value of an object that is not a builtin."""
        if isinstance(obj, Trainer):
            return _itself, (TrainerView.of(obj),)
        # If a file is open for reading, cloudpickle would read the rest of it into memory.
        if isinstance(obj, _FILES) and obj not in (sys.stdout, sys.stderr):
            raise pickle.PicklingError("it is an open file")
        if isinstance(obj, SynchronizedBase):
            raise pickle.PicklingError(
                "it is in shared memory, which other machines cannot see; use a plain attribute, whose value data "
                "hosts get when an iterator starts"
            )
        if isinstance(obj, torch.Tensor) and (reduced := self._reduce_tensor(obj)) is not None:
            return reduced
        if self._is_by_name and isinstance(obj, (type, FunctionType)) and _main_name(obj):
            return _main_name(obj)
        if isinstance(obj, DataLoader):
            # Leave out the iterator of persistent workers, which belongs to this process. Lightning keeps a second
            # reference to the iterator, for recreating the loader, while it watches loaders (_replace_dunder_methods):
            # within loader hooks, and forever after one of them has raised.
            kept = {
                name: value
                for name, value in vars(obj).items()
                if self._keeps_arguments or not name.startswith("__pl_")
            }
            state = {**kept, "_iterator": None}
            # Loaders with workers on data hosts have a class of ours, which also holds state of this process.
            return object.__new__, (getattr(obj, "users_class", type(obj)),), state
        if isinstance(obj, LightningModule) and _is_attached(obj):
            # A collate function that is a method of the model brings the model along.
            reduced = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            if len(reduced) == _LEN_BY_DEFAULT:
                return *reduced, partial(_restore_attached, TrainerView.of(obj.trainer))
        return with_slots(super().reducer_override(obj))

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        """Return the reduced value of a tensor, or None to leave it to torch."""
        if tensor.device.type not in ("cpu", "meta"):
            # The tensor may belong to a model that the strategy moved to the GPU. Data hosts build batches on the CPU.
            return _on_cpu(tensor).__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]  # torch's
        if tensor.is_shared():  # type: ignore[no-untyped-call]  # torch's
            _warn_of_shared_memory()
        is_simple = type(tensor) is torch.Tensor and is_plain(tensor)
        if is_simple and tensor.is_contiguous() and tensor.dtype in NUMPY_DTYPES:
            return torch.from_numpy, (tensor.numpy(),)  # NumPy pickles its memory out of band
        return None


class _PartsPickler(_Pickler):
    """A pickler that leaves parts on this host."""

    _keeps_arguments = True  # Lightning recreates some loaders from them on the trainers

    def __init__(self, parts: Parts, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parts = parts

    def reducer_override(self, obj: Any) -> Any:
        """Return the reduced value of an object that is not a builtin."""
        return without_changes(super().reducer_override(obj))

    def persistent_id(self, obj: Any) -> Any:
        """Return the id that pickle writes in place of a part."""
        return self._parts.persistent_id(obj)


_NewPickler: TypeAlias = Callable[..., _Pickler]


def _is_attached(model: LightningModule) -> bool:
    """Return whether a model is attached to a Trainer, or to the view of one on a data host."""
    try:
        return isinstance(model.trainer, (Trainer, TrainerView))
    except RuntimeError:  # "not attached to a Trainer"
        return False


def _itself(value: Any) -> Any:
    return value


def _restore_attached(trainer: Any, model: Any, state: Any) -> None:
    """Set a model's state and its Trainer, which Lightning leaves out of the state. Without one, the epoch is 0."""
    model.__setstate__(state)
    model.trainer = trainer
    if model.device.type not in ("cpu", "meta"):
        model.to("cpu")  # its tensors are on the CPU, and ``model.device`` must agree


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor, or of a parameter, on the CPU."""
    copied = tensor.detach().cpu()
    if isinstance(tensor, torch.nn.Parameter):
        copied = torch.nn.Parameter(copied, tensor.requires_grad)
    else:
        copied.requires_grad_(tensor.requires_grad)
    vars(copied).update(vars(tensor))
    return copied


def _main_name(obj: Any) -> str | None:
    """Return the qualified name of a class or function in the script, or None if the name refers to another object."""
    if obj.__module__ != "__main__":
        return None
    target: Any = sys.modules["__main__"]
    for part in obj.__qualname__.split("."):
        target = getattr(target, part, None)
    return obj.__qualname__ if target is obj else None


class _Search:
    """A search, one part at a time, for the part of an object that cannot be pickled."""

    def __init__(self, new: _NewPickler) -> None:
        self._new = new

    def culprit(self, roots: Mapping[str, Any], error: Exception) -> tuple[str, Any, Exception]:
        """Return the path to the innermost part that cannot be pickled, the part itself, and the reason.

        Args:
            roots: Objects to start from, by path.
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
        except Exception as problem:  # noqa: BLE001  # user classes may raise anything
            return problem
        return None

    def _parts_of(self, value: Any) -> Iterator[tuple[str, Any]]:
        """Yield the parts that an object's pickle includes, each with the code that reaches it."""
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
