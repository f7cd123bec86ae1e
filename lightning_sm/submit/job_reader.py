"""The reader of job files: checks values against the description of the keys, and says what to correct, and where."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from lightning_sm._text import closest
from lightning_sm.job.redaction import shown
from lightning_sm.submit.job_keys import JobKey, KeyField, expected, is_section, keys_of, suggestion, without_none
from lightning_sm.submit.overrides import Override
from lightning_sm.submit.problems import FilePosition, JobProblem, JobSource, raise_problems
from lightning_sm.submit.yaml_values import YamlError, YamlValue, read_yaml

# What a value is replaced by that could not be read.
_UNREAD = object()
_WHOLE = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)")
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(s|sec|seconds?|m|min|minutes?|h|hours?|d|days?)")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_SHOWN_CHARS = 60
# Their values may be secrets, whatever their names.
_NOT_QUOTED = ("environment", "hyperparameters")


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
            text = Path(path).read_bytes().decode("utf-8-sig")
            value, problems = read_yaml(text, name)
        except FileNotFoundError:
            self._stop("the file does not exist.", position)
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
        place = self._place(override.key, self._section, position)
        if place is None:
            return
        parts, kind = place
        value = self._value_of(override, kind, position)
        if value is None:
            return
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

    # ---- options

    def _place(
        self, key: str, section: type, position: FilePosition, above: tuple[str, ...] = ()
    ) -> tuple[tuple[str, ...], Any] | None:
        """Return the parts of an option's key, and the type of its value."""
        name, _, rest = key.partition(".")
        field = keys_of(section).get(name)
        parts = (*above, name)
        if field is None:
            around = ".".join(above)
            hint = suggestion(name, section, self._section)[0]
            self._add(".".join(parts), f"{around} has no key {name}.{hint}", position)
            return None
        kind = without_none(field.kind)
        if not rest:
            return parts, field.kind
        if is_section(kind):
            return self._place(rest, kind, position, parts)
        if get_origin(kind) is dict:
            inner = get_args(kind)[1]
            entry, _, last = rest.rpartition(".")
            if is_section(inner) and entry:
                return self._place(last, inner, position, (*parts, entry))
            return (*parts, rest), inner
        self._add(
            ".".join(parts),
            f"{'.'.join(parts)} has no keys below it: its value is {expected(kind, field.about)}.",
            position,
        )
        return None

    def _value_of(self, override: Override, kind: Any, position: FilePosition) -> YamlValue | None:
        plain = without_none(kind)
        if plain is str:
            is_none = kind is not str and override.text == "null"
            return YamlValue(None if is_none else override.text, position)
        try:
            value, problems = read_yaml(override.text, override.option, override.key)
        except YamlError as error:
            if kind is Any:
                return YamlValue(override.text, position)
            self._add(override.key, f"the value is not YAML: {error}", position)
            return None
        if kind is Any and (problems or _is_text_with_colon(value)):
            return YamlValue(override.text, position)
        for problem in problems:
            self._add(problem.key, problem.text, position)
        return _moved(value, position)

    # ---- values

    def _instance(self, section: type, value: YamlValue, key: str) -> Any:
        """Return an instance of a section; what cannot be read has its default, or an empty value."""
        fields = keys_of(section)
        found: dict[str, Any] = {}
        meant: set[str] = set()
        for name, inner in value.content.items():
            path = _join(key, name)
            self.source.positions[path] = inner.position
            field = fields.get(name)
            if field is None:
                meant |= self._unknown(section, name, inner, key)
            elif inner.content is not None:  # a key without a value, perhaps above comments, counts as left out
                converted = self._converted(field.kind, inner, path, field.about)
                if converted is not _UNREAD:
                    found[name] = converted
        for name, field in fields.items():
            path = _join(key, name)
            if name in found or not field.is_required:
                continue
            if name not in meant and path not in self.source.unread:
                example = f", as in {name}: {field.about.example}"
                self._add(path, f"{path} is missing{example}.", value.position if key else None)
            found[name] = _empty(field)
        return section(**found)

    def _unknown(self, section: type, name: str, value: YamlValue, key: str) -> set[str]:
        """Report an unknown key, and return those keys of the section that may be meant by it."""
        path = _join(key, name)
        where = f"{key} has no key {name}" if key else f"{name} is not a key of a job file"
        owner = self._owner(value)
        hint, meant = suggestion(name, section, self._section)
        if owner is not None:
            hint, meant = f" Indent it below {owner}, if it belongs there.", owner if section is self._section else None
        self._add(path, f"{where}.{hint}")
        if meant is None:
            return set()
        self.source.unread.add(_join(key, meant))
        return {meant}

    def _owner(self, value: YamlValue) -> str | None:
        """Return the key below which a value could stand that is a section of its own."""
        if not isinstance(value.content, dict) or not value.content:
            return None
        for name, field in keys_of(self._section).items():
            kind = without_none(field.kind)
            if get_origin(kind) is dict and is_section(inner := get_args(kind)[1]):
                required = {one.name for one in keys_of(inner).values() if one.is_required}
                if required and required <= value.content.keys() <= keys_of(inner).keys():
                    return name
        return None

    def _converted(self, field_kind: Any, value: YamlValue, key: str, about: JobKey) -> Any:
        kind = without_none(field_kind)
        if kind is Any:
            self._locate(value, key)
            return value.plain()
        if is_section(kind):
            return self._instance(kind, value, key) if _is_mapping(value) else self._wrong(value, key, kind, about)
        if get_origin(kind) is dict:
            return self._names(get_args(kind)[1], value, key, about)
        if get_origin(kind) is list:
            return self._items(get_args(kind)[0], value, key, about)
        return self._scalar(kind, value, key, about)

    def _locate(self, value: YamlValue, key: str) -> None:
        for name, inner in value.content.items() if isinstance(value.content, dict) else ():
            self.source.positions[_join(key, name)] = inner.position
            self._locate(inner, _join(key, name))

    def _names(self, kind: Any, value: YamlValue, key: str, about: JobKey) -> Any:
        if not isinstance(value.content, dict):
            return self._wrong(value, key, dict, about)
        if is_section(kind) and value.content.keys() & keys_of(kind).keys():
            required = [one.name for one in keys_of(kind).values() if one.is_required]
            if set(required) <= value.content.keys() and not isinstance(value.content[required[0]].content, dict):
                return self._add(key, f"{key} lacks a name for each of its entries, as in {key}: {about.example}.")
        found: dict[str, Any] = {}
        for name, inner in value.content.items():
            path = _join(key, name)
            self.source.positions[path] = inner.position
            if inner.content is None and kind is not Any:
                empty = " Write '' for an empty text." if kind is str else f" As in {key}: {about.example}."
                self._add(path, f"{path} has no value.{empty}")
                continue
            converted = self._converted(
                kind, inner, path, JobKey("", example=about.example if is_section(kind) else "")
            )
            if converted is not _UNREAD:
                found[name] = converted
        return found

    def _items(self, kind: Any, value: YamlValue, key: str, about: JobKey) -> Any:
        if not isinstance(value.content, list):
            return self._wrong(value, key, list, about)
        if kind is Any:
            return value.plain()
        items = []
        for number, inner in enumerate(value.content, 1):
            self.source.positions[f"{key}.{number}"] = inner.position
            if inner.content is None or isinstance(inner.content, (dict, list)):
                self._add(f"{key}.{number}", f"item {number} of {key} is {inner.kind}; expected text.")
                continue
            items.append(self._scalar(kind, inner, f"{key}.{number}", JobKey("")))
        return [item for item in items if item is not _UNREAD]

    def _word(self, kind: Any, value: YamlValue, key: str, about: JobKey) -> Any:
        choices = get_args(kind)
        if value.content in choices:
            return value.content
        close = closest(value.written or str(value.content), choices)
        hint = f" Did you mean {close}?" if close else ""
        return self._add(key, f"{key} is {_quoted(value, key)}; expected {expected(kind, about)}.{hint}")

    def _scalar(self, kind: Any, value: YamlValue, key: str, about: JobKey) -> Any:
        if isinstance(value.content, (dict, list)):
            return self._wrong(value, key, kind, about)
        if get_origin(kind) is Literal:
            return self._word(kind, value, key, about)
        if kind is str:
            return self._text(value, key)
        if kind is bool:
            return value.content if isinstance(value.content, bool) else self._wrong(value, key, kind, about)
        return self._number(kind, value, key, about)

    def _text(self, value: YamlValue, key: str) -> Any:
        if isinstance(value.content, str):
            return value.content
        name = key.rpartition(".")[2]
        what = value.kind if _is_number(value) else json.dumps(value.content)
        if not _is_number(value) and value.written.lower() != what:
            what = f"{value.written}, which YAML reads as {what}"
        written = shown(name, value.written or str(value.content))
        return self._add(key, f"{key} is {what}; expected text. Quote it: {name}: '{written}'.")

    def _number(self, kind: Any, value: YamlValue, key: str, about: JobKey) -> Any:
        content = value.content
        if not _is_number(value) or (kind is int and not isinstance(content, int)):
            return self._wrong(value, key, kind, about)
        if isinstance(content, int) and not _WHOLE.fullmatch(value.written):
            text = f"{key} is {value.written}, which YAML reads as {content}; expected {expected(kind, about)}."
            return self._add(key, f"{text} Write {content} if that is meant.")
        if not math.isfinite(content):
            return self._add(key, f"{key} is {value.written}; expected {expected(kind, about)}.")
        if about.least is not None and content < about.least:
            return self._add(key, f"{key} is {value.written}; expected at least {about.least:g}.")
        return content

    def _wrong(self, value: YamlValue, key: str, kind: Any, about: JobKey) -> Any:
        """Report a value of the wrong type, with what it is and how it should look."""
        name = key.rpartition(".")[2]
        meant = _meant(value, kind, about)
        if meant is not None:
            hint = f" Write {name}: {meant}."
        else:
            hint = f" For example, {name}: {about.example}." if about.example else ""
        return self._add(key, f"{key} is {_quoted(value, key)}; expected {expected(kind, about)}.{hint}")


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _is_mapping(value: YamlValue) -> bool:
    return isinstance(value.content, dict)


