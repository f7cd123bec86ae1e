"""The dataclass fields that describe the keys of a job file for the reader, the help text and the reference.

Each section of the file is a dataclass whose fields are created by ``key``.
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

# In the path of a key, stands for any name that the user chooses.
ANY_NAME = "NAME"
_KINDS = {int: "a whole number", float: "a number", str: "text", list: "a list", dict: "names with values"}


@dataclass(frozen=True)
class JobKey:
    """The documentation of a key.

    Attributes:
        meaning: Its purpose, in one or two sentences.
        example: An example of its value, as in the file.
        near: Its names in the SDKs, the API and other tools.
        least: Smallest number allowed.
        unit: Unit of a number.
    """

    meaning: str
    example: str
    near: tuple[str, ...] = ()
    least: float | None = None
    unit: str = ""


@dataclass(frozen=True)
class KeyField:
    """A key of a section.

    Attributes:
        name: The key.
        kind: The type of its values, without the None that stands for a missing key.
        about: Its documentation.
        default: The value if the key is missing; ``dataclasses.MISSING`` for a required key.
    """

    name: str
    kind: Any
    about: JobKey
    default: Any

    @property
    def is_required(self) -> bool:
        """Whether a job needs the key."""
        return self.default is dataclasses.MISSING

    @property
    def shown_example(self) -> str:
        """The key with an example of its value."""
        return f"{self.name}: {self.about.example}"


class KeyPath(NamedTuple):
    """A key anywhere in the file.

    Attributes:
        parts: The names from the top level to the key; ``ANY_NAME`` for names that users choose.
        field: The key.
    """

    parts: tuple[str, ...]
    field: KeyField


@cache
def keys_of(section: type) -> Mapping[str, KeyField]:
    """Return the keys of a section by name, in the order of their definition."""
    hints = get_type_hints(section)
    keys: dict[str, KeyField] = {}
    for field in dataclasses.fields(section):
        about = field.metadata.get("about")
        if about is not None:
            factory = field.default_factory
            default = field.default if factory is dataclasses.MISSING else factory()
            keys[field.name] = KeyField(field.name, _without_none(hints[field.name]), about, default)
    return keys


@cache
def all_keys(section: type) -> tuple[KeyPath, ...]:
    """Return the keys of a section and of all sections below it."""
    return tuple(_below(section, ()))


def _below(section: type, parts: tuple[str, ...]) -> Iterator[KeyPath]:
    for name, field in keys_of(section).items():
        path = (*parts, name)
        yield KeyPath(path, field)
        if is_section(field.kind):
            yield from _below(field.kind, path)
        elif get_origin(field.kind) is dict and is_section(get_args(field.kind)[1]):
            yield from _below(get_args(field.kind)[1], (*path, ANY_NAME))


def is_section(kind: Any) -> TypeGuard[type]:
    """Return whether a type is a section, which consists of keys."""
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def expected(kind: Any, unit: str) -> str:
    """Describe the values that a type allows, for messages."""
    if get_origin(kind) is Literal:
        *others, last = get_args(kind)
        return f"{', '.join(others)} or {last}"
    words = "keys with values" if is_section(kind) else _KINDS[get_origin(kind) or kind]
    return f"{words} of {unit}" if unit else words


def shown_default(value: Any) -> str:
    """Return a default value as written in a job file."""
    return str(value) if isinstance(value, str) else json.dumps(value)


def suggestion(name: str, section: type, root: type, option: str = "") -> str:
    """Return a sentence, with a leading space, that suggests a key instead of an unknown one; empty if none is similar.

    Args:
        name: The unknown key.
        section: The section that contains it.
        root: The section of the whole file.
        option: Prefix of the suggested key: ``--`` on the command line.
    """
    # Turn MaxWaitTimeInSeconds and max-wait-time-in-seconds into snake case.
    word = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[- ]", "_", name).lower()
    for around in (section, root):
        for path in all_keys(around):
            if word == path.field.name or word in path.field.about.near:
                return _hint(path.parts, around, option)
    close = closest(word, keys_of(section))
    if close is not None:
        return _hint((close,), section, option)
    return "" if section is root else f" The keys here are {', '.join(keys_of(section))}."


def _hint(parts: tuple[str, ...], section: type, option: str) -> str:
    return f" Did you mean {option}{'.'.join(parts)}, as in {keys_of(section)[parts[0]].shown_example}?"


def _without_none(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) in {types.UnionType, Union} else kind


def key(
    meaning: str,
    example: str,
    near: tuple[str, ...] = (),
    *,
    least: float | None = None,
    unit: str = "",
    default: Any = dataclasses.MISSING,
    made: Any = dataclasses.MISSING,
) -> Any:
    """Create the field for a key, with its documentation (``JobKey``).

    Args:
        meaning: The purpose of the key, in one or two sentences.
        example: An example of its value, as in the file.
        near: Its names in the SDKs, the API and other tools.
        least: Smallest number allowed.
        unit: Unit of a number.
        default: The value if the key is missing; a key without a default is required.
        made: A function that creates the default value, used instead of ``default``.
    """
    about = JobKey(meaning, example, near, least, unit)
    return dataclasses.field(default=default, default_factory=made, metadata={"about": about})
