"""Conversion of ``hyperparameters.json`` to a LightningCLI script's arguments, and back.

SageMaker stores only text, and each way of starting a job converts values to text differently:

=======================================  ========  ===================  ===============  ===========
way                                      ``None``  ``{"a": None}``      ``"a b"``        ``1e-3``
=======================================  ========  ===================  ===============  ===========
SDK v2, generic ``Estimator``            None      {'a': None}          a b              0.001
SDK v2, framework or ``source_dir``      null      {"a": null}          "a b" (quoted)   0.001
SDK v3, ``ModelTrainer``                 null      {"a": null}          a b              0.001
=======================================  ========  ===================  ===============  ===========

``to_argv`` undoes any of these conversions without knowing which one was used, and changes as little as possible:

1. If *every* value is valid JSON, the job was started the second way, and JSON strings lose their quotes. The text
   between the quotes is final: the rules below do not change it. In a tuning job, the service writes the values that it
   chooses as raw text; there, every value that is a JSON string loses its quotes, whatever the other values are.
2. ``None`` becomes ``null``; ``nan``, ``inf``, ``NaN``, ``Infinity`` and their negatives become YAML's ``.nan`` and
   ``.inf``, the only spellings that jsonargparse reads as numbers.
3. Lists, tuples and dicts in Python's notation become JSON. JSON lists and dicts keep their text, unless YAML would
   misread it (``NaN``, surrogate pairs as in emoji, unprintable characters, tabs); then they are encoded again.
4. All other text is unchanged, so that a ``str`` parameter receives "007", "1e-3" or "" exactly.

No rule can restore what the text does not contain:

- With SDK v3 and the generic Estimator, a string that looks like a value in rules 2 and 3 ("None", "nan", "('a', 1)")
  is taken for that value.
- With either of them, if all values happen to be valid JSON, strings that are themselves in double quotes lose them.
- Python's ``{'a': nan}`` or ``{'a': inf}`` (generic Estimator) is unchanged: ``nan`` and ``inf`` are names there.
- Keys of dicts become strings, as JSON requires, and tuples become lists.
- The string "null" and None are the same for an ``Optional[str]`` parameter: jsonargparse has no quoting there.
- A value that is just "--" does not reach its option: argparse removes it in Python 3.11 and 3.12.1 (not in 3.13).
"""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_sm.errors import HyperparameterError
from lightning_sm.job.redaction import shown

# SageMaker API, CreateTrainingJob, HyperParameters.
_MAX_VALUE_LENGTH = 2500

# Keys that SDKs and the tuner add for the toolkit; no script has options for them.
_DROPPED_KEYS = re.compile(r"sagemaker_.*|_tuning_.*|default_user_module_name|mp_parameters", re.DOTALL)
# Added by the service to the training jobs of a tuning job only.
TUNING_OBJECTIVE = "_tuning_objective_metric"
# What a subcommand may look like.
SUBCOMMAND = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")

_YAML_SPELLING = {
    "None": "null",
    **dict.fromkeys(("nan", "NaN"), ".nan"),
    **dict.fromkeys(("inf", "Infinity"), ".inf"),
    **dict.fromkeys(("-inf", "-Infinity"), "-.inf"),
}
# JSON that is rejected or misread by PyYAML, which jsonargparse uses to read values: PyYAML accepts no tabs between
# tokens, does not join surrogate pairs, folds the line separators U+0085, U+2028 and U+2029, and rejects the rest.
_NOT_YAML = re.compile(r"NaN|Infinity|\\u[dD][89a-fA-F]|[^\n -~]")
_ESCAPED_IN_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")

_NOT_JSON = object()


