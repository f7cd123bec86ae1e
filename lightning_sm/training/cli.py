"""SageMakerCLI: LightningCLI that fits itself into a SageMaker job, and is LightningCLI anywhere else."""

from __future__ import annotations

import inspect
import logging
import pkgutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from lightning_sm._lightning import (
    ArgsType,
    Callback,
    ClusterEnvironment,
    LightningArgumentParser,
    LightningCLI,
    LightningDataModule,
    ProgressBar,
    Trainer,
    check_same_distribution,
)
from lightning_sm._log import show_log_lines
from lightning_sm.data.service import remote, serve
from lightning_sm.data.settings import DataServiceSettings
from lightning_sm.errors import DataSettingsError, OutputDirectoryError, TopologyError
from lightning_sm.job.command_line import is_toolkit_rendering, job_arguments
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.topology import Role, Topology
from lightning_sm.job.variables import DATA_GROUPS
from lightning_sm.training.callbacks.line_progress import LineProgress
from lightning_sm.training.callbacks.local_position import LocalPosition
from lightning_sm.training.callbacks.outputs import JobOutputs
from lightning_sm.training.callbacks.spot_checkpoint import SpotCheckpoint
from lightning_sm.training.callbacks.step_report import step_reports
from lightning_sm.training.checkpoints.durable_io import make_durable
from lightning_sm.training.checkpoints.newest import Load, job_facts
from lightning_sm.training.config_overlay import JobOverlay
from lightning_sm.training.environment import SageMakerEnvironment, leave_at_exit

logger = logging.getLogger(__name__)

# Arguments of the data service, in --help and in configuration files.
_DATA_SERVICE = "data_service"


