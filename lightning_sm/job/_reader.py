"""JSON of the service and of the toolkits, read with errors that name file, field and value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_sm.errors import JobConfigError
from lightning_sm.job.redaction import shown


@dataclass(frozen=True)
class Source:
    """One JSON object and its origin.

    Attributes:
        origin: File or variable that the object came from.
        fields: The fields of the object.
    """

    origin: str
    fields: Mapping[str, Any]

    @classmethod
    def load(cls, path: Path) -> Source | None:
        """Read a file; None if it does not exist.

        Raises:
            JobConfigError: The file cannot be read, or does not hold a JSON object.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise JobConfigError(f"{path}: cannot be read ({error}).") from error
        return cls.parse(str(path), text)

    @classmethod
    def from_variable(cls, env: Mapping[str, str], variable: str) -> Source | None:
        """Read an environment variable; None if it is unset or empty.

        Raises:
            JobConfigError: The variable does not hold a JSON object.
        """
        text = env.get(variable)
        return cls.parse(variable, text) if text else None

    @classmethod
    def parse(cls, origin: str, text: str) -> Source:
        """Parse the text of a JSON object.

        Raises:
            JobConfigError: The text is something else.
        """
        value = parse_json(origin, text)
        if not isinstance(value, dict):
            raise JobConfigError(f"{origin}: expected a JSON object, got {_shown(value)}.")
        return cls(origin, value)

    def error(self, name: str, value: object, expected: str) -> JobConfigError:
        """Describe a wrong value of a field."""
        return JobConfigError(f"{self.origin}: field {name!r} is {_shown(value, name)}; expected {expected}.")

    def text(self, name: str) -> str:
        """Return a field that must be a non-empty string.

        Raises:
            JobConfigError: The field is missing or something else.
        """
        value = self.fields.get(name)
        if not isinstance(value, str) or not value:
            raise self.error(name, value, "a non-empty string")
        return value

    def optional_text(self, name: str) -> str | None:
        """Return a field that is a string; None if it is missing, null or empty.

        Raises:
            JobConfigError: The field is something else.
        """
        if self.fields.get(name) in (None, ""):
            return None
        return self.text(name)

    def names(self, name: str) -> tuple[str, ...]:
        """Return a field that must be a list of distinct, non-empty strings.

        Raises:
            JobConfigError: The field is missing, empty or something else.
        """
        value = self.fields.get(name)
        if not isinstance(value, list) or not value or not all(isinstance(item, str) and item for item in value):
            raise self.error(name, value, "a non-empty list of names")
        if len(set(value)) != len(value):
            raise self.error(name, value, "every name once")
        return tuple(value)


def parse_json(origin: str, text: str) -> Any:
    """Parse JSON.

    Raises:
        JobConfigError: The text is not valid JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # numbers of more than 4300 digits raise ValueError, too
        begin = shown("", text)[:80]
        raise JobConfigError(f"{origin}: not valid JSON ({error}); it begins with {begin!r}.") from error


def _shown(value: object, name: str = "") -> str:
    return "missing" if value is None else f"{shown(name, value)!r} ({type(value).__name__})"
