"""The description of a job file's keys: what the reader checks, the help lists and the reference shows.

A section of the file is a dataclass whose fields are ``Annotated`` with a ``JobKey``.
"""

from __future__ import annotations

import dataclasses
import json
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple, TypeGuard, Union, get_args, get_origin, get_type_hints

from lightning_sm._text import closest

# In the path of a key: any name that the user chooses.
ANY_NAME = "NAME"


@dataclass(frozen=True)
class JobKey:
    """What people need to know about a key.

    Attributes:
        meaning: What it is for, in one or two sentences.
        example: A value, as in the file.
        near: Names that the SDKs, the API and other tools have for it.
        least: Smallest number that is allowed.
        unit: Unit of a number.
    """

    meaning: str
    example: str = ""
    near: tuple[str, ...] = ()
    least: float | None = None
    unit: str = ""


@dataclass(frozen=True)
class KeyField:
    """A key of a section.

    Attributes:
        name: The key.
        kind: The type of its values.
        about: What people need to know about it.
        default: The value without the key; ``dataclasses.MISSING`` for a required key.
    """

    name: str
    kind: Any
    about: JobKey
    default: Any

    @property
    def is_required(self) -> bool:
        """Whether a job needs it."""
        return self.default is dataclasses.MISSING


class KeyPath(NamedTuple):
    """A key anywhere in the file.

    Attributes:
        parts: The keys on the way to it, and its own; ``ANY_NAME`` for names that users choose.
        field: The key.
    """

    parts: tuple[str, ...]
    field: KeyField


@cache
def keys_of(section: type) -> Mapping[str, KeyField]:
    """Return the keys of a section by name, in the order of the class."""
    hints = get_type_hints(section, include_extras=True)
    found: dict[str, KeyField] = {}
    for one in dataclasses.fields(section):
        annotations = getattr(hints[one.name], "__metadata__", ())
        about = next((note for note in annotations if isinstance(note, JobKey)), None)
        if about is not None:
            made = one.default_factory
            default = one.default if made is dataclasses.MISSING else made()
            found[one.name] = KeyField(one.name, get_args(hints[one.name])[0], about, default)
    return found


@cache
def all_keys(section: type) -> tuple[KeyPath, ...]:
    """Return the keys of a section and of all sections below it."""
    return tuple(_below(section, ()))


def _below(section: type, parts: tuple[str, ...]) -> Iterator[KeyPath]:
    for name, field in keys_of(section).items():
        path = (*parts, name)
        yield KeyPath(path, field)
        kind = without_none(field.kind)
        if is_section(kind):
            yield from _below(kind, path)
        elif get_origin(kind) is dict and is_section(get_args(kind)[1]):
            yield from _below(get_args(kind)[1], (*path, ANY_NAME))


def is_section(kind: Any) -> TypeGuard[type]:
    """Return whether values of a type have keys of their own."""
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def without_none(kind: Any) -> Any:
    """Return a type without its None, which stands for a key that is left out."""
    if get_origin(kind) not in {types.UnionType, Union}:
        return kind
    others = [one for one in get_args(kind) if one is not type(None)]
    return others[0] if len(others) == 1 else Union[tuple(others)]  # noqa: UP007 - of a number that varies


def expected(field_kind: Any, about: JobKey) -> str:
    """Say in words what values a type has."""
    kind = without_none(field_kind)
    if get_origin(kind) is Literal:
        *others, last = map(str, get_args(kind))
        return f"{', '.join(others)} or {last}"
    of_unit = f" of {about.unit}" if about.unit else ""
    if kind is int:
        return f"a whole number{of_unit}"
    if kind is float or get_origin(kind) in {types.UnionType, Union}:
        return f"a number{of_unit}"
    if kind is bool:
        return "true or false"
    origin = get_origin(kind) or kind
    if origin is list:
        return "a list"
    return "names with values" if origin is dict else "keys with values" if is_section(kind) else "text"


def shown_default(value: Any) -> str:
    """Return a default as it would be written in a job file."""
    return str(value) if isinstance(value, str) else json.dumps(value)


def suggestion(name: str, section: type, root: type, option: str = "") -> tuple[str, str | None]:
    """Say which key was probably meant by an unknown one.

    Args:
        name: The unknown key.
        section: The section that it is in.
        root: The section of the whole file.
        option: What stands before a key where it is an option: two dashes.

    Returns:
        A sentence, with a space before it, or an empty text; and the key of the section that is meant, if it is one.
    """
    word = _plain(name)
    own = keys_of(section)
    meant = next((one.name for one in own.values() if word in _names(one)), None)
    paths = [path for path in all_keys(root) if word in _names(path.field)]
    if meant is None and not paths:
        meant = closest(word, own)
    if meant is not None:
        return f" Did you mean {option}{meant}, as in {meant}: {own[meant].about.example}?", meant
    if not paths:
        return ("" if section is root else f" The keys here are {', '.join(own)}."), None
    parts = paths[0].parts
    return f" Did you mean {option}{'.'.join(parts)}, as in {parts[0]}: {keys_of(root)[parts[0]].about.example}?", None


def _names(field: KeyField) -> set[str]:
    return {field.name, *field.about.near}


def _plain(name: str) -> str:
    """Return a name as keys are written: ``MaxWaitTimeInSeconds`` and ``max-wait-time-in-seconds`` with underscores."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").replace(" ", "_").lower()
