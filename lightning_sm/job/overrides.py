"""Conversion of hyperparameters to a Hydra script's command line: ``name=value``, in Hydra's grammar."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from lightning_sm.errors import HyperparameterError
from lightning_sm.job.hyperparameters import check_name, values_of

# Hydra's own options, which are not overrides.
_OPTIONS = ("config-dir", "config-name", "config-path")
# Text that needs no quotes. All other text is quoted: a comma would start a sweep, a brace a dict.
_PLAIN = re.compile(r"[A-Za-z_][\w./-]*", re.ASCII)
_WORDS = frozenset({"null", "true", "false", "nan", "inf"})
_IMPOSSIBLE = re.compile("[\0\ud800-\udfff]")
_QUOTE_OR_END = re.compile(r"(?P<backslashes>\\*)(?:(?P<quote>')|\Z)")
_KEY = re.compile(r"[\w./-]+", re.ASCII)


def to_overrides(hyperparameters: Mapping[str, str]) -> list[str]:
    """Convert the content of ``hyperparameters.json`` to arguments of a Hydra script.

    Args:
        hyperparameters: Names and undecoded values. A name may begin with ``+`` or ``++``, which add keys that the
            configuration lacks. ``config-name``, ``config-dir`` and ``config-path`` become Hydra's own options.

    Returns:
        For example ``["--config-name=gpu", "trainer.max_epochs=3"]``.

    Raises:
        HyperparameterError: A name or a value cannot be expressed in Hydra's grammar.

    Source:
        Hydra 1.3, "Extended Override syntax", and ``OverrideLexer.g4``.
    """
    arguments = []
    values = values_of(hyperparameters)
    for name in sorted(values, key=lambda name: (name not in _OPTIONS, name)):
        check_name(name)
        value = values[name]
        arguments.append(f"--{name}={value}" if name in _OPTIONS else f"{name}={_element(name, value)}")
    return arguments


def _element(name: str, value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return _text(name, value)
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(_element(name, item) for item in value) + "]"
    for key in value:
        if not _KEY.fullmatch(str(key)):
            raise HyperparameterError(
                f"Hyperparameter {name!r} has the key {key!r}, but keys on Hydra's command line may contain only "
                "letters, digits and ._/-. Set the value in a configuration file."
            )
    return "{" + ",".join(f"{key}:{_element(name, item)}" for key, item in value.items()) + "}"


def _text(name: str, text: str) -> str:
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    if _IMPOSSIBLE.search(text):
        raise HyperparameterError(f"Hyperparameter {name!r}: an argument cannot contain NUL or lone surrogates.")
    return f"'{_QUOTE_OR_END.sub(_escaped, text)}'"


def _escaped(match: re.Match[str]) -> str:
    """Escape a quote, and the backslashes before it or before the closing quote."""
    return 2 * match["backslashes"] + (r"\'" if match["quote"] else "")