def to_argv(hyperparameters: Mapping[str, str], *, config_files: Sequence[str] = ()) -> list[str]:
    """Convert the content of ``hyperparameters.json`` to command line arguments.

    Every option is a single ``--key=value``, so that no value is taken for an option or split by a shell. Options are
    sorted: ``--data={...}`` comes before ``--data.batch_size=32``, and both after the config files that they override.

    Args:
        hyperparameters: Keys and undecoded values. ``subcommand`` becomes the first argument; ``config`` is a path or a
            list of paths; keys meant for the toolkit are dropped.
        config_files: Paths of config files that precede those of the ``config`` key.

    Returns:
        For example ``["fit", "--config=gpu.yaml", "--data.batch_size=32"]``.

    Raises:
        HyperparameterError: A key cannot be an option, a value cannot be an argument, or the subcommand is not a word.
    """
    kept, is_json = _of_script(hyperparameters)
    texts = {key: _as_yaml(value, is_json=is_json) for key, value in kept.items()}
    subcommand = texts.pop("subcommand", "null")
    if subcommand != "null" and not SUBCOMMAND.fullmatch(subcommand):
        msg = f"Hyperparameter 'subcommand' is {subcommand!r}; expected a word such as 'fit' or 'validate'."
        raise HyperparameterError(msg)
    configs = [*config_files, *_paths(texts.pop("config", "null"))]
    return [
        *([] if subcommand == "null" else [subcommand]),
        *(_option("config", path) for path in configs),
        *(_option(key, texts[key]) for key in sorted(texts)),
    ]


