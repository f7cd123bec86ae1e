"""Generate the reference from the code as Markdown: commands, variables, the job file, and the public names.

``python docs/reference.py`` writes it into the pages in docs/reference, for readers of the repository.
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
from lightning_sm.submit.dataclass_fields import KeyField, all_keys, is_section, shown_default
from lightning_sm.submit.job_file import Job

# Matches inline code, which stays unchanged, or a "<" that would start HTML.
_LESS = re.compile(r"(`[^`]*`)|<")
_COLUMNS = 100  # of signatures
FOLDER = Path(__file__).parent / "reference"
# Matches the place of generated text in a page.
PLACE = re.compile(r"^<!-- generated: ([\w-]+) -->$.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)
# argparse's titles for arguments and options outside any named group.
_UNNAMED_GROUPS = {"positional arguments", "options"}


def commands() -> str:
    """Return a section for each command: description, usage, options, and the other text of its help."""
    sections = []
    told: set[str] = set()
    for parser, line in _leaves(program._parser(with_all_options=True), ""):
        about = " ".join((parser.description or line).split()).rstrip(".")
        parts = [f"{_capitalized(about)}.", f"`{_usage(parser)}`"]
        rows = list(_options(parser))
        if rows:
            parts.append(_table(rows, ("option", "meaning")).rstrip())
        # Omit examples, which are in the guides, and print text shared by several commands only once.
        for text in (parser.epilog or "").strip().split("\n\n"):
            if text and text not in told and not text.startswith("example"):
                parts.append(f"```text\n{text}\n```" if "\n  " in text else _capitalized(text))
                told.add(text)
        sections.append(f"## {parser.prog}\n\n" + "\n\n".join(parts) + "\n")
    return "\n".join(sections)


def _leaves(parser: argparse.ArgumentParser, about: str) -> Iterator[tuple[argparse.ArgumentParser, str]]:
    """Yield the parser of each command and subcommand, with its one-line help."""
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for action in inner:
        abouts = {choice.dest: choice.help or "" for choice in action._get_subactions()}
        for name, below in action.choices.items():
            yield from _leaves(below, abouts[name])
    if not inner:
        yield parser, about


def _usage(parser: argparse.ArgumentParser) -> str:
    """Return a command's usage, with all options abbreviated to ``[options]``."""
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
    """Yield each argument and option except ``--help``, with its meaning; job-file keys are on a separate page."""
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
    """Return a table of the environment variables that users set."""
    rows = [
        (f"`{setting.name}`", setting.default_text or f"{setting.default:g}", setting.meaning)
        for setting in USER_SETTINGS
    ]
    return _table(rows, ("variable", "default", "meaning"))


def job_file() -> str:
    """Return a table of all keys of a job file, including nested ones."""
    # Links in the meanings are relative to docs/reference, where the table is.
    rows = [
        (f"`{'.'.join(path.parts)}`", _type(path.field.kind), _default(path.field), _meaning(path.field))
        for path in all_keys(Job)
    ]
    return _table(rows, ("key", "value", "default", "meaning"))


def python() -> str:
    """Return a table of the public names, followed by their signatures."""
    values = {name: getattr(lightning_sm, name) for name in lightning_sm.__all__}
    rows = [(f"`{name}`", _first_paragraph(value)) for name, value in values.items() if callable(value)]
    # Omit enumerations: inspect only reports the signature of Enum itself.
    calls = [
        _call(name, value)
        for name, value in values.items()
        if callable(value) and not (inspect.isclass(value) and issubclass(value, enum.Enum))
    ]
    return f"{_table(rows, ('name', 'what it is'))}\n## Signatures\n\n```text\n" + "\n".join(calls) + "\n```\n"


def _first_paragraph(value: Any) -> str:
    about = (inspect.getdoc(value) or "").partition("\n\n")[0].replace("\n", " ")
    return re.sub(r"``(.+?)``", r"`\1`", about)  # reStructuredText's inline code


def _call(name: str, value: Any) -> str:
    signature = inspect.signature(value)
    if inspect.isclass(value):
        signature = signature.replace(return_annotation=inspect.Signature.empty)
    one_line = _unquoted(f"{name}{signature}")
    if len(one_line) <= _COLUMNS:
        return one_line
    return f"{name}(\n{_packed(_parameters(signature))})"


def _packed(parameters: Iterable[str]) -> str:
    """Wrap parameters into lines without splitting any of them, even if they contain spaces."""
    lines: list[str] = []
    for parameter in parameters:
        if lines and len(lines[-1]) + len(f" {parameter},") <= _COLUMNS:
            lines[-1] += f" {parameter},"
        else:
            lines.append(f"    {parameter},")
    return "".join(f"{line}\n" for line in lines)


def _parameters(signature: inspect.Signature) -> Iterator[str]:
    before = None
    for param in signature.parameters.values():
        if param.kind is param.KEYWORD_ONLY and before not in (param.KEYWORD_ONLY, param.VAR_POSITIONAL):
            yield "*"
        before = param.kind
        yield _unquoted(str(param))


def _unquoted(signature: str) -> str:
    """Remove the quotes of annotations, which ``inspect`` prints as strings."""
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", signature)


def python_directives() -> str:
    """Return a section for each public name, which Sphinx fills with its signature and whole docstring."""
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
    """Return the public members that a class adds; Lightning documents the hooks that it overrides."""
    foreign = [base for base in kind.__mro__ if not base.__module__.startswith("lightning_sm")]
    return [
        name
        for name, value in vars(kind).items()
        if not name.startswith("_")
        and getattr(value, "__doc__", None)
        and not any(name in vars(base) for base in foreign)
    ]


def _type(hint: Any) -> str:
    """Describe a type in the terms of a job file."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_type(arg) for arg in args if arg is not type(None))
    if origin is typing.Literal:
        return " or ".join(f"`{arg}`" for arg in args)
    if origin is dict:
        return f"`{{NAME: value}}`, each value: {_type(args[1])}"
    if origin is list:
        return f"list, each item: {_type(args[0])}"
    if is_section(hint):
        return "the keys below"
    plain = {str: "text", int: "whole number", float: "number", bool: "`true` or `false`", Any: "any"}
    return plain.get(hint) or inspect.formatannotation(hint)


def _default(key: KeyField) -> str:
    if key.is_required:
        return "**required**"
    if is_section(type(key.default)):
        return "as below"
    return "none" if key.default in (None, [], {}) else f"`{shown_default(key.default)}`"


def _meaning(key: KeyField) -> str:
    has_parts = is_section(key.kind) or typing.get_origin(key.kind) in {dict, list}
    return f"{key.about.meaning} Example: `{key.name}: {key.about.example}`" if has_parts else key.about.meaning


def _table(rows: Sequence[tuple[str, ...]], headers: tuple[str, ...]) -> str:
    # Escape bars, which would start a new cell, and "<" outside code: <name> is a placeholder, not HTML.
    safe = [[_LESS.sub(lambda match: match[1] or "&lt;", cell.replace("|", "\\|")) for cell in row] for row in rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in [headers, ["---"] * len(headers), *safe])


GENERATED: dict[str, Callable[[], str]] = {
    "commands": commands,
    "settings": settings,
    "job-file": job_file,
    "python": python,
}


def complete(page: str) -> str:
    """Return a page with its generated text brought up to date."""
    return PLACE.sub(lambda match: f"<!-- generated: {match[1]} -->\n{GENERATED[match[1]]()}<!-- end -->", page)


if __name__ == "__main__":
    for path in FOLDER.glob("*.md"):
        path.write_text(complete(path.read_text(encoding="utf-8")), encoding="utf-8")
