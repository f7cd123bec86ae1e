"""The reference, generated from the code as Markdown: commands, variables, the job file, and the public names."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import json
import os
import re
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

from docstring_parser import parse as parse_docstring

import lightning_sm
from lightning_sm import __main__ as program
from lightning_sm.job.variables import USER_SETTINGS
from lightning_sm.submit.job_file import Job


def commands() -> str:
    """The help text of each command."""
    return "\n".join(
        f"## lightning-sm {' '.join(words)}\n\n```text\n{help_text(words).rstrip()}\n```\n" for words in command_names()
    )


def command_names() -> list[list[str]]:
    """The words of each command, those of commands within commands included."""
    return list(_below([]))


def _below(words: list[str]) -> Iterator[list[str]]:
    # A command that has others says so in its usage, whatever parses it.
    usage = help_text(words).partition("\n\n")[0]
    inner = re.search(r"\{([a-z,]+)\}\s+\.\.\.$", usage)
    if inner is None:
        yield words
        return
    for name in inner[1].split(","):
        yield from _below([*words, name])


def help_text(words: list[str]) -> str:
    """What a command prints for ``--help``, as in a terminal of 90 columns without colours."""
    shown = io.StringIO()
    before = dict(os.environ)
    os.environ |= {"COLUMNS": "90", "NO_COLOR": "1"}
    try:
        with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
            program.main([*words, "--help"])
    finally:
        os.environ.clear()
        os.environ.update(before)
    if not shown.getvalue():
        raise RuntimeError(f"lightning-sm {' '.join(words)} --help printed nothing; the log says why.")
    return shown.getvalue()


def settings() -> str:
    """A table of the environment variables that users set."""
    rows = [(f"`{one.name}`", one.default_text, one.meaning) for one in USER_SETTINGS]
    return _table(rows, ("variable", "default", "meaning"))


def job_file() -> str:
    """A table of the keys of a job file, and one for each kind of value that has keys of its own."""
    sections = []
    waiting: list[type] = [Job]
    for kind in waiting:
        documented = parse_docstring(inspect.getdoc(kind) or "")
        meanings = {one.arg_name: " ".join((one.description or "").split()) for one in documented.params}
        hints = typing.get_type_hints(kind)
        rows = []
        for one in dataclasses.fields(kind):
            waiting += [part for part in _parts(hints[one.name]) if _has_keys(part) and part not in waiting]
            rows.append((f"`{one.name}`", _type(hints[one.name]), _default(one), meanings[one.name]))
        title = "" if kind is Job else f"## {kind.__name__}\n\n"
        intro = "" if kind is Job else f"{documented.short_description}\n\n"
        sections.append(f"{title}{intro}{_table(rows, ('key', 'value', 'default', 'meaning'))}")
    return "\n".join(sections)


def python() -> str:
    """A section for each public name; Sphinx fills it with the signature and the docstring."""
    sections = []
    for name in lightning_sm.__all__:
        value = getattr(lightning_sm, name)
        if inspect.isclass(value):
            members = ", ".join(_own_members(value))
            option = f"\n   :members: {members}" if members else ""
            sections.append((name, f".. autoclass:: lightning_sm.{name}{option}"))
        elif inspect.isfunction(value):
            sections.append((name, f".. autofunction:: lightning_sm.{name}"))
    return "\n".join(f"## {name}\n\n```{{eval-rst}}\n{directive}\n```\n" for name, directive in sections)


def _own_members(kind: type) -> list[str]:
    """What a class adds. Hooks of Lightning that it overrides are documented, and called, by Lightning."""
    foreign = [base for base in kind.__mro__ if not base.__module__.startswith("lightning_sm")]
    return [
        name
        for name, value in vars(kind).items()
        if not name.startswith("_")
        and getattr(value, "__doc__", None)
        and not any(name in vars(base) for base in foreign)
    ]


def _parts(hint: Any) -> Iterator[Any]:
    yield hint
    for part in typing.get_args(hint):
        yield from _parts(part)


def _has_keys(hint: Any) -> TypeGuard[type[Any]]:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def _type(hint: Any) -> str:
    """A type in the words of a job file."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_type(one) for one in args if one is not type(None))
    if origin is typing.Literal:
        return " or ".join(f"`{one}`" for one in args)
    if origin is dict:
        return f"`{{name: value}}`, each value: {_type(args[1])}"
    if origin is list:
        return f"list, each item: {_type(args[0])}"
    if _has_keys(hint):
        return f"[{hint.__name__}](#{hint.__name__.lower()})"
    plain = {str: "text", int: "whole number", float: "number", bool: "`true` or `false`", Any: "any"}
    return plain.get(hint) or inspect.formatannotation(hint)


def _default(one: dataclasses.Field[Any]) -> str:
    if one.default_factory is not dataclasses.MISSING:
        return "none" if not one.default_factory() else "see the keys"
    if one.default is dataclasses.MISSING:
        return "**required**"
    return "none" if one.default is None else f"`{json.dumps(one.default).strip(chr(34))}`"


def _table(rows: Sequence[tuple[str, ...]], headers: tuple[str, ...]) -> str:
    # A bar within a cell would begin the next one, and <name> is a placeholder, not HTML.
    safe = [[cell.replace("|", "\\|").replace("<", "&lt;") for cell in row] for row in rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in [headers, ["---"] * len(headers), *safe])
