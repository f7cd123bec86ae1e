"""The reader of job files, which checks values against the description of the keys and reports what to correct.

It reads YAML 1.1 with the same changes as jsonargparse, which reads the script's options: ``1e-3`` is a number, and a
date is text. Times and numbers in other bases are text, too: nobody who writes ``24:00`` or ``0777`` means a number.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

import yaml
from yaml.constructor import SafeConstructor

from lightning_sm._arguments import did_you_mean
from lightning_sm._text import shortened
from lightning_sm.job.redaction import shown
from lightning_sm.submit.dataclass_fields import KeyField, expected, is_section, keys_of, suggestion
from lightning_sm.submit.overrides import Override
from lightning_sm.submit.problems import Position, position_of, raise_problems

_TAG = "tag:yaml.org,2002:"
_TEXT, _NULL, _MERGE = f"{_TAG}str", f"{_TAG}null", f"{_TAG}merge"
_KINDS = {_TEXT: "text", f"{_TAG}bool": "true or false", f"{_TAG}int": "a number", f"{_TAG}float": "a number"}
_OTHER_RESOLVERS = {f"{_TAG}timestamp", f"{_TAG}float", f"{_TAG}int"}
_WHOLE = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)\Z")
_NUMBER = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?\Z"
    r"|[-+]?\.(?:inf|Inf|INF)\Z|\.(?:nan|NaN|NAN)\Z"
)
_SHOWN_CHARS = 60
_TOO_DEEP = "values are nested too deeply, or an anchor (&) contains its own alias (*)."


class _JobFileLoader(yaml.SafeLoader):
    yaml_implicit_resolvers = {  # noqa: RUF012 - the name is PyYAML's
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in _OTHER_RESOLVERS]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_JobFileLoader.add_implicit_resolver(f"{_TAG}int", _WHOLE, list("-+0123456789"))
_JobFileLoader.add_implicit_resolver(f"{_TAG}float", _NUMBER, list("-+0123456789."))


class JobReader:
    """Reads a job from a file and options.

    Args:
        section: The class of the job.

    Attributes:
        positions: The position of each key; the empty key stands for the file.
        problems: The position of each problem, and what is wrong.
    """

    def __init__(self, section: type) -> None:
        self.positions: dict[str, Position] = {}
        self.problems: list[tuple[Position | None, str]] = []
        self._section = section
        self._root = yaml.MappingNode(f"{_TAG}map", [])

    def read_file(self, path: str | os.PathLike[str]) -> None:
        """Read a job file.

        Raises:
            SubmitError: The file cannot be read, or is not YAML.
        """
        file = self.positions[""] = Position(os.fspath(path))
        try:
            text = Path(path).read_bytes().decode("utf-8-sig")
            node = _compose(text, file.source)
        except OSError as error:
            _stop(file, f"the file cannot be read: {error.strerror}.")
        except UnicodeDecodeError as error:
            _stop(file, f"the file is not UTF-8 text (byte {error.start}).")
        except yaml.YAMLError as error:
            line, why = _explained(text, error)
            _stop(Position(file.source, line), why)
        except RecursionError:
            _stop(file, _TOO_DEEP)
        if node is None:
            _stop(file, "the file is empty; a job needs at least image and groups.")
        if not isinstance(node, yaml.MappingNode):
            _stop(file, f"the file is {_kind(node)}; expected keys with values, such as image: and groups:.")
        self._root = node

    def override(self, override: Override) -> None:
        """Replace the value of a key with the value of an option."""
        option = Position(override.source)
        mark = yaml.Mark(option.source, 0, 0, 0, None, 0)
        parts, kind = self._place(override.key)
        node: yaml.Node = yaml.ScalarNode(_TEXT, override.text, mark)
        if override.is_json or kind is not str or override.text == "null":
            try:
                node = _compose(override.text, option.source) or yaml.ScalarNode(_NULL, "", mark)
            except yaml.YAMLError as error:
                if kind is not Any:
                    self.problems.append((option, f"the value is not YAML: {_explained(override.text, error)[1]}"))
                    return
            except RecursionError:
                _stop(option, _TOO_DEEP)
        outer = self._root
        for part in parts[:-1]:
            inner = next((value for name, value in outer.value if name.value == part), None)
            if not isinstance(inner, yaml.MappingNode):
                inner = yaml.MappingNode(f"{_TAG}map", [])
                _put(outer, part, inner, mark)
            outer = inner
        # null removes a key, except in hyperparameters, where it is a value.
        _put(outer, parts[-1], None if node.tag == _NULL and parts[0] != "hyperparameters" else node, mark)

    def build(self) -> Any:
        """Build the job from the file and options.

        Raises:
            SubmitError: There are problems, which the message lists.
        """
        try:
            job = self._instance(self._section, self._root, "")
        except RecursionError:
            _stop(self.positions.get("", Position("the job")), _TOO_DEEP)
        raise_problems(self.problems)
        return job

    def _place(self, key: str) -> tuple[list[str], Any]:
        """Return the parts of an option's key, the last of which may contain dots, and the type of its value."""
        parts: list[str] = []
        kind: Any = self._section
        rest = key
        while rest:
            inner = get_args(kind)[1] if get_origin(kind) is dict else Any
            if not is_section(kind) and not is_section(inner):
                # Names of hyperparameters may contain dots; names of a request's members cannot.
                return [*parts, *(rest.split(".") if parts[-1] == "request" else [rest])], inner
            name, _, rest = rest.partition(".")
            parts.append(name)
            field = keys_of(kind).get(name) if is_section(kind) else None
            kind = inner if field is None else field.kind
        return parts, kind

    def _instance(self, section: type, node: yaml.MappingNode, key: str) -> Any:
        """Return an instance of a section; None if the file has problems, here or elsewhere."""
        fields = keys_of(section)
        entries = self._entries(node, key)
        found: dict[str, Any] = {}
        for name, value in entries.items():
            path = _join(key, name)
            if name not in fields:
                where = f"{key} has no key {name}" if key else f"{name} is not a key of a job file"
                self._add(path, f"{where}.{suggestion(name, section, self._section)}")
            elif value.tag != _NULL:  # a key without a value, perhaps above comments, counts as missing
                found[name] = self._value(fields[name], value, path)
        if entries.keys() <= fields.keys():  # otherwise, an unknown key may be a misspelling of the missing one
            for field in fields.values():
                if field.is_required and field.name not in found:
                    # A misspelled group name creates a new group, which lacks required keys.
                    around, _, own = key.rpartition(".")
                    places = [place.rpartition(".") for place in self.positions if around and place != key]
                    near = did_you_mean(own, [other for place, _, other in places if place == around])
                    self._add(key, f"{_join(key, field.name)} is missing, as in {field.shown_example}.{near}")
        return None if self.problems else section(**found)

    def _entries(self, node: yaml.MappingNode, key: str) -> dict[str, yaml.Node]:
        """Return the values of a mapping by name, and record their positions."""
        found: dict[str, yaml.Node] = {}
        for name_node, value in node.value:
            position = self._position(name_node)
            name = name_node.value
            path = _join(key, str(name))
            if name_node.tag != _TEXT:
                place = f"{key}: " if key else ""
                no_text = f"a name is {_kind(name_node)}; expected text. Quote it."
                what = "<< does not merge keys in a job file. Repeat them here." if name_node.tag == _MERGE else no_text
                self.problems.append((position, f"{place}{what}"))
            elif name in found:
                text = f"{path} is given twice, first at {self.positions[path]}. Remove one."
                self.problems.append((position, text))
            else:
                self.positions[path] = position
                found[name] = value
        return found

    def _value(self, field: KeyField, node: yaml.Node, key: str) -> Any:
        """Return the value of a key; after a problem, the result is arbitrary."""
        kind, origin = field.kind, get_origin(field.kind)
        if isinstance(node, yaml.MappingNode) and is_section(kind):
            return self._instance(kind, node, key)
        if isinstance(node, yaml.MappingNode) and (origin is dict or kind is Any):
            inner = replace(field, kind=get_args(kind)[1] if origin is dict else Any)
            entries = self._entries(node, key)
            return {name: self._value(inner, value, _join(key, name)) for name, value in entries.items()}
        if isinstance(node, yaml.SequenceNode) and (origin is list or kind is Any):
            inner = replace(field, kind=get_args(kind)[0] if origin is list else Any)
            return [self._value(inner, item, f"{key}.{number}") for number, item in enumerate(node.value, 1)]
        content = _content(node)
        least = field.about.least
        if isinstance(node, yaml.ScalarNode) and content is node:
            self._add(key, f"{key}: the value does not fit its YAML type. Quote it if it is text.")
        elif kind is not Any and not _fits(kind, content):
            self._wrong(field, node, key)
        elif least is not None and content < least:
            self._add(key, f"{key} is {node.value}; expected at least {least:g}.")
        return content

    def _wrong(self, field: KeyField, node: yaml.Node, key: str) -> None:
        """Report a value of the wrong type, and what was expected."""
        kind = field.kind
        name = key.rpartition(".")[2]
        what, hint = _kind(node), f" For example, {field.shown_example}."
        if isinstance(node, yaml.ScalarNode):
            text = shortened(str(shown(key, node.value)), _SHOWN_CHARS)
            if kind is str:
                hint = f" Quote it: '{text}'." if name.isdigit() else f" Quote it: {name}: '{text}'."
            elif get_origin(kind) is not dict:  # do not show mappings, which may hold secrets under any name
                what = repr(text) if node.tag == _TEXT else text
            if get_origin(kind) is Literal:
                hint = did_you_mean(node.value, get_args(kind))
        self._add(key, f"{key} is {what}; expected {expected(kind, field.about.unit)}.{hint}")

    def _add(self, key: str, text: str) -> None:
        self.problems.append((position_of(key, self.positions), text))

    def _position(self, node: yaml.Node) -> Position:
        mark, file = node.start_mark, self.positions.get("")
        return Position(mark.name, mark.line + 1 if file is not None and mark.name == file.source else 0)


