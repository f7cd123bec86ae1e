"""Command-line options that override keys of a job file, such as ``--groups.trainer.count=4``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from lightning_sm._arguments import did_you_mean
from lightning_sm.errors import SubmitError
from lightning_sm.submit.dataclass_fields import keys_of, suggestion


class Override(NamedTuple):
    """An option that overrides a key.

    Attributes:
        key: The key, with dots between its parts.
        text: The value.
        source: Where the value was given, for messages, such as ``--groups.trainer.count``.
        is_json: Whether the value is JSON rather than text typed by a user.
    """

    key: str
    text: str
    source: str
    is_json: bool = False


def parse_overrides(
    words: Sequence[str], section: type, own_options: Collection[str] = ()
) -> tuple[list[Override], list[str]]:
    """Separate the options that override keys from the rest of a command line.

    Args:
        words: The command line.
        section: The top-level section of the file.
        own_options: The command's other options, which stay in the rest.

    Returns:
        The overrides, and the rest of the command line.

    Raises:
        SubmitError: An option is unknown, or lacks its value.
    """
    overrides: list[Override] = []
    rest: list[str] = []
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        option, equals, text = word.partition("=")
        if not option.startswith("--") or option == "--" or option in own_options:
            rest.append(word)
            continue
        key = option.removeprefix("--")
        if key.partition(".")[0] not in keys_of(section):
            hint = did_you_mean(option, list(own_options)) or suggestion(key.partition(".")[0], section, section, "--")
            raise SubmitError(f"unknown option {option}.{hint}")
        if not equals:
            if not remaining or remaining[0].startswith("--"):
                raise SubmitError(f"{option}: expected a value, as in {option}=VALUE.")
            text = remaining.pop(0)
        overrides.append(Override(key, text, option))
    return overrides, rest
