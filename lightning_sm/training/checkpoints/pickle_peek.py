"""Reading of pickles without running any code, neither of the file nor of the classes that it names.

``pickle.load`` and ``torch.load(weights_only=False)`` call whatever a file asks them to call. Here, each such call
yields an object that does nothing; plain values (dicts, lists, numbers, texts) are read as they are.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# torch.save writes the pickle under this name, below a folder with any name; tensors are in other entries.
_PICKLE = "data.pkl"


class Inert:
    """A stand-in for an object of any class, with the attributes that were saved."""

    def __new__(cls, *_: Any, **__: Any) -> Inert:
        """Ignore the arguments."""
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        """Ignore the arguments."""

    def __call__(self, *_: Any, **__: Any) -> Inert:
        """Stand for the result of a function, too."""
        return self

    def __setstate__(self, state: Any) -> None:
        """Keep the attributes; ignore a state of another form."""
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
    """Return the value of a pickle, with an ``Inert`` in place of each object that is not a plain value.

    Raises:
        Exception: Of any type, if the data is not a pickle.
    """
    return _InertUnpickler(io.BytesIO(data)).load()


def inert_checkpoint(file: Path) -> Any:
    """Return what ``torch.save`` wrote into a file, as ``inert_pickle`` does; the tensors are not read.

    Raises:
        Exception: Of any type, if the file cannot be read, or ``torch.save`` has not written it.
    """
    with zipfile.ZipFile(file) as archive:
        (name,) = (name for name in archive.namelist() if name.rpartition("/")[2] == _PICKLE)
        return inert_pickle(archive.read(name))
