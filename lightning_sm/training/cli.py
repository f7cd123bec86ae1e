"""SageMakerCLI: a LightningCLI that adapts itself to a SageMaker job, and behaves as usual elsewhere."""

from __future__ import annotations

import copy
import inspect
import logging
import os
import sys
from argparse import Action
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace

from lightning_sm._lightning import (
    ArgsType,
    LightningArgumentParser,
    LightningCLI,
    LightningModule,
    Trainer,
    check_same_distribution,
    rank_zero_only,
)
from lightning_sm.data.service import serve
from lightning_sm.data.settings import DataServiceSettings
from lightning_sm.data.trainer.connection import ServiceConnection
from lightning_sm.job.command_line import is_toolkit_rendering, job_arguments, with_options_of_job
from lightning_sm.job.control_folder import note_options_read
from lightning_sm.job.facts import Channel, SageMakerJob
from lightning_sm.job.redaction import shown
from lightning_sm.job.topology import Role
from lightning_sm.job.variables import HIDDEN_OPTIONS
from lightning_sm.training.argument_parser import DATA_SERVICE, ScriptArgumentParser
from lightning_sm.training.config_overlay import channel_arguments, has_free_folders
from lightning_sm.training.fetching_trainer import fetch_from
from lightning_sm.training.group_exit import leave_at_exit
from lightning_sm.training.process import prepare_host
from lightning_sm.training.trainer_setup import TrainerSetup, as_list

logger = logging.getLogger(__name__)
_warn_once = rank_zero_only(logger.warning)


