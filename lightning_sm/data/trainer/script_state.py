"""The globals and class attributes of the script: data hosts do not see what it changes after its first run."""

from __future__ import annotations

import dis
import logging
import os
import reprlib
import site
import sys
import sysconfig
import weakref
from argparse import Namespace
from collections.abc import Iterator
from functools import cache
from inspect import isdatadescriptor, ismethoddescriptor
from pathlib import Path
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from lightning_sm._lightning import LightningDataModule, LightningModule, Trainer
from lightning_sm.data.host.generators import reachable
from lightning_sm.data.protocol.plain_values import plain_json
from lightning_sm.errors import DataSettingsError

logger = logging.getLogger(__name__)

# Objects whose attributes are settings, each by itself.
_NAMESPACES = (Namespace, SimpleNamespace)
_CODE = (type, FunctionType, ModuleType, staticmethod, classmethod, property)

_ABSENT = object()

# Where Python and its packages are. The modules elsewhere are the user's.
_INSTALLED = tuple(
    Path(path).resolve()
    for path in (*map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")), *site.getsitepackages())
)


class _Read(NamedTuple):
    """A name that code reads beside the attributes of its object."""

    holder: Any  # a module, a class or a namespace
    path: str
    name: str


class _Known:
    """What is kept of a value in order to see a change."""

    def __init__(self, value: Any) -> None:
        self.text = reprlib.repr(value)
        self._plain = plain_json(value)
        try:
            self._get: Any = weakref.ref(value)
        except TypeError:
            self._get = lambda: value

    def is_replaced(self, value: Any) -> bool:
        """Return whether there is another value in its place, not an equal one."""
        return self._get() is not value and (self._plain is None or self._plain != plain_json(value))

    def is_changed(self, value: Any) -> bool:
        """Return whether it is the same list or dict with other items."""
        return self._get() is value and self._plain != plain_json(value)


class ScriptState:
    """The globals and class attributes of the user's modules, as they are when the script begins its first run."""

    def __init__(self) -> None:
        # The holders are kept, so that no other objects get their ids.
        self._holders = {id(holder): holder for module in _user_modules() for holder in _holders_in(module)}
        self._values = {
            (number, name): _Known(value)
            for number, holder in self._holders.items()
            for name, value in list(vars(holder).items())
            if _is_state(name, value)
        }
        self._warned: set[tuple[int, str]] = set()

    def check(self, datamodule: LightningDataModule) -> None:
        """Check that what the code of a DataModule reads beside its own attributes is as it was.

        Args:
            datamodule: The DataModule.

        Raises:
            DataSettingsError: The script has replaced a global, or an attribute of a class or namespace.
        """
        for read in _reads(datamodule):
            value = vars(read.holder).get(read.name, _ABSENT)
            # The classes and modules that are new travel by value, or data hosts say that they lack them.
            is_known = id(read.holder) in self._holders or type(read.holder) in _NAMESPACES
            if value is _ABSENT or not is_known or not _is_state(read.name, value):
                continue
            place = id(read.holder), read.name
            before = self._values.get(place)
            text = (
                f"{read.path}.{read.name}, which the code of {type(datamodule).__name__} reads, was "
                f"{'not set' if before is None else before.text} when the script began its first run of a Trainer, and "
                f"is {reprlib.repr(value)} now. Data hosts run the script up to its first run, and do not see this. "
                "Give the value to the DataModule as an attribute, which they get."
            )
            if before is None or before.is_replaced(value):
                raise DataSettingsError(text)
            if before.is_changed(value) and place not in self._warned:
                # It may be a cache, which is filled on data hosts as well.
                self._warned.add(place)
                logger.warning("%s If it is a cache, this does not matter.", text)


@cache
def state_at_first_run() -> ScriptState:
    """Return the state of the script at the first call of this function, which is where data hosts begin to wait."""
    return ScriptState()


def _user_modules() -> list[ModuleType]:
    return [module for name, module in list(sys.modules.items()) if _is_users(name)]


def _is_users(name: str) -> bool:
    """Return whether a module is the user's: the script, or a file that belongs to no installed package."""
    if name == "__main__":
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    return (
        isinstance(file, str) and name.partition(".")[0] != "lightning_sm" and not _is_installed(os.path.dirname(file))
    )


@cache
def _is_installed(folder: str) -> bool:
    # By folder: to resolve the links of thousands of files would take 0.1 s at the start of each rank.
    path = Path(folder).resolve()
    return any(path.is_relative_to(installed) for installed in _INSTALLED)


def _holders_in(module: ModuleType) -> Iterator[Any]:
    """Yield a module, and the classes and namespaces that are its globals."""
    yield module
    for value in list(vars(module).values()):
        if type(value) in _NAMESPACES or (isinstance(value, type) and _is_users(value.__module__)):
            yield value


def _is_state(name: str, value: Any) -> bool:
    """Return whether a name holds a value, and no code."""
    is_code = isinstance(value, _CODE) or isdatadescriptor(value) or ismethoddescriptor(value)
    return not (is_code or name.startswith("__") or type(value) in _NAMESPACES)


def _reads(datamodule: LightningDataModule) -> Iterator[_Read]:
    reads, own = dict[tuple[int, str], _Read](), set[tuple[int, str]]()
    classes = set[type]()
    for item in reachable(datamodule, leaves=(Trainer, LightningModule)):
        classes.update(item.__mro__ if isinstance(item, type) else type(item).__mro__)
        module = sys.modules.get(item.__module__) if isinstance(item, FunctionType) else None
        if module is None or not _is_users(module.__name__) or item.__globals__ is not vars(module):
            continue
        for code in _codes(item.__code__):
            reads.update(((id(read.holder), read.name), read) for read in _reads_in(code, module))
            own.update((id(module), name) for name in _globals_in(code, "STORE_GLOBAL"))
    for cls in classes:
        if _is_users(cls.__module__):
            reads.update(((id(cls), name), _Read(cls, cls.__qualname__, name)) for name in list(vars(cls)))
    # What this code sets by itself, it sets on data hosts, too.
    return (read for place, read in reads.items() if place not in own)


def _reads_in(code: CodeType, module: ModuleType) -> Iterator[_Read]:
    for name in _globals_in(code, "LOAD_GLOBAL"):
        value = vars(module).get(name)
        if isinstance(value, ModuleType) and _is_users(value.__name__):
            yield from (_Read(value, value.__name__, each) for each in code.co_names)
        elif type(value) in _NAMESPACES:
            yield from (_Read(value, f"{module.__name__}.{name}", each) for each in code.co_names)
        else:
            yield _Read(module, module.__name__, name)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


@cache
def _globals_in(code: CodeType, operation: str) -> frozenset[str]:
    return frozenset(str(each.argval) for each in dis.get_instructions(code) if each.opname == operation)
