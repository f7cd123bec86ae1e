"""The changes that a job makes to a parsed LightningCLI configuration, where the user has not set a value."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from lightning_sm._lightning import DISTRIBUTION, rank_zero_only
from lightning_sm.errors import ChannelError
from lightning_sm.job.channels import may_be_folder, route
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.training.environment import SageMakerEnvironment
from lightning_sm.training.loggers import default_logger, is_fixed, log_folder
from lightning_sm.training.strategies.choice import distribution_arguments
from lightning_sm.training.trainer_setup import cluster_arguments

logger = logging.getLogger(__name__)
_log_once = rank_zero_only(logger.info)


class JobOverlay:
    """The changes that a job makes to a configuration, without overriding what the user set.

    Args:
        config: The configuration of one subcommand, or the whole one without subcommands.
        explicit: The part that the user set on the command line, in a file or by environment variable.

    Attributes:
        changes: Nested dict for ``parse_object``, so that jsonargparse checks and converts each value.
    """

    def __init__(self, config: Namespace, explicit: Namespace) -> None:
        self._config = config
        self._explicit = explicit
        self._routed: set[str] = set()
        self.changes: dict[str, Any] = {}

    def route_channels(self, job: SageMakerJob, mapping: Mapping[str, str]) -> None:
        """Set arguments of the DataModule to the paths of the job's channels.

        Args:
            job: The job with its channels.
            mapping: Channel name to argument; it takes precedence over the rules of ``channels.route``.

        Raises:
            ChannelError: ``mapping`` names a channel or an argument that does not exist.
        """
        data = self._config.get("data")
        parameters = list(_arguments_of(data)) if isinstance(data, Namespace) else []
        routing = route(job.channels, parameters, mapping, all_channels_known=not job.is_heterogeneous)
        self._routed.update(routing.channel_of)
        uses = []
        for key, channel in routing.channel_of.items():
            if not _has(self._config, key):
                raise ChannelError(
                    f"Channel {channel!r} is mapped to {key!r}, but the configuration has no such argument. "
                    "See --help for the arguments."
                )
            if _has(self._explicit, key):
                uses.append(f"{channel!r}: not used, because {key} is already set")
            else:
                self._set(key, str(job.channels[channel].path))
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

    def has_free_folders(self, mapping: Mapping[str, str]) -> bool:
        """Return whether a channel that this host does not have could be the folder of a DataModule's parameter.

        Args:
            mapping: As in ``route_channels``.
        """
        data = self._config.get("data")
        parameters = _arguments_of(data) if isinstance(data, Namespace) else ()
        free = (one for one in parameters if may_be_folder(one) and not _has(self._explicit, f"data.{one}"))
        return bool(mapping) or any(free)

    def fit_trainer(self, environment: SageMakerEnvironment) -> None:
        """Set ``num_nodes`` and ``devices``.

        Raises:
            TopologyError: The user set a value that contradicts the cluster.
        """
        given = {name: _value(self._explicit, f"trainer.{name}") for name in ("num_nodes", "devices")}
        for name, value in cluster_arguments(environment, given).items():
            self._set(f"trainer.{name}", value)

    def follow_distribution(self, job: SageMakerJob, num_nodes: int) -> None:
        """Set the strategy that the SDK's ``distribution={...}`` asks for, if the user has chosen none.

        Args:
            job: The job.
            num_nodes: Number of trainer hosts.

        Raises:
            StrategyError: It asks for model parallelism, and the user has chosen another strategy.
        """
        chosen = _value(self._config, "trainer.strategy")
        for name, value in distribution_arguments(job, num_nodes, chosen).items():
            self._set(f"trainer.{name}", value)

    def route_outputs(self, job: SageMakerJob, callback_keys: Iterable[str]) -> None:
        """Direct logs and checkpoints to the job's folders, and make relative folders relative to these.

        Args:
            job: The job with its folders.
            callback_keys: Keys of callbacks that the script added to the parser, besides ``trainer.callbacks``.
        """
        root = self._config.get("trainer.default_root_dir")
        if not is_fixed(root):
            self._set("trainer.default_root_dir", str(job.host_output_dir / (root or "")))
        loggers = self._config.get("trainer.logger")
        chosen = default_logger(job, loggers, barebones=self._config.get("trainer.barebones"))
        if chosen is not None:
            name, folder = chosen
            class_path = f"{DISTRIBUTION}.loggers.{name}"
            self._set("trainer.logger", {"class_path": class_path, "init_args": {"save_dir": str(folder)}})
        for item in _class_entries(loggers):
            name = item.class_path.rpartition(".")[2]
            is_tensorboard = name == "TensorBoardLogger"
            keeps_files = is_tensorboard or name == "CSVLogger"
            folder = log_folder(job, is_tensorboard=is_tensorboard) if keeps_files else job.host_output_dir
            _rebase(item, "save_dir", folder)
        for key in ("trainer.callbacks", *callback_keys):
            for item in _class_entries(self._config.get(key)):
                _rebase(item, "dirpath", job.checkpoint_dir or job.host_output_dir)
        for item in _class_entries(self._config.get("trainer.profiler")):
            _rebase(item, "dirpath", job.host_output_dir)

    def _set(self, key: str, value: Any) -> None:
        if _has(self._config, key):  # a trainer_class of the script's own need not accept every argument
            _merge(self.changes, _overlay(self._config, key.split("."), value))


def _arguments_of(section: Namespace) -> Iterator[str]:
    """Yield the names of the arguments of a class section, flat or with class_path and init_args."""
    arguments = section.get("init_args") if "class_path" in section else section
    yield from vars(arguments) if isinstance(arguments, Namespace) else ()


def _has(config: Any, key: str) -> bool:
    return _value(config, key, ...) is not ...


def _value(config: Any, key: str, default: Any = None) -> Any:
    """Return the value of an argument; ``key`` leaves out ``init_args``."""
    for part in key.split("."):
        if isinstance(config, Namespace) and "class_path" in config:
            config = config.get("init_args")
        if not isinstance(config, Namespace) or part not in vars(config):
            return default
        config = vars(config)[part]
    return config


def _overlay(config: Any, parts: list[str], value: Any) -> Any:
    """Return a nested dict that sets one argument, with each class_path, or else jsonargparse would reset the class."""
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


def _class_entries(value: Any) -> Iterator[Namespace]:
    """Yield the classes in a setting that takes one class, a list of classes, or a plain value."""
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, Namespace):
            yield item


def _rebase(item: Namespace, argument: str, folder: Path) -> None:
    """Make a relative folder in an argument of a class relative to ``folder``."""
    arguments = item.get("init_args") if "class_path" in item else item
    stated = arguments.get(argument) if isinstance(arguments, Namespace) else None
    if stated is not None and not is_fixed(stated):
        arguments[argument] = str(folder / stated)