def _compose(text: str, source: str) -> yaml.Node | None:
    loader = _JobFileLoader(text)
    loader.name = source
    node: yaml.Node | None = loader.get_single_node()
    return node


def _put(mapping: yaml.MappingNode, name: str, value: yaml.Node | None, mark: yaml.Mark) -> None:
    """Replace or remove a value and its parts, which may be separate entries, since names may contain dots."""
    kept = [entry for entry in mapping.value if not f"{entry[0].value}.".startswith(f"{name}.")]
    mapping.value = [*kept, *([] if value is None else [(yaml.ScalarNode(_TEXT, name, mark), value)])]


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return "empty" if node.tag == _NULL else _KINDS.get(node.tag, "not text")
    return "a mapping" if isinstance(node, yaml.MappingNode) else "a list"


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _content(node: yaml.Node) -> Any:
    """Return the value of a scalar; the node itself if it is not a scalar, or does not fit its YAML type."""
    if isinstance(node, yaml.ScalarNode):
        try:
            value = SafeConstructor().construct_object(node)
        except (yaml.YAMLError, ValueError, KeyError):
            return node
        if value is None or isinstance(value, (str, bool, int, float)):
            return value
    return node


def _fits(kind: Any, content: Any) -> bool:
    """Return whether a scalar has the given type: text, a literal, or a number."""
    if get_origin(kind) is Literal:
        return content in get_args(kind)
    if kind is float:
        return type(content) in {int, float} and math.isfinite(content)
    return type(content) is kind


