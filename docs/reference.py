"""The reference, generated from the code as Markdown: commands, variables, the job file, and the public names.

The pages in docs/reference have it for readers of the repository; ``python docs/reference.py`` writes it there.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning_sm
from lightning_sm import __main__ as program
from lightning_sm.job.variables import USER_SETTINGS
from lightning_sm.submit.job_file import Job
from lightning_sm.submit.job_keys import KeyField, is_section, keys_of, shown_default

# Code, which stays as it is, or the character that would begin HTML.
_LESS = re.compile(r"(`[^`]*`)|<")
_COLUMNS = 100  # of signatures
FOLDER = Path(__file__).parent / "reference"
# Where a page has its generated text.
PLACE = re.compile(r"^<!-- generated: ([\w-]+) -->$.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)


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
    """What a command prints for ``--help``, as in a terminal of 118 columns without colours."""
    shown = io.StringIO()
    before = dict(os.environ)
    os.environ |= {"COLUMNS": "118", "NO_COLOR": "1"}
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
        rows = []
        for one in keys_of(kind).values():
            waiting += [part for part in _parts(one.kind) if is_section(part) and part not in waiting]
            # The table is on a page in docs/reference; the meanings are written for that page, too.
            rows.append((f"`{one.name}`", _type(one.kind), _default(one), _meaning(one)))
        title = "" if kind is Job else f"## {kind.__name__}\n\n{inspect.getdoc(kind)}\n\n"
        sections.append(f"{title}{_table(rows, ('key', 'value', 'default', 'meaning'))}")
    return "\n".join(sections)


def python() -> str:
    """A section for each public name: its signature, and what it is."""
    sections = []
    for name in lightning_sm.__all__:
        value = getattr(lightning_sm, name)
        about = (inspect.getdoc(value) or "").partition("\n\n")[0]
        # Roles and code of reStructuredText.
        about = re.sub(r"``(.+?)``", r"`\1`", about.replace("\n", " "))
        call = f"```text\n{_call(name, value)}\n```\n\n" if callable(value) else ""
        sections.append(f"## {name}\n\n{call}{about}\n")
    return "\n".join(sections)


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


def _parts(hint: Any) -> Iterator[Any]:
    yield hint
    for part in typing.get_args(hint):
        yield from _parts(part)


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
    if is_section(hint):
        return f"[{hint.__name__}](#{hint.__name__.lower()})"
    plain = {str: "text", int: "whole number", float: "number", bool: "`true` or `false`", Any: "any"}
    return plain.get(hint) or inspect.formatannotation(hint)


def _default(one: KeyField) -> str:
    if one.is_required:
        return "**required**"
    if is_section(type(one.default)):
        return "see the keys"
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
