"""The training script's command line, built from the job's hyperparameters and its ``config`` channel."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path

from lightning_sm.job.channels import CONFIG_CHANNEL
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.hyperparameters import is_for_toolkit, json_or_text, to_argv
from lightning_sm.job.redaction import shown, shown_arguments

logger = logging.getLogger(__name__)

_CONFIG_SUFFIXES = (".yaml", ".yml", ".json")


def job_arguments(job: SageMakerJob, folder: Path) -> list[str]:
    """Build the training script's arguments from the facts of a job.

    The files in a channel named ``config`` become ``--config`` options, which are not subject to the service's limit of
    2500 characters per hyperparameter. If a ``config`` hyperparameter names one of these files, only that file is used.

    Args:
        job: The facts of the job.
        folder: Base folder for relative config file paths.

    Raises:
        HyperparameterError: A hyperparameter cannot become an argument.
    """
    built = to_argv(job.hyperparameters)
    resolved = [_in_config_channel(argument, job, folder) for argument in built]
    if resolved != built:
        return resolved
    return to_argv(job.hyperparameters, config_files=_config_files(job))


def secret_options(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the ``--name=value`` and ``name=value`` arguments whose values are secret.

    Args:
        arguments: The result of ``job_arguments`` or ``to_overrides``.
    """
    options = [argument for argument in arguments if "=" in argument]
    names = [_option_name(option) for option in options if shown_arguments([option]) != [option]]
    return tuple(name for name in names if "," not in name)  # the names are passed on as a comma-separated list


def without_options(arguments: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the arguments without the options that have these names."""
    return [argument for argument in arguments if "=" not in argument or _option_name(argument) not in names]


def with_options_of_job(arguments: Sequence[str], names: Sequence[str], job: SageMakerJob, folder: Path) -> list[str]:
    """Return the arguments and the options that the launcher left out, in their original positions if possible.

    Args:
        arguments: This process's arguments, without the program.
        names: Names of the options that the launcher left out.
        job: The facts of the job, including the values of these options.
        folder: Base folder for relative config file paths.
    """
    options = [argument for argument in job_arguments(job, folder) if argument.startswith("-")]
    kept = without_options(options, names)
    before = len(arguments) - len(kept)
    if list(arguments[before:]) == kept:
        return [*arguments[:before], *options]
    return [*arguments, *(option for option in options if option not in kept)]


def _option_name(argument: str) -> str:
    return argument.partition("=")[0].lstrip("-")


def is_toolkit_rendering(argv: Sequence[str], job: SageMakerJob) -> bool:
    """Return whether sagemaker-training or an SDK v3 driver built a command line from the job's hyperparameters.

    Both write each hyperparameter as a ``--name value`` pair and lose its type (None becomes an empty string, and a
    dict becomes ``a=1,b=2``), which ``job_arguments`` keeps. A value that differs was written by the script's author
    (``run.sh``: ``python train.py --data.batch_size 64``). Such values take precedence, and a log line names them.

    Args:
        argv: This process's arguments, without the program.
        job: The facts of the job.
    """
    names = {name.lstrip("-") for name in argv[::2]}
    are_pairs = len(argv) > 0 and len(argv) % 2 == 0 and all(name.startswith("-") for name in argv[::2])
    wanted = {name for name in job.hyperparameters if not is_for_toolkit(name)}
    if not are_pairs or not wanted <= names <= set(job.hyperparameters):
        return False
    different = []
    for option, value in zip(argv[::2], argv[1::2], strict=True):
        name = option.lstrip("-")
        hyperparameter = job.hyperparameters[name]
        if _unquoted(value) not in _renderings(hyperparameter):
            different.append(f"{option} {shown(name, value)} (hyperparameter: {shown(name, hyperparameter)})")
    if different:
        logger.warning("The script's command line overrides the job's hyperparameters: %s.", ", ".join(different))
    return not different


def _renderings(hyperparameter: str) -> set[str]:
    """Return the values that either program may write for a hyperparameter, in the form that ``_unquoted`` returns."""
    value = json_or_text(hyperparameter)
    text = ",".join(f"{key}={value[key]}" for key in sorted(value)) if isinstance(value, dict) else str(value)
    # sagemaker-training, mapping.py, to_cmd_args; SDK v3, container_drivers/common/utils.py, safe_serialize.
    rendered = (hyperparameter, "" if value is None else text, json.dumps(value))
    return {_unquoted(text) for text in rendered}


def _unquoted(value: str) -> str:
    """Remove optional whitespace, and quotes and backslashes, which a shell before the script may have removed."""
    return re.sub(r"[\s'\"\\\\]", "", value)


def _in_config_channel(argument: str, job: SageMakerJob, folder: Path) -> str:
    """Replace the name in ``--config=name`` with its path in the config channel, unless the file exists elsewhere."""
    option, _, name = argument.partition("=")
    channel = job.channels.get(CONFIG_CHANNEL)
    # Path.exists would raise if the text is not a path (an inline config may be too long).
    if option != "--config" or channel is None or os.path.exists(folder / name):
        return argument
    path = channel.path / name
    return f"{option}={path}" if os.path.exists(path) else argument


def _config_files(job: SageMakerJob) -> list[str]:
    channel = job.channels.get(CONFIG_CHANNEL)
    if channel is None or not channel.path.is_dir():
        return []
    return sorted(str(path) for path in channel.path.iterdir() if path.suffix in _CONFIG_SUFFIXES and path.is_file())
