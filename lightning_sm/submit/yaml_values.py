"""YAML with the position of each value: what a job file says, and where, before anybody knows what it means.

Differs from YAML 1.1 as jsonargparse does, which reads the options of a script: ``1e-3`` is a number, a date is text.
So are times and numbers of another base, which nobody means who writes ``24:00`` or ``0777``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from lightning_sm.submit.problems import FilePosition, JobProblem

_FLOAT = "tag:yaml.org,2002:float"
_INT = "tag:yaml.org,2002:int"
_OTHER_RESOLVERS = {"tag:yaml.org,2002:timestamp", _FLOAT, _INT}
_NUMBER = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?\Z"
    r"|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+\Z"
    r"|[-+]?\.(?:inf|Inf|INF)\Z"
    r"|\.(?:nan|NaN|NAN)\Z"
)
_WHOLE = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)\Z")
_UNREADABLE = object()
_KINDS = {bool: "true or false", int: "a number", float: "a number", type(None): "empty"}


class _JobFileLoader(yaml.SafeLoader):
    yaml_implicit_resolvers = {  # noqa: RUF012 - the name is PyYAML's
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in _OTHER_RESOLVERS]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_JobFileLoader.add_implicit_resolver(_FLOAT, _NUMBER, list("-+0123456789."))
_JobFileLoader.add_implicit_resolver(_INT, _WHOLE, list("-+0123456789"))


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
        key: The key that an option stands for; positions then have no line.

    Returns:
        The value, None if the text has none; and what is wrong with parts of it, which are left out.

    Raises:
        YamlError: The text is not YAML.
    """
    try:
        loader = _JobFileLoader(text)
        node = loader.get_single_node()
        reader = _Reader(loader, source, has_lines=not key)
        return (None if node is None else reader.value(node, key)), reader.problems
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlError("the line has a character that YAML does not allow.", line) from error
    except yaml.MarkedYAMLError as error:
        raise _error(text, error) from error
    except RecursionError as error:
        raise YamlError("values are nested too deeply, or a value contains itself.") from error


class _Reader:
    """Turns the nodes of PyYAML into values, and collects what is wrong with them."""

    def __init__(self, loader: _JobFileLoader, source: str, *, has_lines: bool) -> None:
        self.problems: list[JobProblem] = []
        self._loader = loader
        self._source = source
        self._has_lines = has_lines

    def value(self, node: yaml.Node, key: str) -> YamlValue:
        if isinstance(node, yaml.MappingNode):
            return YamlValue(dict(self._entries(node, key)), self._position(node))
        if isinstance(node, yaml.SequenceNode):
            return YamlValue([self.value(item, key) for item in node.value], self._position(node))
        content = self._scalar(node)
        if content is _UNREADABLE:
            self._add(key, node, "the value does not fit its YAML type. Quote it if it is text.")
            content = None
        return YamlValue(content, self._position(node), str(node.value))

    def _entries(self, node: yaml.MappingNode, key: str) -> Iterator[tuple[str, YamlValue]]:
        lines: dict[str, int] = {}
        for name_node, value_node in node.value:
            name = self._scalar(name_node) if isinstance(name_node, yaml.ScalarNode) else _UNREADABLE
            if not isinstance(name, str):
                self._add(key, name_node, f"a name is {_KINDS.get(type(name), 'no text')}; expected text. Quote it.")
                continue
            line = name_node.start_mark.line + 1
            path = f"{key}.{name}" if key else name
            if name in lines:
                where = f", in lines {lines[name]} and {line}" if self._has_lines else ""
                self._add(path, name_node, f"{path} is given twice{where}. Remove one.", in_key=False)
                continue
            lines[name] = line
            value = self.value(value_node, path)
            yield name, YamlValue(value.content, self._position(name_node), value.written)

    def _scalar(self, node: yaml.Node) -> Any:
        try:
            value = self._loader.construct_object(node)
        except (yaml.MarkedYAMLError, ValueError, OverflowError, TypeError):
            return _UNREADABLE
        return value if value is None or isinstance(value, (str, bool, int, float)) else _UNREADABLE

    def _position(self, node: yaml.Node) -> FilePosition:
        return FilePosition(self._source, node.start_mark.line + 1 if self._has_lines else None)

    def _add(self, key: str, node: yaml.Node, text: str, *, in_key: bool = True) -> None:
        place = f"{key}: " if key and in_key else ""
        self.problems.append(JobProblem(key, f"{place}{text}", position=self._position(node)))


def _error(text: str, error: yaml.MarkedYAMLError) -> YamlError:
    """Explain an error by the characters at its marks: PyYAML's own words are about its tokens."""
    lines = [*text.splitlines(), ""]
    mark = error.problem_mark or error.context_mark
    if mark is None:
        return YamlError("the text is not valid YAML.")
    line = lines[min(mark.line, len(lines) - 1)]
    if "\t" in line[: len(line) - len(line.lstrip())] or line[mark.column : mark.column + 1] == "\t":
        return YamlError("a tab is where YAML needs a space; YAML indents with spaces.", mark.line + 1)
    began = error.context_mark
    opening = lines[began.line][began.column : began.column + 1] if began is not None else ""
    if began is not None and opening in {'"', "'", "[", "{"}:
        return YamlError(f"{opening} is not closed, or a comma is missing after it.", began.line + 1)
    return YamlError(
        "the line is not valid YAML, or does not fit those above it: check its indentation, the colon and space after "
        "a name, and quote a value that contains ': ' or begins with a sign such as @ or *.",
        mark.line + 1,
    )