def _explained(text: str, error: yaml.YAMLError) -> tuple[int, str]:
    """Return the number of an error's line, and an explanation to replace PyYAML's, which is in terms of tokens."""
    if isinstance(error, yaml.reader.ReaderError):
        return text.count("\n", 0, error.position) + 1, "the line has a character that YAML does not allow."
    began, mark = getattr(error, "context_mark", None), getattr(error, "problem_mark", None)
    lines = [*text.splitlines(), ""]
    number = 0 if mark is None else min(mark.line, len(lines) - 1)
    if mark is not None and "\t" in lines[number][: mark.column + 1]:
        return number + 1, "a tab is where YAML needs a space; YAML indents with spaces."
    if lines[number].startswith("---"):
        return number + 1, "a second document begins here; a job file has only one. Remove ---, or what follows it."
    opening = lines[began.line][began.column : began.column + 1] if began is not None else ""
    if began is not None and opening in {'"', "'", "[", "{"}:
        return began.line + 1, f"{opening} is not closed, or a comma is missing after it."
    return number + 1, (
        "the line is not valid YAML, or does not fit the lines above it: check its indentation, and that "
        "a colon and a space follow each key. Quote a value that contains ': ' or begins with @ or *, for example."
    )


def _stop(position: Position, problem: str) -> NoReturn:
    raise_problems([(position, problem)])
    raise AssertionError
