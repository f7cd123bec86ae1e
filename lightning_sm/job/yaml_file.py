"""The user's YAML or JSON files that map names to values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning_sm.errors import JobConfigError


def read_mapping(file: Path, what: str, example: str = "") -> dict[str, Any]:
    """Read a YAML or JSON file that maps names to values.

    Args:
        file: The file.
        what: What the file is, for messages, such as "file of prices".
        example: An example with all valid keys, shown if the file's content is not valid.

    Raises:
        JobConfigError: The file cannot be read, is malformed, or has invalid content.
    """
    import yaml  # noqa: PLC0415 - takes tens of milliseconds, and few commands need it

    try:
        text = file.read_text(encoding="utf-8")
        values = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise JobConfigError(f"The {what} {file} cannot be read: {error.strerror}.") from error
    except yaml.YAMLError as error:
        raise JobConfigError(f"The {what} {file} is not valid YAML: {yaml_problem(error)}.") from error
    except ValueError as error:  # not UTF-8, or malformed JSON
        raise JobConfigError(f"The {what} {file} is malformed: {error}.") from error
    shown = f" Example:\n{example}" if example else ""
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise JobConfigError(f"The {what} {file} is not a mapping from names to values.{shown}")
    unknown = sorted(set(values) - set(yaml.safe_load(example))) if example else []
    if unknown:
        raise JobConfigError(f"The {what} {file} has an unknown key: {unknown[0]}.{shown}")
    return values


def yaml_problem(error: Exception) -> str:
    """Return the problem in a YAML text and its position, without the line of text that YAML's message quotes."""
    mark = getattr(error, "problem_mark", None)
    place = "" if mark is None else f" in line {mark.line + 1}, column {mark.column + 1}"
    return f"{getattr(error, 'problem', None) or type(error).__name__}{place}"