class SageMakerCLI(LightningCLI):
    """A ``LightningCLI`` for scripts that run unchanged on a laptop, on one host and on a cluster.

    Outside SageMaker, it behaves like ``LightningCLI``. In a SageMaker job, it also

    - reads its arguments from the hyperparameters, and runs ``fit`` if nothing names a subcommand;
    - sets ``trainer.num_nodes`` and the cluster environment, and also the number of devices if a launcher such as
      torchrun determines it;
    - uses ``SMDDPStrategy`` if the SDK's ``distribution`` asks for it, the job supports it, and the user has chosen no
      other strategy;
    - sets the DataModule's arguments to channel paths: ``x_dir`` to the path of channel ``x``, and ``data_dir`` or
      ``root`` to that of ``training``, ``train`` or the only channel;
    - writes TensorBoard logs, CSV logs and checkpoints to the folders that SageMaker uploads during training if the job
      has them, and otherwise to the output data directory (one folder per host). Relative folders in
      ``default_root_dir``, TensorBoard and CSV loggers, and ``ModelCheckpoint`` become relative to these folders;
    - makes TensorBoard and W&B continue the curves of earlier attempts after a restart;
    - saves a checkpoint in the checkpoint directory when the job is interrupted, and resumes from the latest valid one
      whenever the CLI or the script calls ``fit`` (see ``SpotCheckpoint``);
    - writes the best model, and the configuration without secrets (see ``SECURITY.md``), to the model directory;
    - logs progress line by line;
    - runs the workers of all loaders on the data hosts, if the job has data groups.

    Values that the user sets take precedence. A value that contradicts the cluster is an error.

    Args:
        model_class: As in ``LightningCLI``.
        datamodule_class: As in ``LightningCLI``.
        channels: Maps channel names to arguments, and takes precedence over the rule above. An argument is the name of
            a DataModule parameter, or a dotted key such as ``model.weights``.
        *args: Other positional arguments of ``LightningCLI``.
        **kwargs: Other keyword arguments of ``LightningCLI``.

    Raises:
        JobConfigError: The job's files are malformed.
        TopologyError: ``num_nodes`` or ``devices`` contradict the cluster.
        ChannelError: ``channels`` names a channel or an argument that does not exist.
        OutputDirectoryError: A directory of the job is not writable.
        MixedLightningError: The classes derive from the other distribution of Lightning.
    """

    def __init__(
        self,
        model_class: Any = None,
        datamodule_class: Any = None,
        *args: Any,
        channels: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        settings = inspect.signature(LightningCLI).bind(model_class, datamodule_class, *args, **kwargs).arguments
        defaults = as_list((settings.get("trainer_defaults") or {}).get("callbacks"))
        for candidate in (model_class, datamodule_class, settings.get("trainer_class"), *map(type, defaults)):
            check_same_distribution(candidate)
        self._channel_mapping = dict(channels or {})
        self.job = SageMakerJob.from_environment()
        if self.job is None:
            leave_at_exit()  # training in two processes on a laptop uses Gloo, too
        else:
            self.topology, environment = prepare_host(self.job)
            if environment is not None:
                self.environment = environment
            # Overwrite config.yaml: otherwise, a resumed job would fail, because the first attempt left the file there.
            settings["save_config_kwargs"] = {"overwrite": True, **(settings.get("save_config_kwargs") or {})}
        settings.setdefault("parser_class", ScriptArgumentParser)
        super().__init__(**settings)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the arguments, then let the job provide values that the user has not set."""
        if self.job is None:
            super().parse_arguments(parser, args)
        else:
            if args is None:
                args = self._job_arguments(self.job, parser)
            elif ignored := job_arguments(self.job, Path.cwd()):
                names = ", ".join(argument.partition("=")[0] for argument in ignored)
                _warn_once("The script passes args to its CLI, so the hyperparameters %s have no effect.", names)
            with _links_postponed([parser, *getattr(self, "_subcommand_parsers", {}).values()]):
                self.config = _parse(parser, args)
                # Parse again without defaults and default_config_files, so that only the user's values remain. Pass the
                # default classes, or jsonargparse would not know their options. Do not pass the command line's classes:
                # jsonargparse must read these in order, because an option may precede a change of its class.
                explicit = _parse(parser, args, _classes_only(self._defaults(parser)), defaults=False)
            self._adapt_to_job(self.job, parser, explicit)
        self._take_data_service_settings()

    def setup_parser(
        self, add_subcommands: bool, main_kwargs: dict[str, Any], subparser_kwargs: dict[str, Any]
    ) -> None:
        """Set up the parsers, and move the data service's settings after all other options."""
        super().setup_parser(add_subcommands, main_kwargs, subparser_kwargs)
        subcommand_parsers = getattr(self, "_subcommand_parsers", {})
        if isinstance(self.parser, ScriptArgumentParser):
            self.parser.subcommand_names = tuple(subcommand_parsers)
        for parser in subcommand_parsers.values() or [self.parser]:
            parser._actions.sort(key=_is_data_service)
            parser._action_groups.sort(key=lambda group: any(map(_is_data_service, group._group_actions)))

    def _defaults(self, parser: LightningArgumentParser) -> Namespace:
        """Return the parser's defaults, including those of the parsed subcommand."""
        defaults: Namespace = parser.get_defaults(skip_validation=True)
        subcommand = self.config.get("subcommand")
        if subcommand is not None:
            defaults[subcommand] = self._subcommand_parsers[subcommand].get_defaults(skip_validation=True)
        return defaults

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the data service's settings first, so that a script's hooks can change their defaults."""
        super().add_default_arguments_to_parser(parser)
        parser.add_class_arguments(DataServiceSettings, DATA_SERVICE)

    def instantiate_classes(self) -> None:
        """Instantiate the model, DataModule and Trainer; on a data host, serve batches instead, then exit."""
        if self.job is not None and self.topology.role is Role.DATA:
            serve(self.job, self.topology, self.data_service)
            sys.exit(0)
        super().instantiate_classes()

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Instantiate the Trainer; in a job, make the job's additions to it (see ``TrainerSetup``)."""
        if self.job is None:
            return super().instantiate_trainer(**kwargs)
        settings = {**self._get(self.config_init, "trainer", default={}), **kwargs}
        callbacks = [
            *as_list(settings.get("callbacks")),
            *as_list(self.trainer_defaults.get("callbacks")),
            *(self._get(self.config_init, key) for key in self._parser(self.subcommand).callback_keys),
        ]
        dump = self._configuration_to_save()
        # A function passed as trainer_class may not accept every argument.
        setup = TrainerSetup(self.job, self.environment)
        added = setup.arguments(settings, callbacks, dump)
        kwargs.update({name: value for name, value in added.items() if name in settings})
        trainer = super().instantiate_trainer(**kwargs)
        setup.complete(trainer)
        if self.topology.data_hosts:
            fetch_from(trainer, ServiceConnection.of_job(self.job, self.topology, self.data_service))
        return trainer

    def _configuration_to_save(self) -> str:
        """Return the configuration as YAML without secrets, and withhold secrets from ``save_config_callback``, too."""
        parser = self._parser(self.subcommand)
        config = self.config[self.subcommand] if self.subcommand else self.config
        safe = _without_secrets(config)
        if safe == config:
            return str(parser.dump(config, skip_none=False))
        # Skip validation: it would reject null in place of a secret that must be a string or an existing file.
        saver = copy.copy(parser)
        saver.dump = partial(parser.dump, skip_validation=True)
        saver.save = partial(parser.save, skip_validation=True)
        if self.save_config_callback is not None:
            make = self.save_config_callback
            # Lightning expects a class, but only calls it, so a function works.
            self.save_config_callback = lambda _parser, _config, **settings: make(saver, safe, **settings)  # type: ignore[assignment]
        return str(saver.dump(safe, skip_none=False))

    @staticmethod
    def configure_optimizers(lightning_module: LightningModule, optimizer: Any, lr_scheduler: Any = None) -> Any:
        """Give the model's current parameters to the optimizer that ``--optimizer`` selects.

        LightningCLI creates the optimizer before strategies shard the model. ModelParallelStrategy then replaces the
        parameters, so training would silently leave the model unchanged.
        """
        optimizer.param_groups[0]["params"][:] = lightning_module.parameters()
        return LightningCLI.configure_optimizers(lightning_module, optimizer, lr_scheduler)

    def _job_arguments(self, job: SageMakerJob, parser: LightningArgumentParser) -> list[str]:
        arguments = sys.argv[1:]
        if hidden := HIDDEN_OPTIONS.read(os.environ):
            arguments = with_options_of_job(arguments, hidden, job, Path.cwd())
            note_options_read()
        # Without arguments, read the hyperparameters: SDK v3 may not pass them on (Source(command=...), issue 5226).
        if not arguments or is_toolkit_rendering(arguments, job):
            arguments = job_arguments(job, Path.cwd())
        subcommands = getattr(self, "_subcommand_parsers", {})
        if not subcommands or {*subcommands, "-h", "--help"} & set(arguments) or _has_file_for(subcommands, arguments):
            return arguments
        # Default to fit: most jobs cannot name a subcommand, because hyperparameters cannot be positional.
        variables = os.environ if parser.default_env else {}
        return [variables.get(f"{parser.env_prefix}_SUBCOMMAND", "fit"), *arguments]

    def _adapt_to_job(self, job: SageMakerJob, parser: LightningArgumentParser, explicit: Namespace) -> None:
        subcommand = self.config.get("subcommand")
        config = self.config[subcommand] if subcommand else self.config
        if self.topology.role is Role.DATA:
            return  # a data host instantiates nothing, and may lack files that the trainers' arguments require
        explicit = explicit[subcommand] if subcommand else explicit
        if self.topology.data_hosts and has_free_folders(config, explicit, self._channel_mapping):
            job = self._with_channels_of_data_hosts(job, config[DATA_SERVICE])
        changes = channel_arguments(config, explicit, job, self._channel_mapping)
        self.config = parser.parse_object({subcommand: changes} if subcommand else changes, self.config)

    def _with_channels_of_data_hosts(self, job: SageMakerJob, settings: Namespace) -> SageMakerJob:
        """Return the job plus the channels that only data hosts have: rank 0 creates the DataModule for these hosts."""
        connection = ServiceConnection.of_job(job, self.topology, DataServiceSettings(**vars(settings)))
        names = connection.host_channels(is_quiet=self.environment.local_rank() != 0)
        folder = job.base_dir / "input" / "data"
        remote = {name: Channel(name, folder / name) for name in names if name not in job.channels}
        return replace(job, channels={**job.channels, **remote})

    def _take_data_service_settings(self) -> None:
        """Read the settings, and remove them from the configuration if all are defaults: LightningCLI rejects them."""
        subcommand = self.config.get("subcommand")
        config = self.config[subcommand] if subcommand else self.config
        values = config.pop(DATA_SERVICE)
        self.data_service = DataServiceSettings(**vars(values))
        if self.data_service != DataServiceSettings():
            config[DATA_SERVICE] = values


def _is_data_service(action: Action) -> bool:
    return action.dest.partition(".")[0] == DATA_SERVICE


def _has_file_for(subcommands: Collection[str], arguments: Sequence[str]) -> bool:
    """Return whether a config file names a subcommand or has a section for one, as jsonargparse allows."""
    for option, following in pairwise([*arguments, ""]):
        name, _, value = option.partition("=")
        if name not in {"--config", "-c"}:
            continue
        with suppress(OSError, ValueError, yaml.YAMLError):  # the parser reports what it cannot read
            content = yaml.safe_load(Path(value or following).read_text(encoding="utf-8"))
            if isinstance(content, dict) and content.keys() & {"subcommand", *subcommands}:
                return True
    return False


@contextmanager
def _links_postponed(parsers: Sequence[LightningArgumentParser]) -> Iterator[None]:
    """Disable links between arguments while parsing, because channels may set the links' sources later."""
    # The parsers' internal lists of links, not copies.
    links = [parser._links_group._group_actions for parser in parsers if hasattr(parser, "_links_group")]
    kept = [list(actions) for actions in links]
    try:
        for actions in links:
            actions[:] = [action for action in actions if action.apply_on != "parse"]
        yield
    finally:
        for actions, all_actions in zip(links, kept, strict=True):
            actions[:] = all_actions


def _parse(
    parser: LightningArgumentParser, args: Any, base: Namespace | None = None, *, defaults: bool = True
) -> Namespace:
    """Parse without validation, because a channel may still provide a required argument."""
    parse = parser.parse_object if isinstance(args, (dict, Namespace)) else parser.parse_args
    config: Namespace = parse(args, base, defaults=defaults, _skip_validation=True)
    return config


def _classes_only(value: Any) -> Any:
    """Reduce a configuration to the classes that it selects; return None if it selects none."""
    if isinstance(value, list):
        items = [_classes_only(item) for item in value]
        return items if items and None not in items else None
    if not isinstance(value, Namespace):
        return None
    parts = {name: part if name == "class_path" else _classes_only(part) for name, part in vars(value).items()}
    kept = {name: part for name, part in parts.items() if part is not None}
    return Namespace(**kept) if kept else None  # type: ignore[no-untyped-call]


def _without_secrets(value: Any, name: str = "") -> Any:
    """Return a configuration, or the part with the key ``name``, with null in place of secrets."""
    if isinstance(value, Namespace):
        safe = {key: _without_secrets(item, f"{name}.{key}") for key, item in vars(value).items()}
        return Namespace(**safe)  # type: ignore[no-untyped-call]
    if isinstance(value, dict):
        return {key: _without_secrets(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, list) and not all(isinstance(item, str) for item in value):
        return [_without_secrets(item, name) for item in value]
    return shown(name, value, hidden=None)
