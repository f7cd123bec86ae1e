"""Stand-ins on the trainers for datasets and loader functions that ``hooks: data`` keeps on the data hosts."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from lightning_sm.data.host.generators import reachable
from lightning_sm.data.host.snapshot import parts_in
from lightning_sm.data.host.trainer_view import TrainerView
from lightning_sm.errors import DataSettingsError

REMEDIES = (
    "Read it in setup() or in the hook, and store it in an attribute of the DataModule or the sampler, which "
    "trainers get. Or set data_service.hooks=trainers, if the trainers have the data."
)

# On a data host, the parts that stay there, by the name of the hook call and the number of the part in the call.
LEFT: dict[str, list[Any]] = {}


def part_of(call: str, number: int) -> Any:
    """Return a part that a hook call has left on this data host. Stand-ins are pickled as calls to this function.

    Raises:
        DataSettingsError: The hook call has not run here.
    """
    try:
        return LEFT[call][number]
    except KeyError as error:
        raise DataSettingsError(
            f"A loader on the trainers needs a dataset from the hook call {call}, which has not run on this data host. "
            "If the hook failed here, see the log lines above."
        ) from error


class PartStandIn:
    """A stand-in for a dataset or function that stays on the data hosts.

    Args:
        call: Name of the hook call that created the part.
        number: Number of the part in the call.
        name: Name of the dataset's class, or of the function.
        length: Length of the dataset, or None if it has no length.
        sees_trainer: Whether the part refers to the view of the Trainer, directly or indirectly.
    """

    def __init__(self, call: str, number: int, name: str, length: int | None, sees_trainer: bool) -> None:
        self._call, self._number, self._name, self._length = call, number, name, length
        self.sees_trainer = sees_trainer

    def __reduce__(self) -> Any:
        """Pickle the stand-in as a reference to the part."""
        return part_of, (self._call, self._number)

    def __getattr__(self, name: str) -> Any:
        """Raise an error that explains that trainers have only the length."""
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"{self._name}.{name} is on the data hosts, which run the DataModule's hooks (data_service.hooks): "
            f"trainers have only the length of a dataset. {REMEDIES}"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        """Raise an error, because only data hosts could use the value."""
        if "sees_trainer" not in vars(self):  # in the constructor
            return super().__setattr__(name, value)
        raise AttributeError(
            f"{self._name}.{name} cannot be set on a trainer: {self._name} is on the data hosts, which run the "
            "DataModule's hooks (data_service.hooks). Set it in the hook (reload_dataloaders_every_n_epochs runs it "
            "again), or set data_service.hooks=trainers, if the trainers have the data."
        )

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Raise an error, because only data hosts can call the function."""
        raise AttributeError(f"{self._name} is on the data hosts, and cannot be called on a trainer. {REMEDIES}")

    def __repr__(self) -> str:
        """Name the part that this object stands for."""
        return f"<{self._name} on the data hosts>"


class DatasetStandIn(PartStandIn, Dataset[Any]):
    """A stand-in for an indexed dataset."""

    def __getitem__(self, index: Any) -> Any:
        """Raise an error, because only data hosts have the samples."""
        raise AttributeError(f"The samples of {self._name} are on the data hosts, not on the trainers. {REMEDIES}")

    def __len__(self) -> int:
        """Return the length.

        Raises:
            TypeError: The dataset has no length.
        """
        if self._length is None:
            raise TypeError(f"{self._name} has no length")
        return self._length


class StreamStandIn(DatasetStandIn, IterableDataset[Any]):
    """A stand-in for an iterable dataset."""

    def __iter__(self) -> Any:
        """Raise an error, because only data hosts have the samples."""
        return self[0]


# Classes of stand-ins, by the first field of a persistent id.
_KINDS: dict[str, type[PartStandIn]] = {"dataset": DatasetStandIn, "stream": StreamStandIn, "function": PartStandIn}


class Parts:
    """The parts of a call's result that stay on this data host, collected while the result is pickled.

    Args:
        others: Objects that trainers replace with their own, such as the DataModule, by name.
        by_id: Whether to number parts by ``id()``, which distinguishes parts across pickles, instead of counting them.
    """

    def __init__(self, others: Mapping[str, Any], *, by_id: bool = False) -> None:
        self.found: list[Any] = []
        self._numbers: dict[int, int] = {}  # by id; ``found`` keeps the parts alive
        self._others = {id(value): name for name, value in others.items() if value is not None}
        self._by_id = by_id
        self._functions: set[int] = set()

    def leave_function(self, function: Any) -> None:
        """Keep a loader's function on this host, unless it belongs to torch."""
        if function is not None and not getattr(function, "__module__", "").startswith("torch."):
            self._functions.add(id(function))

    def persistent_id(self, value: Any) -> Any:
        """Return the id that pickle writes in place of an object, or None to pickle the object itself."""
        if id(value) in self._others:
            return (self._others[id(value)],)
        is_dataset = isinstance(value, Dataset) and not isinstance(value, type)
        if not is_dataset and id(value) not in self._functions:
            return None
        if id(value) not in self._numbers:
            self._numbers[id(value)] = id(value) if self._by_id else len(self.found)
            self.found.append(value)
        kind = "stream" if isinstance(value, IterableDataset) else "dataset" if is_dataset else "function"
        name = getattr(value, "__qualname__", type(value).__qualname__)
        length = length_of(value) if is_dataset else None
        sees_trainer = not self._by_id and any(isinstance(item, TrainerView) for item in reachable(value))
        return kind, self._numbers[id(value)], name, length, sees_trainer


class ResultUnpickler(pickle.Unpickler):
    """An unpickler that rebuilds the result of a hook call on a trainer.

    Args:
        data: The pickle, as returned by ``PickledObject.joined``.
        call: Name of the call.
        others: The trainer's own objects to use in the result, by name.
    """

    def __init__(self, data: bytes, call: str, others: Mapping[str, Any]) -> None:
        # Copy the data to writable memory, because user code may write to arrays.
        first, *buffers = parts_in(memoryview(bytearray(data)))
        super().__init__(io.BytesIO(first), buffers=buffers)
        self._call, self._others = call, others
        self._known: dict[int, PartStandIn] = {}

    def persistent_load(self, pid: Any) -> Any:
        """Return the stand-in for a part, or one of the trainer's own objects."""
        kind, *rest = pid
        if not rest:
            return self._others[kind]
        number, *_ = rest
        if number not in self._known:
            self._known[number] = _KINDS[kind](self._call, *rest)
        return self._known[number]


def length_of(value: Any) -> int | None:
    """Return the length of a dataset or loader, or None if it has no length."""
    size: Callable[[Any], int] = len
    try:
        return size(value)
    except (TypeError, NotImplementedError):
        return None