class SageMakerCLI(LightningCLI):
    """The ``LightningCLI`` of a script that runs unchanged on a laptop, on one host and on a cluster.

    Off SageMaker it is ``LightningCLI``. In a SageMaker job it also

    - takes its arguments from the hyperparameters, and ``fit`` as the subcommand if none is given;
    - sets ``trainer.num_nodes``, the devices that a launcher such as torchrun decided, and the cluster environment;
    - sends channels to the DataModule: channel ``x`` to ``x_dir``; ``training``, ``train`` or the only one to
      ``data_dir`` or ``root``;
    - sends logs to the output data directory (each host to its own folder) and TensorBoard and checkpoints to their
      synchronised folders, if the job has them; a relative folder in the configuration, or of a ``ModelCheckpoint``,
      becomes one below these;
    - goes on from the newest sound checkpoint in the checkpoint directory, unless ``ckpt_path`` names another, and
      saves one there when it is interrupted; with ``run=False`` the script does, with
      ``trainer.fit(..., ckpt_path=cli.ckpt_path)``;
    - writes the best model to the model directory;
    - logs progress as lines;
    - on the hosts of a data group serves the DataModule's batches, and on the trainers fetches them from there.

    What the user sets comes before all of it. A value that contradicts the cluster is an error.

    Args:
        model_class: As in ``LightningCLI``.
        datamodule_class: As in ``LightningCLI``.
        channels: Channel name to argument, where the rule above does not fit: a parameter of the DataModule, or a
            dotted key such as ``model.weights``.
        main_port: Port on which rank 0 listens. Default: derived from the job.
        resolve_timeout_s: Seconds to wait for the main host's name to resolve.
        *args: Everything else that ``LightningCLI`` takes, by position.
        **kwargs: Everything else that ``LightningCLI`` takes.

    Attributes:
        ckpt_path: In a job with a checkpoint directory, the checkpoint that ``fit`` goes on from. None if there is
            nothing to go on from, for other subcommands, on data hosts, and off SageMaker.

    Raises:
        JobConfigError: The job's files are malformed.
        TopologyError: ``num_nodes`` or ``devices`` contradict the cluster.
        ChannelError: ``channels`` names a channel or an argument that does not exist.
        OutputDirectoryError: A directory of the job cannot be written.
        MixedLightningError: The classes derive from the other distribution of Lightning.
    """

    def __init__(
        self,
        model_class: Any = None,
        datamodule_class: Any = None,
        *args: Any,
        channels: Mapping[str, str] | None = None,
        main_port: int | None = None,
        resolve_timeout_s: float | None = None,
        **kwargs: Any,
    ) -> None:
        settings = inspect.signature(LightningCLI).bind(model_class, datamodule_class, *args, **kwargs).arguments
        defaults = _as_list((settings.get("trainer_defaults") or {}).get("callbacks"))
        for candidate in (model_class, datamodule_class, settings.get("trainer_class"), *map(type, defaults)):
            check_same_distribution(candidate)
        self._channel_mapping = dict(channels or {})
        self.ckpt_path: str | None = None
        self._resume_from: Callable[[Load], str | None] | None = None
        self.job = SageMakerJob.from_environment()
        leave_at_exit()  # off SageMaker, too: two processes of a laptop use Gloo
        if self.job is not None:
            show_log_lines()
            self.topology = Topology.from_job(self.job)
            self._environment_settings: dict[str, Any] = {"main_port": main_port}
            if resolve_timeout_s is not None:
                self._environment_settings["resolve_timeout_s"] = resolve_timeout_s
            # A resumed job finds the config.yaml of its first attempt.
            settings["save_config_kwargs"] = {"overwrite": True, **(settings.get("save_config_kwargs") or {})}
        super().__init__(**settings)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the arguments, then fill in what the job knows and the user did not set."""
        if self.job is None:
            super().parse_arguments(parser, args)
            self._take_data_service_settings()
            return
        if args is None:
            args = self._job_arguments(self.job)
        with _links_postponed([parser, *getattr(self, "_subcommand_parsers", {}).values()]):
            self.config = _parse(parser, args)
            # Without defaults and default_config_files, what remains is what the user set.
            explicit = _parse(parser, args, defaults=False)
        self._fit_into_job(self.job, parser, explicit)
        self._take_data_service_settings()

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the settings of the data service."""
        super().add_default_arguments_to_parser(parser)
        parser.add_class_arguments(DataServiceSettings, _DATA_SERVICE)

    def instantiate_classes(self) -> None:
        """Instantiate model, DataModule and trainer; a data host makes its DataModule only, serves it, and leaves."""
        if self.job is None or not self.topology.data_hosts:
            super().instantiate_classes()
            return
        if self.topology.role is Role.DATA:
            serve(self._only_datamodule(), self.job, self.topology, self.data_service)
            sys.exit(0)
        super().instantiate_classes()
        self.datamodule = remote(self._checked(self.datamodule), self.job, self.topology, self.data_service)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Instantiate the trainer; in a job with the cluster environment and the job's callbacks."""
        if self.job is None:
            return super().instantiate_trainer(**kwargs)
        settings = {**self._get(self.config_init, "trainer", default={}), **kwargs}
        kwargs["plugins"] = self._with_environment(_as_list(settings.get("plugins")), settings.get("strategy"))
        outputs = JobOutputs(self.job, self._config_text())
        own = [*self._progress(settings), LocalPosition(), *step_reports(), outputs]
        kwargs["callbacks"] = [*_as_list(settings.get("callbacks")), *own]
        trainer = super().instantiate_trainer(**kwargs)
        outputs.route_checkpoints(trainer)
        self._survive_interruptions(trainer, self.job)
        if self._resume_from is not None:
            self.ckpt_path = self._resume_from(trainer.strategy.checkpoint_io.load_checkpoint)
        self.environment.announce(trainer.num_devices)
        return trainer

    @staticmethod
    def _survive_interruptions(trainer: Any, job: SageMakerJob) -> None:
        """Put in what saves a checkpoint when the job is interrupted, and what lets no half of one be uploaded."""
        if job.checkpoint_dir is not None:
            make_durable(trainer, job.checkpoint_dir)
        # Not by the arguments of the Trainer, which makes no ModelCheckpoint of its own beside another Checkpoint.
        if not any(isinstance(callback, SpotCheckpoint) for callback in trainer.callbacks):
            folder = job.checkpoint_dir or job.host_output_dir / "checkpoints"
            trainer.callbacks.append(SpotCheckpoint(folder, job_facts=job_facts(job)))

    def _job_arguments(self, job: SageMakerJob) -> list[str]:
        arguments = sys.argv[1:]
        # No arguments: there are no hyperparameters, or SDK v3 dropped them (Source(command=...), issue 5226).
        if not arguments or is_toolkit_rendering(arguments, job):
            arguments = job_arguments(job, Path.cwd())
        subcommands = getattr(self, "_subcommand_parsers", {})
        # Hyperparameters have no positional arguments, so that a job without "subcommand" among them means fit.
        if subcommands and not {*subcommands, "-h", "--help"} & set(arguments):
            arguments = ["fit", *arguments]
        return arguments

    def _fit_into_job(self, job: SageMakerJob, parser: LightningArgumentParser, explicit: Namespace) -> None:
        subcommand = self.config.get("subcommand")
        config = self.config[subcommand] if subcommand else self.config
        overlay = JobOverlay(config, explicit[subcommand] if subcommand else explicit)
        if self.topology.role is Role.TRAINER:
            self._fit_trainer_into_job(job, overlay, subcommand)
        overlay.route_channels(job, self._channel_mapping)
        if self.topology.role is Role.TRAINER and self.topology.data_hosts:
            required = _required_parameters(_named_class(config.get("data"), self.datamodule_class))
            overlay.fill_missing_folders(job, required, self._channel_mapping)
        self.config = parser.parse_object({subcommand: overlay.changes} if subcommand else overlay.changes, self.config)

    def _fit_trainer_into_job(self, job: SageMakerJob, overlay: JobOverlay, subcommand: str | None) -> None:
        for folder in filter(None, (job.model_dir, job.host_output_dir, job.checkpoint_dir, job.tensorboard_dir)):
            _check_writable(folder)
        self.environment = SageMakerEnvironment(job, **self._environment_settings)
        overlay.fit_trainer(self.environment)
        overlay.route_outputs(job, self._parser(subcommand).callback_keys)
        if subcommand in (None, "fit") and job.checkpoint_dir is not None:
            self._resume_from = partial(overlay.resume_from, job.checkpoint_dir, job, is_fit=subcommand == "fit")

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        kwargs: dict[str, Any] = super()._prepare_subcommand_kwargs(subcommand)
        # Not by the configuration: it is saved beside the model, and the next job that reads it has no such file.
        if self.ckpt_path is not None and "ckpt_path" in kwargs:
            kwargs["ckpt_path"] = self.ckpt_path
        return kwargs

    def _take_data_service_settings(self) -> None:
        """Take the settings out of the configuration, which stays that of ``LightningCLI`` where they are not used."""
        subcommand = self.config.get("subcommand")
        config = self.config[subcommand] if subcommand else self.config
        values = config.pop(_DATA_SERVICE)
        self.data_service = DataServiceSettings(**vars(values))
        # The configuration is saved beside the model, where a secret does not belong.
        values["token"] = None
        if DataServiceSettings(**vars(values)) != DataServiceSettings():
            config[_DATA_SERVICE] = values

    def _only_datamodule(self) -> LightningDataModule:
        """Make the DataModule without trainer, loggers and callbacks, and without the model unless a link needs it."""
        parser, subcommand = self._parser(self.subcommand), self.subcommand
        config = self.config[subcommand] if subcommand else self.config
        links = parser._links_group._group_actions if hasattr(parser, "_links_group") else []
        needs_model = any(link.apply_on == "instantiate" and link.target[0].startswith("data.") for link in links)
        sections = ("data", "model") if needs_model else ("data",)
        wanted = config.clone()
        for name in set(vars(config)) - set(sections):
            del wanted[name]
        return self._checked(parser.instantiate_classes(wanted).get("data"))

    def _checked(self, datamodule: Any) -> LightningDataModule:
        if datamodule is None:
            raise DataSettingsError(
                f"The job has data hosts ({', '.join(self.topology.data_hosts)}), but the script has no "
                "LightningDataModule for them to serve. Give SageMakerCLI a datamodule_class, or take the data groups "
                f"out of the job ({DATA_GROUPS.name}= makes all groups train)."
            )
        module: LightningDataModule = datamodule
        return module

    def _with_environment(self, plugins: list[Any], strategy: Any) -> list[Any]:
        candidates = [*plugins, getattr(strategy, "cluster_environment", None)]
        environments = [candidate for candidate in candidates if isinstance(candidate, ClusterEnvironment)]
        if not environments:
            return [*plugins, self.environment]
        if not isinstance(environments[0], SageMakerEnvironment):
            where = "trainer.plugins" if environments[0] in plugins else "trainer.strategy"
            raise TopologyError(
                f"{where} has {type(environments[0]).__name__}, but SageMakerCLI puts in SageMakerEnvironment, "
                f"which knows torchrun and mpirun, too. Take it out of {where}."
            )
        return plugins

    def _progress(self, settings: Mapping[str, Any]) -> list[Callback]:
        keys = self._parser(self.subcommand).callback_keys
        callbacks = [
            *_as_list(settings.get("callbacks")),
            *_as_list(self.trainer_defaults.get("callbacks")),
            *(self._get(self.config_init, key) for key in keys),
        ]
        is_off = settings.get("enable_progress_bar") is False or settings.get("barebones")
        return [] if is_off or any(isinstance(item, ProgressBar) for item in callbacks) else [LineProgress()]

    def _config_text(self) -> str:
        config = self.config[self.subcommand] if self.subcommand else self.config
        return str(self._parser(self.subcommand).dump(config, skip_none=False))


