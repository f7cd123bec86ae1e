"""Functions that set a LightningCLI configuration's arguments to channel folders, unless the user has set them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from jsonargparse import Namespace

from lightning_sm._lightning import rank_zero_only
from lightning_sm.errors import ChannelError
from lightning_sm.job.channels import may_be_folder, route
from lightning_sm.job.facts import SageMakerJob

logger = logging.getLogger(__name__)
_log_once = rank_zero_only(logger.info)


def channel_arguments(
    config: Namespace, explicit: Namespace, job: SageMakerJob, mapping: Mapping[str, str]
) -> dict[str, Any]:
    """Return the arguments that channels set, with the channels' folders as their values.

    Args:
        config: The configuration of one subcommand, or the whole configuration if there are no subcommands.
        explicit: The part that the user set on the command line, in a file or through an environment variable.
        job: The job with its channels.
        mapping: Maps channels to arguments, and takes precedence over the rules of ``channels.route``.

    Returns:
        A nested dict for ``parse_object``, so that jsonargparse checks and converts each value.

    Raises:
        ChannelError: ``mapping`` names a channel or an argument that does not exist.
    """
    parameters = _parameters_of_data(config)
    routing = route(job.channels, parameters, mapping, all_channels_known=not job.is_heterogeneous)
    changes: dict[str, Any] = {}
    uses = []
    for key, channel in routing.channel_of.items():
        if not _has(config, key):
            raise ChannelError(
                f"Channel {channel!r} is mapped to {key!r}, but the configuration has no such argument. "
                "See --help for the arguments."
            )
        if _has(explicit, key):
            uses.append(f"{channel!r}: not used, because {key} is already set")
        else:
            _merge(changes, _overlay(config, key.split("."), str(job.channels[channel].path)))
            uses.append(f"{channel!r}: {key} = {job.channels[channel].path}")
    if uses:
        _log_once("Channels: %s.", "; ".join(uses))
    for channel in routing.unused:
        _log_once(
            "Channel %r matches none of the DataModule's arguments (%s). It is at %s; "
            "SageMakerCLI(channels={%r: ...}) maps it to an argument.",
            channel,
            ", ".join(sorted(parameters)),
            job.channels[channel].path,
            channel,
        )
    return changes


def has_free_folders(config: Namespace, explicit: Namespace, mapping: Mapping[str, str]) -> bool:
    """Return whether a DataModule parameter could be set to the folder of a channel that this host lacks.

    Args:
        config: As in ``channel_arguments``.
        explicit: As in ``channel_arguments``.
        mapping: As in ``channel_arguments``.
    """
    free = (name for name in _parameters_of_data(config) if may_be_folder(name) and not _has(explicit, f"data.{name}"))
    return bool(mapping) or any(free)


def _parameters_of_data(config: Namespace) -> list[str]:
    """Return the names of the DataModule's arguments, whether they are flat or in init_args."""
    data = config.get("data")
    if isinstance(data, Namespace) and "class_path" in data:
        data = data.get("init_args")
    return list(vars(data)) if isinstance(data, Namespace) else []


def _has(config: Any, key: str) -> bool:
    """Return whether a configuration has an argument; ``key`` does not include ``init_args``."""
    for part in key.split("."):
        if isinstance(config, Namespace) and "class_path" in config:
            config = config.get("init_args")
        if not isinstance(config, Namespace) or part not in vars(config):
            return False
        config = vars(config)[part]
    return True


def _overlay(config: Any, parts: list[str], value: Any) -> Any:
    """Return a nested dict that sets one argument, and repeats each class_path so that jsonargparse keeps it."""
    if not parts:
        return value
    if isinstance(config, Namespace) and "class_path" in config:
        return {"class_path": config.class_path, "init_args": _overlay(config.get("init_args"), parts, value)}
    child = vars(config).get(parts[0]) if isinstance(config, Namespace) else None
    return {parts[0]: _overlay(child, parts[1:], value)}


def _merge(target: dict[str, Any], source: Mapping[str, Any]) -> None:
    for key, value in source.items():
        if isinstance(value, Mapping) and isinstance(target.get(key), dict):
            _merge(target[key], value)
        else:
            target[key] = value
