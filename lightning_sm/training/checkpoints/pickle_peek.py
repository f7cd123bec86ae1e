"""Reading pickles without running any code from the file or from the classes that it names.

``pickle.load`` and ``torch.load(weights_only=False)`` call whatever a file asks them to call. Here, each such call
returns an inert object. Plain values (dicts, lists, numbers, strings) are read unchanged.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# torch.save writes the pickle under this name, in a folder with any name; tensors are in other entries.
_PICKLE = "data.pkl"


class Inert:
    """A stand-in for an object of any class, with the attributes that were saved."""

    def __new__(cls, *_: Any, **__: Any) -> Inert:
        """Ignore the arguments."""
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        """Ignore the arguments."""

    def __call__(self, *_: Any, **__: Any) -> Inert:
        """Return self as the result of any call."""
        return self

    def __setstate__(self, state: Any) -> None:
        """Set the attributes from a mapping; ignore any other state."""
        if isinstance(state, Mapping):
            vars(self).update({name: value for name, value in state.items() if isinstance(name, str)})

    def __setitem__(self, _key: Any, _value: Any) -> None:
        """Ignore the item of a mapping."""

    def append(self, _item: Any) -> None:
        """Ignore the item of a list."""

    add = append
    extend = append


class _InertUnpickler(pickle.Unpickler):
    def find_class(self, _module: str, _name: str) -> Any:
        return Inert

    def persistent_load(self, _pid: Any) -> Inert:
        return Inert()


def inert_pickle(data: bytes) -> Any:
    """Unpickle a value, with an ``Inert`` in place of each object that is not a plain value.

    Raises:
        Exception: The data is not a pickle. Any type of exception is possible.
    """
    return _InertUnpickler(io.BytesIO(data)).load()


def inert_checkpoint(file: Path) -> Any:
    """Return the contents of a ``torch.save`` file, as ``inert_pickle`` does, without reading the tensors.

    Raises:
        Exception: Of any type, if the file cannot be read, or was not written by ``torch.save``.
    """
    with zipfile.ZipFile(file) as archive:
        (name,) = (name for name in archive.namelist() if name.rpartition("/")[2] == _PICKLE)
        return inert_pickle(archive.read(name))