def values_of(hyperparameters: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of a script's hyperparameters as objects; ``to_argv`` returns them as text.

    Args:
        hyperparameters: Keys and undecoded values; keys meant for the toolkit are dropped.
    """
    kept, is_json = _of_script(hyperparameters)
    return {key: _value(text, is_json=is_json) for key, text in kept.items()}


def _of_script(hyperparameters: Mapping[str, str]) -> tuple[dict[str, str], bool]:
    """Return a script's hyperparameters as text, and whether rule 1 at the top of this module applies."""
    kept = {key: value for key, value in hyperparameters.items() if not is_for_toolkit(key)}
    is_json = is_tuned(hyperparameters) or all(_json(value) is not _NOT_JSON for value in kept.values())
    return kept, is_json


def encode(config: Mapping[str, Any]) -> dict[str, str]:
    """Convert a configuration to hyperparameters from which ``to_argv`` restores it.

    Use it with the generic Estimator and ``ModelTrainer``, which pass strings on unchanged. Framework estimators encode
    values themselves, so pass them the values instead. Do not add to the result, because a single value that is not
    JSON would turn the quotes around all other values into text (rule 1 above).

    A nested dict remains one JSON value: only the script's parser can tell whether ``{"data": {"size": 3}}`` is a group
    of options, a class with ``init_args`` or the value of a dict parameter, and jsonargparse reads JSON for all three.
    Write ``{"data.size": 3}`` for options that belong to no class, or to keep one value tunable.

    Args:
        config: JSON-compatible values by option name, dotted or nested.

    Raises:
        HyperparameterError: A key cannot be an option, or a value cannot be converted to JSON or is too long in JSON.
    """
    encoded: dict[str, str] = {}
    for key, value in config.items():
        check_name(key)
        try:
            encoded[key] = json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            msg = f"Hyperparameter {key!r} is {shown(key, value)!r}, which cannot be converted to JSON ({error})."
            raise HyperparameterError(msg) from error
        if len(encoded[key]) > _MAX_VALUE_LENGTH:
            msg = (
                f"Hyperparameter {key!r} has {len(encoded[key])} characters in JSON; SageMaker allows "
                f"{_MAX_VALUE_LENGTH}. Put it in a file beside the script, and set the hyperparameter config to it."
            )
            raise HyperparameterError(msg)
    return encoded


def is_for_toolkit(key: str) -> bool:
    """Return whether a hyperparameter is meant for SageMaker's toolkits or tuner, not for the script.

    Args:
        key: Name of the hyperparameter.
    """
    return _DROPPED_KEYS.fullmatch(key) is not None


def is_tuned(hyperparameters: Mapping[str, str]) -> bool:
    """Return whether a training job belongs to a tuning job, which chooses some of its hyperparameters.

    Args:
        hyperparameters: The content of ``hyperparameters.json``.
    """
    return TUNING_OBJECTIVE in hyperparameters


def unquoted(text: str | None) -> str | None:
    """Return the text of one hyperparameter, without the quotes that framework estimators put around it.

    Args:
        text: A value of ``hyperparameters.json``, or None.
    """
    value = _NOT_JSON if text is None else _json(text)
    return value if isinstance(value, str) else text


def json_or_text(text: str) -> Any:
    """Decode a hyperparameter as sagemaker-training does: text that is not JSON stays as it is.

    Args:
        text: The undecoded value.
    """
    value = _json(text)
    return text if value is _NOT_JSON else value


def toolkit_value(text: str) -> Any:
    """Decode a hyperparameter meant for the toolkit: framework estimators write JSON, others write Python literals.

    Args:
        text: The undecoded value.
    """
    value = _json(text)
    return _literal(text) if value is _NOT_JSON else value


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # numbers of more than 4300 digits raise ValueError, too
        return _NOT_JSON


def _literal(text: str) -> Any:
    """Return the value that a text represents in Python's notation, or the text if it represents none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler warns about text such as "[1](2)"
            return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def _python_container(text: str) -> Any:
    """Return the list, tuple or dict that a text represents in Python's notation, or None if it represents none."""
    value = _literal(text) if text.startswith(("[", "{", "(")) else None
    return value if isinstance(value, (list, tuple, dict)) else None


def _as_yaml(text: str, *, is_json: bool) -> str:
    """Return the text from which jsonargparse reads the intended value; see the rules at the top of this module."""
    value = _json(text)
    if is_json and isinstance(value, str):
        return value
    if text in _YAML_SPELLING:
        return _YAML_SPELLING[text]
    if isinstance(value, (list, dict)) and not _NOT_YAML.search(text):
        return text
    container = _python_container(text) if value is _NOT_JSON else value
    if not isinstance(container, (list, tuple, dict)):
        return text
    try:
        return _dump(container)
    except (TypeError, RecursionError):  # a configuration has no sets or bytes and is never this deep, so it is text
        return text


def _value(text: str, *, is_json: bool) -> Any:
    """Return the value that a text represents, by the rules at the top of this module."""
    value = _json(text)
    if is_json and isinstance(value, str):
        return value
    if text in _YAML_SPELLING:
        return None if text == "None" else float(text)
    if value is _NOT_JSON:
        value = _python_container(text)
        return text if value is None else value
    return text if isinstance(value, str) else value


def _dump(value: Any) -> str:
    """Return JSON that YAML reads as the same value, unlike that of ``json.dumps`` for nan and some characters."""
    if isinstance(value, dict):
        texts = {key if isinstance(key, str) else json.dumps(key): _dump(item) for key, item in value.items()}
        return "{" + ", ".join(f"{_dump(key)}: {text}" for key, text in texts.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_dump, value)) + "]"
    if isinstance(value, str):
        quoted = json.dumps(value, ensure_ascii=False)
        return _ESCAPED_IN_YAML.sub(lambda match: f"\\u{ord(match.group()):04x}", quoted)
    if isinstance(value, float) and not math.isfinite(value):
        return _YAML_SPELLING[repr(value)]
    return json.dumps(value)


def _paths(config: str) -> list[str]:
    """Return the paths that the ``config`` key holds; text that is not a list is one path or an inline config."""
    paths = _json(config)
    if paths is None:
        return []
    if not isinstance(paths, list):
        return [config]
    if not all(isinstance(path, str) for path in paths):
        msg = f"Hyperparameter 'config' is {shown('config', config)!r}; expected a path or a list of paths."
        raise HyperparameterError(msg)
    return paths


def check_name(key: str) -> None:
    """Check that a hyperparameter's name can be the name of an option.

    Args:
        key: The name.

    Raises:
        HyperparameterError: The name is empty, begins with a dash, or contains an equals sign or a space.
    """
    if not key or key.startswith("-") or re.search(r"[\s=]", key):
        msg = f"Hyperparameter {key!r} cannot be an option: its name is empty, begins with '-', or has '=' or a space."
        raise HyperparameterError(msg)


def _option(key: str, value: str) -> str:
    check_name(key)
    option = f"--{key}={value}"
    if "\0" in option or re.search("[\ud800-\udfff]", option):
        msg = f"Hyperparameter {key!r} is {shown(key, value)!r}: an argument cannot contain NUL or lone surrogates."
        raise HyperparameterError(msg)
    return option
