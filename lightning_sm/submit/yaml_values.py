"""YAML with the position of each value: what a job file says, and where, before anybody knows what it means.

Differs from YAML 1.1 as jsonargparse does, which reads the options of a script: ``1e-3`` is a number, a date is text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from lightning_sm.submit.problems import FilePosition, JobProblem

_FLOAT = "tag:yaml.org,2002:float"
_MERGE = "tag:yaml.org,2002:merge"
_OTHER_RESOLVERS = {"tag:yaml.org,2002:timestamp", _FLOAT}
_NUMBER = re.compile(
    r"[-+]?(?:[0-9][0-9_]*)\.[0-9_]*(?:[eE][-+]?[0-9]+)?\Z"
    r"|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+\Z"
    r"|\.[0-9_]+(?:[eE][-+][0-9]+)?\Z"
    r"|[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+\.[0-9_]*\Z"
    r"|[-+]?\.(?:inf|Inf|INF)\Z"
    r"|\.(?:nan|NaN|NAN)\Z"
)
_UNREADABLE = object()
# Characters with a meaning of their own in YAML.
_INDICATORS = frozenset("@`%!&*|>}],")
# Deeper values are not those of a job; Python's own limit is about 1000 calls.
_MAX_DEPTH = 60
_KINDS = {bool: "true or false", int: "a number", float: "a number", type(None): "empty"}


class _JobFileLoader(yaml.SafeLoader):
    yaml_implicit_resolvers = {  # noqa: RUF012 - the name is PyYAML's
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in _OTHER_RESOLVERS]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_JobFileLoader.add_implicit_resolver(_FLOAT, _NUMBER, list("-+0123456789."))


class YamlError(ValueError):
    """A text is not YAML.

    Args:
        text: Why, in words.
        line: Line, from 1; None if it is about the whole text.
    """

    def __init__(self, text: str, line: int | None = None) -> None:
        super().__init__(text)
        self.line = line


@dataclass
class YamlValue:
    """A value with its position.

    Attributes:
        content: Text, a number, true, false or None; a list of such values; or a dict of them by name.
        position: Where it is written.
        written: A scalar as it is written, without quotes.
    """

    content: Any
    position: FilePosition
    written: str = ""

    @property
    def kind(self) -> str:
        """What it is, in words."""
        if isinstance(self.content, dict):
            return "a mapping"
        return "a list" if isinstance(self.content, list) else _KINDS.get(type(self.content), "text")

    def plain(self) -> Any:
        """Return the value without its positions."""
        if isinstance(self.content, dict):
            return {name: value.plain() for name, value in self.content.items()}
        return [value.plain() for value in self.content] if isinstance(self.content, list) else self.content


def read_yaml(text: str, source: str, key: str = "") -> tuple[YamlValue | None, list[JobProblem]]:
    """Read a text.

    Args:
        text: YAML, of one document.
        source: Its path, or the option that it is the value of.
        key: The key that the option stands for.

    Returns:
        The value, None if the text has none; and what is wrong with parts of it, which are left out.

    Raises:
        YamlError: The text is not YAML.
    """
    try:
        loader = _JobFileLoader(text)
        try:
            node = loader.get_single_node()
            reader = _Reader(loader, source)
            return (None if node is None else reader.value(node, key, 0)), reader.problems
        finally:
            loader.dispose()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlError(f"the character U+{ord(_character(error)):04X} is not allowed in YAML.", line) from error
    except yaml.MarkedYAMLError as error:
        raise _error(text, error) from error
    except RecursionError as error:
        raise YamlError("values are nested too deeply.") from error


class _Reader:
    """Turns the nodes of PyYAML into values, and collects what is wrong with them."""

    def __init__(self, loader: _JobFileLoader, source: str) -> None:
        self.problems: list[JobProblem] = []
        self._loader = loader
        self._source = source

    def value(self, node: yaml.Node, key: str, depth: int) -> YamlValue:
        position = self._position(node)
        if depth > _MAX_DEPTH:
            raise YamlError("values are nested too deeply, or a value contains itself.", position.line)
        if isinstance(node, yaml.MappingNode):
            content: Any = dict(self._entries(node, key, depth))
        elif isinstance(node, yaml.SequenceNode):
            content = [self.value(item, key, depth + 1) for item in node.value]
        else:
            content = self._scalar(node, key)
        return YamlValue(content, position, str(node.value) if isinstance(node, yaml.ScalarNode) else "")

    def _entries(self, node: yaml.MappingNode, key: str, depth: int) -> Iterator[tuple[str, YamlValue]]:
        lines: dict[str, int] = {}
        merged: dict[str, YamlValue] = {}
        own: dict[str, YamlValue] = {}
        for name_node, value_node in node.value:
            line = name_node.start_mark.line + 1
            if name_node.tag == _MERGE:
                for base in value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]:
                    if isinstance(base, yaml.MappingNode):
                        merged = {**dict(self._entries(base, key, depth + 1)), **merged}
                    else:
                        self._add(key, "<< is not followed by a mapping, as in <<: *name.", line)
                continue
            name = self._name(name_node, key)
            if name is None:
                continue
            path = f"{key}.{name}" if key else name
            if name in lines:
                where = "" if line == lines[name] else f", in lines {lines[name]} and {line}"
                self._add(path, f"{path} is given twice{where}. Remove one.", line)
                continue
            lines[name] = line
            value = self.value(value_node, path, depth + 1)
            own[name] = YamlValue(value.content, FilePosition(self._source, line), value.written)
        yield from {**merged, **own}.items()

    def _name(self, node: yaml.Node, key: str) -> str | None:
        place = f"{key}: " if key else ""
        line = node.start_mark.line + 1
        if not isinstance(node, yaml.ScalarNode):
            self._add(key, f"{place}a name is a list or a mapping; expected text.", line)
            return None
        name = self._scalar(node, key)
        if isinstance(name, str):
            return name
        kind = _KINDS[type(name)]
        self._add(key, f"{place}the name {node.value or 'before a colon'} is {kind}; quote it: '{node.value}'.", line)
        return None

    def _scalar(self, node: yaml.Node, key: str) -> Any:
        try:
            value = self._loader.construct_object(node)
        except (yaml.MarkedYAMLError, ValueError, OverflowError, TypeError):
            value = _UNREADABLE
        if value is None or isinstance(value, (str, bool, int, float)):
            return value
        place = f"{key}: " if key else ""
        self._add(
            key, f"{place}the value does not fit its YAML type. Quote it if it is text.", self._position(node).line
        )
        return None

    def _position(self, node: yaml.Node) -> FilePosition:
        return FilePosition(self._source, node.start_mark.line + 1)

    def _add(self, key: str, text: str, line: int | None) -> None:
        self.problems.append(JobProblem(key, text, position=FilePosition(self._source, line)))


def _character(error: yaml.reader.ReaderError) -> str:
    return error.character if isinstance(error.character, str) else chr(error.character)


def _error(text: str, error: yaml.MarkedYAMLError) -> YamlError:
    """Explain an error by the characters at its marks: PyYAML's own words are about its tokens."""
    lines = text.splitlines()
    mark, context = error.problem_mark, error.context_mark
    if mark is None:
        return YamlError("the text is not valid YAML.", None if context is None else context.line + 1)
    line = lines[mark.line] if mark.line < len(lines) else ""
    at = line[mark.column : mark.column + 1]
    began = mark if context is None else context
    opening = lines[began.line][began.column : began.column + 1] if began.line < len(lines) and context else ""
    if "\t" in line[: len(line) - len(line.lstrip())]:
        why = "the line begins with a tab; YAML indents with spaces."
    elif at == "\t":
        why = "a tab is where YAML needs a space."
    elif isinstance(error, yaml.composer.ComposerError):
        why = "a second document begins here; a job file has one."
        if at in {"*", "&"}:  # not quoted here: the value may be a password
            why = f"a value begins with {at}, as an alias of an anchor (&name) does. Quote it if it is text."
    elif opening in {'"', "'"}:
        return YamlError(f"the quotation mark {opening} is not closed.", began.line + 1)
    elif opening in {"[", "{"}:
        closing = "]" if opening == "[" else "}"
        before = "" if began.line == mark.line else f" before line {mark.line + 1}"
        return YamlError(f"{opening} is not closed by {closing}, or a comma is missing{before}.", began.line + 1)
    elif at == ":":
        why = "a colon is not expected here: the line is indented too far, or a value that contains ': ' needs quotes."
    elif at in _INDICATORS:
        why = f"a value cannot begin with {at} here; quote it."
    else:
        why = "the line does not fit those above it: check its indentation; a colon and a space follow each name."
    return YamlError(why, mark.line + 1)
