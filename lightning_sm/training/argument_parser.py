"""Lightning's argument parser, with hints about options from older versions and from other examples."""

from __future__ import annotations

import re
import warnings
from typing import Any, NoReturn

from jsonargparse import Namespace

from lightning_sm._lightning import LightningArgumentParser
from lightning_sm.data.settings import DataServiceSettings

# Prefix of the data service's arguments in --help and in configuration files.
DATA_SERVICE = "data_service"
_DEVICES = "--trainer.accelerator={} --trainer.devices=NUMBER"
# Replacements for options. Lightning 2.0 removed the trainer options, and the logger options come from a LightningCLI
# that adds a TensorBoardLogger. All others are hyperparameters in AWS's samples and its model parallel library.
REPLACED_OPTIONS = {
    "trainer.weights_save_path": "--trainer.callbacks=ModelCheckpoint --trainer.callbacks.dirpath=FOLDER",
    "trainer.resume_from_checkpoint": "--ckpt_path=FILE",
    "trainer.gpus": _DEVICES.format("gpu"),
    "trainer.tpu_cores": _DEVICES.format("tpu"),
    "trainer.num_processes": _DEVICES.format("cpu"),
    "trainer.replace_sampler_ddp": "--trainer.use_distributed_sampler",
    "trainer.checkpoint_callback": "--trainer.enable_checkpointing",
    "trainer.terminate_on_nan": "--trainer.detect_anomaly",
    "trainer.auto_lr_find": "--trainer.callbacks=LearningRateFinder",
    "trainer.auto_scale_batch_size": "--trainer.callbacks=BatchSizeFinder",
    "logger.save_dir": "--trainer.logger=TensorBoardLogger --trainer.logger.save_dir=FOLDER",
    "logger.name": "--trainer.logger=TensorBoardLogger --trainer.logger.name=NAME",
    "logger.flush_secs": "--trainer.logger=TensorBoardLogger --trainer.logger.flush_secs=SECONDS",
    "num-data-workers": f"--{DATA_SERVICE}.workers",
    "num_of_data_workers": f"--{DATA_SERVICE}.workers",
    "grpc-workers": "nothing: one process on each data host sends the batches",
    "num-dnn-workers": "nothing: one process for each rank receives the batches",
    "pin-memory": "pin_memory=True in the DataModule's DataLoader",
    "iterations": "--trainer.max_steps",
    "steps_per_epoch": "--trainer.limit_train_batches",
    "epochs": "--trainer.max_epochs",
    "batch_size": "--data.batch_size, if the DataModule has it",
    "batch-size": "--data.batch_size, if the DataModule has it",
    "tf_data_mode": "an instance group whose name begins with data; without one, the trainers build their batches",
    "mp_parameters": "--trainer.strategy=pipeline, or ModelParallelStrategy",
}


class ScriptArgumentParser(LightningArgumentParser):
    """The default ``parser_class`` of ``SageMakerCLI``.

    It omits the data service's settings if all have their defaults, so that ``LightningCLI`` can also read the output
    of ``--print_config``. An error about a replaced option names the replacement.
    """

    subcommand_names: tuple[str, ...] = ()
    """This parser's subcommands, in the order of its help; empty for a subcommand's parser."""

    def dump(self, cfg: Namespace, *args: Any, **kwargs: Any) -> str:
        """Return a configuration as text, without the data service's settings if all have their defaults."""
        with warnings.catch_warnings():
            # Lightning passes an argument that jsonargparse has renamed, but the warning would blame this line.
            warnings.simplefilter("ignore", DeprecationWarning)
            text: str = super().dump(_without_default_settings(cfg), *args, **kwargs)
        return text

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the usage, the error and hints, then exit with status 2; raise if the parser's settings say so."""
        is_unknown = "unrecognized arguments" in message.lower()
        hints = [
            f"{name} is not an option here. Use {new}." for name, new in REPLACED_OPTIONS.items() if _has(message, name)
        ]
        if is_unknown and self.subcommand_names and getattr(ex, "subcommand_parser", None) is None:
            names = ", ".join(self.subcommand_names)
            hints.insert(
                0, f"Options must follow a subcommand ({names}): {self.prog} {self.subcommand_names[0]} --OPTION ..."
            )
        super().error("\n".join([message, *hints]), ex)


def _has(message: str, option: str) -> bool:
    """Return whether an error names an option, as an argument or as a quoted key of a configuration file."""
    name = rf"(--|['\"]){re.escape(option)}(?![\w.-])"
    return re.search(name, message) is not None


def _without_default_settings(config: Namespace) -> Namespace:
    subcommand = config.get("subcommand")
    of_run = config.get(subcommand) if subcommand else config
    values = of_run.get(DATA_SERVICE) if of_run is not None else None
    if values is None or DataServiceSettings(**vars(values)) != DataServiceSettings():
        return config
    shorter = config.clone()
    (shorter[subcommand] if subcommand else shorter).pop(DATA_SERVICE)
    return shorter