def _is_number(value: YamlValue) -> bool:
    return isinstance(value.content, (int, float)) and not isinstance(value.content, bool)


def _quoted(value: YamlValue, key: str) -> str:
    """Return a value as an error shows it: not what may be a secret, and not all of a long text."""
    if isinstance(value.content, (dict, list)) or key.partition(".")[0] in _NOT_QUOTED:
        return value.kind
    if value.content is None:
        return "empty"
    text = shown(key, value.written or str(value.content))
    if isinstance(value.content, str):
        text = repr(text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}...")
    return str(text)


def _meant(value: YamlValue, kind: Any, about: JobKey) -> str | None:
    """Return how a value is written that was probably meant."""
    content = value.content
    if kind is list and isinstance(content, str):
        return f"[{content}]" if re.fullmatch(r"[\w./-]+", content) else None
    if kind is int and isinstance(content, float) and content.is_integer():
        return str(int(content))
    if not isinstance(content, str):
        return None
    word = content.strip().lower()
    if kind is bool and word in {"true", "false", "yes", "no", "on", "off"}:
        return "true" if word in {"true", "yes", "on"} else "false"
    if kind in {int, float} and re.fullmatch(r"[0-9]+(\.[0-9]+)?" if kind is float else r"[0-9]+", word):
        return word
    time = _TIME.fullmatch(word) if about.unit == "seconds" else None
    return None if time is None else f"{float(time[1]) * _SECONDS[time[2][0]]:.0f}"


def _empty(field: KeyField) -> Any:
    """Return a value for a required key whose own could not be read."""
    kind = without_none(field.kind)
    if get_origin(kind) is Literal:
        return get_args(kind)[0]
    made = get_origin(kind) or kind
    return 1 if made is int else made()


def _is_text_with_colon(value: YamlValue | None) -> bool:
    """Return whether a text such as ``a:`` was read as a name without a value."""
    content = None if value is None else value.content
    return isinstance(content, dict) and bool(content) and all(one.content is None for one in content.values())


def _moved(value: YamlValue | None, position: FilePosition) -> YamlValue:
    """Return a value with the option as its only position."""
    if value is None:
        return YamlValue(None, position)
    content: Any = value.content
    if isinstance(content, Mapping):
        content = {name: _moved(one, position) for name, one in content.items()}
    elif isinstance(content, Sequence) and not isinstance(content, str):
        content = [_moved(one, position) for one in content]
    return YamlValue(content, position, value.written)
