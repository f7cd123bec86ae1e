"""The reference, generated from the code as Markdown: commands, variables, the job file, and the public names.

The pages in docs/reference have it for readers of the repository; ``python docs/reference.py`` writes it there.
"""

from __future__ import annotations

import argparse
import enum
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning_sm
from lightning_sm import __main__ as program
from lightning_sm.job.variables import USER_SETTINGS
from lightning_sm.submit import command as submit
from lightning_sm.submit.job_file import Job
from lightning_sm.submit.job_keys import KeyField, all_keys, is_section, shown_default

# Code, which stays as it is, or the character that would begin HTML.
_LESS = re.compile(r"(`[^`]*`)|<")
_COLUMNS = 100  # of signatures
FOLDER = Path(__file__).parent / "reference"
# Where a page has its generated text.
PLACE = re.compile(r"^<!-- generated: ([\w-]+) -->$.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)
# What argparse calls the options that no group of ours has.
_UNNAMED_GROUPS = {"positional arguments", "options"}


def commands() -> str:
    """A section for each command: what it does, its usage, its options, and what else its help says."""
    sections = []
    told: set[str] = set()
    for parser, line in _leaves(program._parser(with_all_options=True), ""):
        about = " ".join((parser.description or line).split()).rstrip(".")
        parts = [f"{_capitalized(about)}.", f"`{_usage(parser)}`"]
        rows = list(_options(parser))
        if rows:
            parts.append(_table(rows, ("option", "meaning")).rstrip())
        # Examples are in the guides. What the help of several commands says stands once.
        for text in (parser.epilog or "").strip().split("\n\n"):
            if text and text not in told and not text.startswith("example"):
                parts.append(f"```text\n{text}\n```" if "\n  " in text else _capitalized(text))
                told.add(text)
        sections.append(f"## {parser.prog}\n\n" + "\n\n".join(parts) + "\n")
    return "\n".join(sections)


def _leaves(parser: argparse.ArgumentParser, about: str) -> Iterator[tuple[argparse.ArgumentParser, str]]:
    """The parsers of all commands, those of commands within commands included, each with its line in the list."""
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for action in inner:
        abouts = {choice.dest: choice.help or "" for choice in action._get_subactions()}
        for name, below in action.choices.items():
            yield from _leaves(below, abouts[name])
    if not inner:
        yield parser, about


def _usage(parser: argparse.ArgumentParser) -> str:
    """How a command is called, its options apart from the rest."""
    forms = {"?": "[{0}]", "+": "{0} [{0} ...]"}
    words = [parser.prog]
    if any(action.option_strings and action.dest != "help" for action in parser._actions):
        words.append("[options]")
    words += [
        forms.get(str(action.nargs), "{0}").format(_value(action))
        for action in parser._actions
        if not action.option_strings
    ]
    return " ".join(words)


def _options(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """Each argument and option except ``--help``, with its meaning; the keys of a job file have a page of their own."""
    for group in parser._action_groups:
        if group.title == submit._KEYS:
            yield "`--KEY VALUE`", "override a [key of the job file](job-file.md), such as `--groups.trainer.count=4`"
            continue
        subject = "" if group.title in _UNNAMED_GROUPS else f"{group.title}: "
        for action in group._group_actions:
            value = "" if action.nargs == 0 else _value(action)
            names = [f"`{name}`" for name in action.option_strings[:-1]]
            names.append(f"`{' '.join([*action.option_strings[-1:], value]).rstrip()}`")
            if action.dest != "help" and action.help:
                yield ", ".join(names), subject + action.help


def _capitalized(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


def _value(action: argparse.Action) -> str:
    if action.choices:
        return f"{{{','.join(map(str, action.choices))}}}"
    return str(action.metavar or action.dest.upper())


def settings() -> str:
    """A table of the environment variables that users set."""
    rows = [(f"`{one.name}`", one.default_text, one.meaning) for one in USER_SETTINGS]
    return _table(rows, ("variable", "default", "meaning"))


def job_file() -> str:
    """A table of the keys of a job file, those within other keys included."""
    # The table is on a page in docs/reference; the meanings are written for that page, too.
    rows = [
        (f"`{'.'.join(path.parts)}`", _type(path.field.kind), _default(path.field), _meaning(path.field))
        for path in all_keys(Job)
    ]
    return _table(rows, ("key", "value", "default", "meaning"))


def python() -> str:
    """A table of the public names, and their signatures."""
    values = {name: getattr(lightning_sm, name) for name in lightning_sm.__all__}
    rows = [(f"`{name}`", _first_paragraph(value)) for name, value in values.items() if callable(value)]
    # The signature of an enumeration is that of the class Enum.
    calls = [
        _call(name, value)
        for name, value in values.items()
        if callable(value) and not (inspect.isclass(value) and issubclass(value, enum.Enum))
    ]
    return f"{_table(rows, ('name', 'what it is'))}\n## Signatures\n\n```text\n" + "\n".join(calls) + "\n```\n"


def _first_paragraph(value: Any) -> str:
    about = (inspect.getdoc(value) or "").partition("\n\n")[0].replace("\n", " ")
    return re.sub(r"``(.+?)``", r"`\1`", about)  # code of reStructuredText


def _call(name: str, value: Any) -> str:
    signature = inspect.signature(value)
    if inspect.isclass(value):
        signature = signature.replace(return_annotation=inspect.Signature.empty)
    one_line = _unquoted(f"{name}{signature}")
    if len(one_line) <= _COLUMNS:
        return one_line
    return f"{name}(\n{_packed(_parameters(signature))})"


def _packed(parameters: Iterable[str]) -> str:
    """As many parameters on a line as fit; a parameter is not divided, whatever spaces it has."""
    lines: list[str] = []
    for one in parameters:
        if lines and len(lines[-1]) + len(f" {one},") <= _COLUMNS:
            lines[-1] += f" {one},"
        else:
            lines.append(f"    {one},")
    return "".join(f"{line}\n" for line in lines)


def _parameters(signature: inspect.Signature) -> Iterator[str]:
    before = None
    for one in signature.parameters.values():
        if one.kind is one.KEYWORD_ONLY and before not in (one.KEYWORD_ONLY, one.VAR_POSITIONAL):
            yield "*"
        before = one.kind
        yield _unquoted(str(one))


def _unquoted(signature: str) -> str:
    """Annotations are strings to ``inspect``."""
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", signature)


def python_directives() -> str:
    """The same sections for the site; Sphinx fills them with the signatures and the whole docstrings."""
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


def _type(hint: Any) -> str:
    """A type in the words of a job file."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_type(one) for one in args if one is not type(None))
    if origin is typing.Literal:
        return " or ".join(f"`{one}`" for one in args)
    if origin is dict:
        return f"`{{NAME: value}}`, each value: {_type(args[1])}"
    if origin is list:
        return f"list, each item: {_type(args[0])}"
    if is_section(hint):
        return "the keys below"
    plain = {str: "text", int: "whole number", float: "number", bool: "`true` or `false`", Any: "any"}
    return plain.get(hint) or inspect.formatannotation(hint)


def _default(one: KeyField) -> str:
    if one.is_required:
        return "**required**"
    if is_section(type(one.default)):
        return "as below"
    return "none" if one.default in (None, [], {}) else f"`{shown_default(one.default)}`"


def _meaning(one: KeyField) -> str:
    has_parts = is_section(one.kind) or typing.get_origin(one.kind) in {dict, list}
    return f"{one.about.meaning} Example: `{one.name}: {one.about.example}`" if has_parts else one.about.meaning


def _table(rows: Sequence[tuple[str, ...]], headers: tuple[str, ...]) -> str:
    # A bar within a cell would begin the next one, and <name> is a placeholder, not HTML, outside of code.
    safe = [[_LESS.sub(lambda one: one[1] or "&lt;", cell.replace("|", "\\|")) for cell in row] for row in rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in [headers, ["---"] * len(headers), *safe])


GENERATED: dict[str, Callable[[], str]] = {
    "commands": commands,
    "settings": settings,
    "job-file": job_file,
    "python": python,
}


def complete(page: str) -> str:
    """Return the text of a page with what is generated today."""
    return PLACE.sub(lambda found: f"<!-- generated: {found[1]} -->\n{GENERATED[found[1]]()}<!-- end -->", page)


if __name__ == "__main__":
    for path in FOLDER.glob("*.md"):
        path.write_text(complete(path.read_text(encoding="utf-8")), encoding="utf-8")