def _check_writable(folder: Path) -> None:
    """Write to a folder once, hours before the first result."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OutputDirectoryError(
            f"{folder} cannot be written ({error}). SageMaker mounts it writable; look for a read-only mount, a full "
            "disk, or a container user without rights to it."
        ) from error


@contextmanager
def _links_postponed(parsers: Sequence[LightningArgumentParser]) -> Iterator[None]:
    """Parse without the links between arguments: their sources may come from defaults, or from a channel only."""
    links = [parser._links_group._group_actions for parser in parsers if hasattr(parser, "_links_group")]
    kept = [list(actions) for actions in links]
    try:
        for actions in links:
            actions[:] = [action for action in actions if action.apply_on != "parse"]
        yield
    finally:
        for actions, all_actions in zip(links, kept, strict=True):
            actions[:] = all_actions


def _parse(parser: LightningArgumentParser, args: Any, *, defaults: bool = True) -> Namespace:
    """Parse, but leave the check to the last step: a channel may fill what is required."""
    parse = parser.parse_object if isinstance(args, (dict, Namespace)) else parser.parse_args
    config: Namespace = parse(args, defaults=defaults, _skip_validation=True)
    return config


def _named_class(section: Any, default: Any) -> Any:
    """The class that a section of the configuration names; None if there is no such class, which the parser reports."""
    if not isinstance(section, Namespace) or "class_path" not in section:
        return default
    try:
        return pkgutil.resolve_name(section.class_path)
    except (ImportError, AttributeError, TypeError, ValueError):
        return None


def _required_parameters(maker: Any) -> list[str]:
    """Parameters of a class or function that have no default; ``**kwargs`` are those of the base class."""
    functions = [maker] if callable(maker) else []
    if isinstance(maker, type):
        functions = [vars(base)["__init__"] for base in maker.__mro__ if "__init__" in vars(base)]
    required: list[str] = []
    for function in functions:
        parameters = inspect.signature(function).parameters.values()
        required += [one.name for one in parameters if one.default is one.empty and one.name not in required]
        if not any(one.kind is one.VAR_KEYWORD for one in parameters):
            break
    return required


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
