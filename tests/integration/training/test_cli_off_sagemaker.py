"""Outside SageMaker, SageMakerCLI is LightningCLI: the same arguments give the same configuration and trainer."""

import os
import re
import subprocess
import sys

import pytest
from pytorch_lightning.callbacks import LearningRateMonitor
from pytorch_lightning.cli import LightningCLI

from lightning_sm import SageMakerCLI
from tests.fakes.small_app import SmallData, SmallModel
from tests.integration.hosts import REPOSITORY
from tests.quick_processes import python_path

DATA = f"{SmallData.__module__}.SmallData"
ANY = {"model_class": None, "datamodule_class": None}
SHAPES = {
    "run": (["fit", "--trainer.max_epochs=2"], {}),
    "validate": (["validate", "--ckpt_path=best"], {}),
    "file": (["fit", "--config=own.yaml", "--data.batch_size=2"], {}),
    "no run": (["--data.data_dir=here", "--trainer.callbacks+=ModelCheckpoint"], {"run": False}),
    "bar": (["--trainer.enable_progress_bar=false", "--trainer.logger=false"], {"run": False}),
    "subclasses": (["fit", "--model=SmallModel", "--data", DATA, "--data.batch_size=2", "--model.num_classes=5"], ANY),
    "subclass mode": (["fit", "--config=any.yaml"], {"subclass_mode_data": True}),
    "list": ([], {"args": ["--trainer.max_epochs=3"], "run": False}),
    "dict": ([], {"args": {"trainer": {"max_epochs": 3}}, "run": False}),
    "environment": (["fit"], {"parser_kwargs": {"default_env": True}}),
    "defaults": (["fit"], {"trainer_defaults": {"max_epochs": 9, "callbacks": [LearningRateMonitor()]}}),
    "default files": (["fit"], {"parser_kwargs": {"fit": {"default_config_files": ["own.yaml"]}}}),
    "own settings": (["fit"], {"save_config_callback": None, "seed_everything_default": 5}),
}


class Still:
    """Instantiates everything and runs nothing, with links that apply on parsing and on instantiation."""

    def add_arguments_to_parser(self, parser):
        """Add the links."""
        parser.link_arguments("data.data_dir", "trainer.default_root_dir")
        if not self.subclass_mode_model:
            parser.link_arguments("data.num_classes", "model.num_classes", apply_on="instantiate")

    def fit(self, **kwargs):
        """Take the place of ``Trainer.fit``."""

    validate = fit


class PlainCLI(Still, LightningCLI):
    """LightningCLI, the reference."""


class OurCLI(Still, SageMakerCLI):
    """SageMakerCLI, which is compared with the reference."""


def describe(cli):
    """Describe the configuration and the parts of the trainer."""
    trainer, parser = cli.trainer, cli._parser(cli.subcommand)
    return {
        "config": parser.dump(cli.config[cli.subcommand] if cli.subcommand else cli.config, skip_none=False),
        "subcommand": cli.subcommand,
        "model": (type(cli.model), cli.model.layer.out_features),
        "data": (type(cli.datamodule), vars(cli.datamodule).get("batch_size")),
        "callbacks": [type(callback) for callback in trainer.callbacks],
        "loggers": [(type(log), log.save_dir) for log in trainer.loggers],
        "strategy": type(trainer.strategy),
        "environment": type(trainer._accelerator_connector.cluster_environment),
        "io": type(trainer.strategy.checkpoint_io),
        "precision": type(trainer.precision_plugin),
        "size": (trainer.num_nodes, trainer.num_devices, trainer.world_size),
        "root": trainer.default_root_dir,
        "save_config": cli.save_config_kwargs,
    }


@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_lightning_cli(tmp_path, monkeypatch, shape):
    """Configuration, callbacks, plugins, loggers and folders are the same as LightningCLI's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path / "ml"))
    monkeypatch.setenv("PL_FIT__DATA__BATCH_SIZE", "3")
    (tmp_path / "own.yaml").write_text("{trainer: {max_epochs: 4}, data: {data_dir: there}, seed_everything: 3}")
    (tmp_path / "any.yaml").write_text(f"data: {{class_path: {DATA}, init_args: {{batch_size: 2}}}}")
    arguments, settings = SHAPES[shape]
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    settings = {"model_class": SmallModel, "datamodule_class": SmallData, "seed_everything_default": 1, **settings}
    plain, ours = (describe(cli(**settings)) for cli in (PlainCLI, OurCLI))
    assert ours == plain
    assert not (tmp_path / "ml").exists()


@pytest.mark.parametrize(
    "arguments", [["fit", "--trainer.max_epoks=1"], ["--help"], [], ["fit", "--config=missing.yaml"]]
)
def test_it_ends_as_lightning_cli_does(tmp_path, monkeypatch, capsys, arguments):
    """Errors and help match LightningCLI's but for the usage of ``--data_service``; a subcommand is required."""
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    ends = []
    for cli in (PlainCLI, OurCLI):
        with pytest.raises(SystemExit) as end:
            cli(SmallModel, SmallData)
        told = capsys.readouterr()
        ends.append((end.value.code, told.out, re.sub(r"\s+\[--data_service\S* [^]]+\]", "", told.err)))
    assert ends[0] == ends[1]


def test_a_mapping_is_for_jobs(tmp_path, monkeypatch):
    """Outside a job, a mapping of channels is not an error."""
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["train.py"])
    cli = SageMakerCLI(SmallModel, SmallData, channels={"images": "data_dir"}, run=False)
    assert (cli.job, cli.datamodule.data_dir) == (None, "nowhere")


TWO_PROCESSES = """
import atexit, os, pathlib, torch

@atexit.register  # before all others, and so run after them
def write_end():
    pathlib.Path(f"end-{os.getpid()}").write_text(str(torch.distributed.is_initialized()))

from lightning_sm import SageMakerCLI
from tests.fakes.small_app import SmallData, SmallModel

if __name__ == "__main__":
    SageMakerCLI(SmallModel, SmallData)
"""


@pytest.mark.processes
def test_two_processes_leave_their_group_before_the_interpreter_ends(tmp_path):
    """Two processes on a laptop destroy Gloo's group, which might abort them, before the interpreter's shutdown."""
    (tmp_path / "train.py").write_text(TWO_PROCESSES)
    command = [sys.executable, "train.py", "fit", "--trainer.max_steps=2", "--trainer.accelerator=cpu"]
    ended = subprocess.run(
        [*command, "--trainer.devices=2", "--trainer.strategy=ddp"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": python_path(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "distributed_backend=gloo" in ended.stderr
    assert [path.read_text() for path in tmp_path.glob("end-*")] == ["False"] * 2
