"""Reading a job: from a YAML file and the options that win over it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser, Namespace

from lightning_sm.errors import SubmitError
from lightning_sm.submit.spec import Job

_HYPERPARAMETER = "--hyperparameters."


def add_arguments(parser: ArgumentParser) -> None:
    """Add an option for every key of a job file, and one for the file itself.

    Args:
        parser: The parser.
    """
    parser.add_argument("--job", action="config", help="YAML file with any of the options below")
    parser.add_class_arguments(Job, as_group=False)


def parse_job(parser: ArgumentParser, argv: Sequence[str]) -> tuple[Job, Namespace]:
    """Parse options, and make the job of them.

    Args:
        parser: Has the arguments of ``add_arguments``, and perhaps others.
        argv: The options.

    Returns:
        The job, and everything that was parsed.

    Raises:
        ArgumentError: The options or the file are wrong; the message names key and value.
    """
    words, hyperparameters = _split_hyperparameters(argv)
    options = parser.parse_args(words)
    # A key without a value, perhaps because all of its lines are comments, is as good as none.
    for name, default in vars(parser.get_defaults()).items():
        options[name] = default if options[name] is None else options[name]
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # the name before 4.49
    values = vars(instantiate(options))
    # The last file, where there are several.
    folder = Path(os.fspath(options.job[-1])).absolute().parent if options.job else Path.cwd()
    for name in ("config", "source_dir"):
        values[name] = None if values[name] is None else str(folder / values[name])
    job = Job(**{name: values[name] for name in Job.__dataclass_fields__})
    _check_names(job)
    _override(job.hyperparameters, hyperparameters)
    return job, options


def _split_hyperparameters(argv: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Take out ``--hyperparameters.NAME=VALUE``: NAME is one key, dots and all, and not a path into a dict."""
    words, hyperparameters, left = list[str](), dict[str, Any](), list(argv)
    values = ArgumentParser(exit_on_error=False)
    values.add_argument("--value", type=Any)  # reads text as values in a job file are read
    while left:
        word = left.pop(0)
        if not word.startswith(_HYPERPARAMETER):
            words.append(word)
            continue
        name, equals, text = word.removeprefix(_HYPERPARAMETER).partition("=")
        if not equals and not left:
            raise ArgumentError(None, f"{word}: expected a value, as in {word}=1.")
        text = text if equals else left.pop(0)
        hyperparameters[name] = values.parse_args([f"--value={text}"]).value
    return words, hyperparameters


def _override(hyperparameters: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Put options over the file's values: those of the same name, of a part of it, and of what it is a part of."""
    for name, value in options.items():
        for stated in [key for key in hyperparameters if key == name or key.startswith(f"{name}.")]:
            del hyperparameters[stated]
        hyperparameters[name] = value  # the last one wins, and what is dotted wins over a dict


def _check_names(job: Job) -> None:
    for key, value in vars(job).items():
        wrong = [name for name in value if not isinstance(name, str)] if isinstance(value, dict) else []
        if wrong:
            raise ArgumentError(None, f"{key}: the name {wrong[0]!r} is a {type(wrong[0]).__name__}; put it in quotes.")


def read_job(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Job:
    """Read a job file.

    Args:
        path: The file.
        overrides: Options that win over the file, such as ``["--groups.trainer.count=4"]``.

    Raises:
        SubmitError: The file cannot be read, has an unknown key, a value of the wrong type, or lacks a key.
    """
    parser = ArgumentParser(exit_on_error=False)
    add_arguments(parser)
    try:
        return parse_job(parser, ["--job", os.fspath(path), *overrides])[0]
    except ArgumentError as error:
        raise SubmitError(f"{os.fspath(path)}: {error}") from error
