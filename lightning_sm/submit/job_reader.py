"""The reader of job files: checks values against the description of the keys, and says what to correct, and where."""

from __future__ import annotations

import math
import os
import types
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

from lightning_sm._arguments import did_you_mean
from lightning_sm.job.redaction import shown
from lightning_sm.submit.job_keys import JobKey, KeyField, expected, is_section, keys_of, suggestion, without_none
from lightning_sm.submit.overrides import Override
from lightning_sm.submit.problems import FilePosition, JobProblem, JobSource, raise_problems
from lightning_sm.submit.yaml_values import YamlError, YamlValue, read_yaml

# What a value is replaced by that could not be read.
_UNREAD = object()
_SHOWN_CHARS = 60
# Their values may be secrets, whatever their names.
_NOT_QUOTED = ("environment", "hyperparameters", "request")


class JobReader:
    """Reads a job from a file and from options.

    Args:
        section: The class of the job.

    Attributes:
        source: Where the values come from, and what is wrong with them.
    """

    def __init__(self, section: type) -> None:
        self.source = JobSource()
        self._section = section
        self._root: dict[str, YamlValue] = {}

    def read_file(self, path: str | os.PathLike[str]) -> None:
        """Read a file.

        Raises:
            SubmitError: It cannot be read, or is not YAML.
        """
        name = os.fspath(path)
        position = FilePosition(name)
        self.source.positions[""] = position
        try:
            value, problems = read_yaml(Path(path).read_bytes().decode("utf-8-sig"), name)
        except OSError as error:
            self._stop(f"the file cannot be read: {error.strerror}.", position)
        except UnicodeDecodeError as error:
            self._stop(f"the file is not UTF-8 text (byte {error.start}).", position)
        except YamlError as error:
            self._stop(str(error), FilePosition(name, error.line))
        if value is None:
            self._stop("the file is empty; a job has at least image and groups.", position)
        if not isinstance(value.content, dict):
            self._stop(f"the file is {value.kind}; expected keys with values, such as image: and groups:.", position)
        self._root = value.content
        for problem in problems:
            self._add(problem.key, problem.text, problem.position)

    def override(self, override: Override) -> None:
        """Replace a value by that of an option."""
        position = FilePosition(override.option)
        parts, kind = self._place(override.key)
        if without_none(kind) is str:
            is_none = kind is not str and override.text == "null"
            value = YamlValue(None if is_none else override.text, position)
        else:
            try:
                found, problems = read_yaml(override.text, override.option, override.key)
            except YamlError as error:
                if kind is not Any:
                    self._add(override.key, f"the value is not YAML: {error}", position)
                    return
                found, problems = YamlValue(override.text, position), []
            for problem in problems:
                self._add(problem.key, problem.text, position)
            value = found or YamlValue(None, position)
        entries = self._root
        for part in parts[:-1]:
            inner = entries.get(part)
            if inner is None or not isinstance(inner.content, dict):
                inner = entries[part] = YamlValue({}, position)
            entries = inner.content
        if parts[0] == "hyperparameters" and len(parts) > 1:
            # An option replaces the file's value of the same hyperparameter and of its parts. A value that contains it
            # can stay, because the script applies data.size after data.
            for stated in [name for name in entries if f"{name}.".startswith(f"{parts[-1]}.")]:
                del entries[stated]
        entries[parts[-1]] = value

    def build(self) -> Any:
        """Return the job, with defaults in place of values that cannot be read."""
        return self._instance(self._section, YamlValue(self._root, FilePosition("")), "")

    def _stop(self, text: str, position: FilePosition) -> NoReturn:
        raise_problems([JobProblem("", text, position=position)], self.source)
        raise AssertionError

    def _add(self, key: str, text: str, position: FilePosition | None = None) -> Any:
        self.source.problems.append(JobProblem(key, text, position=position))
        if key:  # else all that follows from the rules would be left out, for a name that nothing depends on
            self.source.unread.add(key)
        return _UNREAD

    def _place(self, key: str) -> tuple[list[str], Any]:
        """Return the parts of an option's key, of which the last may have dots, and the type of its value."""
        parts: list[str] = []
        kind: Any = self._section
        rest = key
        while rest:
            plain = without_none(kind)
            inner = get_args(plain)[1] if get_origin(plain) is dict else Any
            if not is_section(plain) and not is_section(inner):
                return [*parts, rest], inner
            name, _, rest = rest.partition(".")
            parts.append(name)
            field = keys_of(plain).get(name) if is_section(plain) else None
            kind = inner if field is None else field.kind
        return parts, kind

    def _instance(self, section: type, value: YamlValue, key: str) -> Any:
        """Return an instance of a section; what cannot be read has its default, or an empty value."""
        fields = keys_of(section)
        found: dict[str, Any] = {}
        for name, inner in value.content.items():
            path = _join(key, name)
            self.source.positions[path] = inner.position
            field = fields.get(name)
            if field is None:
                self._unknown(section, name, key)
            elif inner.content is not None:  # a key without a value, perhaps above comments, counts as left out
                converted = self._converted(field.kind, inner, path, field.about)
                if converted is not _UNREAD:
                    found[name] = converted
        for name, field in fields.items():
            path = _join(key, name)
            if name in found or not field.is_required:
                continue
            if path not in self.source.unread:
                example = f", as in {name}: {field.about.example}"
                self._add(path, f"{path} is missing{example}.", value.position if key else None)
            found[name] = _empty(field)
        return section(**found)

    def _unknown(self, section: type, name: str, key: str) -> None:
        """Report an unknown key; the key that is meant by it is not missing."""
        where = f"{key} has no key {name}" if key else f"{name} is not a key of a job file"
        hint, meant = suggestion(name, section, self._section)
        self._add(_join(key, name), f"{where}.{hint}")
        if meant is not None:
            self.source.unread.add(_join(key, meant))

    def _converted(  # noqa: PLR0911 - one for each kind of value
        self, field_kind: Any, value: YamlValue, key: str, about: JobKey
    ) -> Any:
        kind = without_none(field_kind)
        content = value.content
        if kind is Any:
            self._locate(value, key)
            return value.plain()
        if is_section(kind) and isinstance(content, dict):
            return self._instance(kind, value, key)
        if get_origin(kind) is dict and isinstance(content, dict):
            return self._names(get_args(kind)[1], value, key, about)
        if get_origin(kind) is list and isinstance(content, list):
            return self._items(get_args(kind)[0], value, key)
        if not _is_scalar(kind, content):
            return self._wrong(value, key, kind, about)
        if about.least is not None and content < about.least:
            return self._add(key, f"{key} is {value.written}; expected at least {about.least:g}.")
        return content

    def _locate(self, value: YamlValue, key: str) -> None:
        for name, inner in value.content.items() if isinstance(value.content, dict) else ():
            self.source.positions[_join(key, name)] = inner.position
            self._locate(inner, _join(key, name))

    def _names(self, kind: Any, value: YamlValue, key: str, about: JobKey) -> Any:
        required = [one.name for one in keys_of(kind).values() if one.is_required] if is_section(kind) else []
        if any(name in value.content and not isinstance(value.content[name].content, dict) for name in required):
            return self._add(key, f"{key} lacks a name for each of its entries, as in {key}: {about.example}.")
        found: dict[str, Any] = {}
        for name, inner in value.content.items():
            path = _join(key, name)
            self.source.positions[path] = inner.position
            if inner.content is None and kind is not Any:
                empty = " Write '' for an empty text." if kind is str else f" As in {key}: {about.example}."
                self._add(path, f"{path} has no value.{empty}")
                continue
            converted = self._converted(kind, inner, path, JobKey("", example=about.example if required else ""))
            if converted is not _UNREAD:
                found[name] = converted
        return found

    def _items(self, kind: Any, value: YamlValue, key: str) -> list[Any]:
        items = []
        for number, inner in enumerate(value.content, 1):
            path = f"{key}.{number}"
            self.source.positions[path] = inner.position
            items.append(self._converted(kind, inner, path, JobKey("")))
        return [item for item in items if item is not _UNREAD]

    def _wrong(self, value: YamlValue, key: str, kind: Any, about: JobKey) -> Any:
        """Report a value of the wrong type, with what it is and how it should look."""
        name = key.rpartition(".")[2]
        hint = f" For example, {name}: {about.example}." if about.example else ""
        if kind is str and not isinstance(value.content, (dict, list)):
            hint = f" Quote it: {name}: '{shown(name, value.written)}'."
        elif get_origin(kind) is Literal:
            hint = did_you_mean(value.written, get_args(kind))
        what = value.kind if kind is str else _quoted(value, key)
        return self._add(key, f"{key} is {what}; expected {expected(kind, about)}.{hint}")


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _is_scalar(kind: Any, content: Any) -> bool:
    """Return whether a value has the type of a text, a word of several, true and false, or a number."""
    if get_origin(kind) is Literal:
        return content in get_args(kind)
    if isinstance(content, bool) or kind in {str, bool}:
        return kind in {str, bool} and isinstance(content, kind)
    if kind is int:
        return isinstance(content, int)
    is_number = kind is float or get_origin(kind) in {types.UnionType, Union}
    return is_number and isinstance(content, (int, float)) and math.isfinite(content)


def _quoted(value: YamlValue, key: str) -> str:
    """Return a value as an error shows it: not what may be a secret, and not all of a long text."""
    if not isinstance(value.content, (str, int, float)) or key.partition(".")[0] in _NOT_QUOTED:
        return value.kind
    text = str(shown(key, value.written))
    if isinstance(value.content, str):
        return repr(text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}...")
    return text


def _empty(field: KeyField) -> Any:
    """Return a value for a required key whose own could not be read."""
    kind = without_none(field.kind)
    return get_args(kind)[0] if get_origin(kind) is Literal else (get_origin(kind) or kind)()
