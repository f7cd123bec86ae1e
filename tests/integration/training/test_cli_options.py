"""Options mean the same to SageMakerCLI in a job as to LightningCLI elsewhere."""

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pytorch_lightning import Trainer
from pytorch_lightning.cli import LightningCLI
from pytorch_lightning.loggers import CSVLogger

from lightning_sm.errors import TopologyError
from lightning_sm.training.callbacks.line_progress import LineProgress
from lightning_sm.training.callbacks.outputs import JobOutputs
from lightning_sm.training.cli import SageMakerCLI
from tests.fakes.small_app import TWO_HOSTS, SmallModel
from tests.integration.hosts import REPOSITORY
from tests.quick_processes import python_path

MODULE = SmallModel.__module__
CSV = {"class_path": "pytorch_lightning.loggers.CSVLogger", "init_args": {"save_dir": "logs"}}


def default_file(content):
    """Settings of a CLI with a default configuration file in the working directory."""
    Path("defaults.yaml").write_text(yaml.safe_dump(content))
    return {"parser_kwargs": {"default_config_files": ["defaults.yaml"]}}


class TestClassesOfDefaultFiles:
    """Options of a class that default_config_files chose."""

    def test_options_of_a_logger(self, host):
        """The logger's options are the user's, and its folder is the job's."""
        script = default_file({"trainer": {"logger": CSV, "max_epochs": 3}})
        cli = host.make("--trainer.logger.name=exp1", **script)
        (logger,) = cli.trainer.loggers
        assert isinstance(logger, CSVLogger)
        assert (logger.name, cli.trainer.max_epochs) == ("exp1", 3)
        assert Path(logger.save_dir) == host.output_dir / "logs"

    @pytest.mark.parametrize("run", [True, False])
    def test_options_of_a_model_and_of_data(self, host, run):
        """A folder in the file gives way to the channel, as the script's other defaults do; an option does not."""
        host.configure(channels=["training"])
        data = {"class_path": f"{MODULE}.SmallData", "init_args": {"data_dir": "elsewhere", "val_dir": "there"}}
        script = default_file({"model": {"class_path": f"{MODULE}.SmallModel"}, "data": data})
        options = ["--model.num_classes=5", "--data.batch_size=2"]
        if run:
            script["parser_kwargs"] = {"fit": script["parser_kwargs"]}
            options += ["--trainer.fast_dev_run=true", "--trainer.enable_model_summary=false"]
        start = host.start if run else host.make
        cli = start(*(["fit"] if run else []), *options, model=None, data=None, **script)
        assert cli.model.layer.out_features == 5
        assert (cli.datamodule.batch_size, cli.datamodule.val_dir) == (2, "there")
        assert cli.datamodule.data_dir == str(host.channel("training"))
        given_folder = host.make(
            "--data.data_dir=own",
            model=None,
            data=None,
            **default_file({"model": {"class_path": f"{MODULE}.SmallModel"}, "data": data}),
        )
        assert given_folder.datamodule.data_dir == "own"


class TestTrainersOfFunctions:
    """A function as trainer_class, which takes what it likes."""

    def test_a_function_without_plugins_and_callbacks(self, host):
        """On one host it works as on a laptop, and what can be added to the finished Trainer is."""

        def make_trainer(max_epochs: int = 1) -> Trainer:
            quiet = {"logger": False, "accelerator": "cpu", "enable_progress_bar": False}
            return Trainer(max_epochs=max_epochs, **quiet)

        with pytest.warns(UserWarning, match="does not expose the `callbacks` argument"):
            cli = host.make("--trainer.max_epochs=3", trainer_class=make_trainer)
        assert cli.trainer.max_epochs == 3
        added = [type(callback) for callback in cli.trainer.callbacks]
        assert JobOutputs in added
        assert LineProgress not in added

    def test_a_function_that_ignores_the_cluster_is_refused(self, host):
        """On two hosts, each would train alone."""

        def make_trainer(max_epochs: int = 1, callbacks: list | None = None) -> Trainer:
            return Trainer(max_epochs=max_epochs, callbacks=callbacks, logger=False, accelerator="cpu")

        host.configure(TWO_HOSTS)
        with pytest.raises(TopologyError, match=r"has 2 trainer hosts.*parameters plugins and num_nodes"):
            host.make(trainer_class=make_trainer)


class Replaced(SmallModel):
    """Has other parameters than those it was made with, as after fully_shard."""

    def configure_model(self):
        """Replace them."""
        self.layer = torch.nn.Linear(2, 3)
        self.before = self.layer.weight.detach().clone()


def test_an_optimizer_of_the_command_line_trains_the_parameters_that_a_strategy_made(host):
    """LightningCLI makes it earlier, with parameters that are gone by then."""
    options = ["--trainer.max_epochs=1", "--trainer.enable_model_summary=false", "--trainer.accelerator=cpu"]
    cli = host.start("fit", *options, "--optimizer=SGD", "--optimizer.lr=0.1", model=Replaced)
    assert not torch.equal(cli.model.layer.weight, cli.model.before)


class _ParsesOnly:
    """Ends when the arguments are parsed."""

    def instantiate_classes(self):
        """Build nothing."""

    def _run_subcommand(self, subcommand):
        """Run nothing."""

    def add_arguments_to_parser(self, parser):
        """Add groups and a link, as scripts do."""
        parser.add_argument("--note", default="none")
        parser.add_class_arguments(CSVLogger, "mylogger", skip={"flush_logs_every_n_steps"})
        parser.set_defaults({"mylogger.save_dir": "/x", "trainer.max_epochs": 4})
        parser.link_arguments("note", "mylogger.name")


class Stock(_ParsesOnly, LightningCLI):
    """Lightning's own."""


class Ours(_ParsesOnly, SageMakerCLI):
    """Ours."""


# Each choice is a list of arguments; a random command line takes some of them, in any order.
CHOICES = [
    ["--trainer.max_epochs=2"],
    ["--trainer.callbacks=EarlyStopping", "--trainer.callbacks.monitor=a", "--trainer.callbacks.patience=5"],
    ["--trainer.callbacks+=Timer", "--trainer.callbacks.interval=epoch"],
    ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=/abs"],
    ["--trainer.logger.name=exp1"],
    ["--trainer.logger=false"],
    ["--trainer.strategy=ddp"],
    ["--trainer.strategy.find_unused_parameters=true"],
    ["--trainer.devices=1"],
    ["--model.num_classes=5"],
    ["--model.scores=[1.0, 2]"],
    ["--model=SmallModel"],
    ["--model.weights", ""],
    ["--data.batch_size=2"],
    ["--data=RootData", "--data.root=/r"],
    ["--data.val_dir=null"],
    ["--note=a b"],
    ["--mylogger.version=3"],
    ["--optimizer=SGD", "--optimizer.lr=0.1"],
    ["--lr_scheduler=StepLR", "--lr_scheduler.step_size=3"],
    ["--seed_everything=false"],
    ["--config=own.yaml"],
    ["--ckpt_path=null"],
]
MISTAKES = [["--trainer.max_epochs", "two"], ["--trainer.max_epoch=2"], ["--data.nothing=1"], ["--mylogger.name=c"]]
CONTENTS = [
    {},
    {"trainer": {"logger": CSV | {"init_args": {"save_dir": "/logs"}}}},
    {"trainer": {"callbacks": [{"class_path": "EarlyStopping", "init_args": {"monitor": "m"}}]}},
    {"trainer": {"strategy": {"class_path": "DDPStrategy"}}, "note": "file"},
    {"data": {"batch_size": 3}, "model": {"num_classes": 4}},
    {"data": {"class_path": f"{MODULE}.SmallData", "init_args": {"batch_size": 6}}},
    {"model": {"class_path": f"{MODULE}.SmallModel", "init_args": {"num_classes": 9}}},
]
SHAPES = [
    {},
    {"subclass_mode_model": True, "subclass_mode_data": True},
    {"model": None, "data": None},
    {"trainer_defaults": {"max_epochs": 9, "strategy": "ddp_find_unused_parameters_true"}},
    {"auto_configure_optimizers": False},
]
# What a job fills in, and what only our parser has.
FILLED = [("trainer", "num_nodes"), ("trainer", "default_root_dir"), ("data_service",)]


@pytest.mark.proof
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    chosen=st.lists(st.sampled_from(CHOICES), max_size=4, unique_by=tuple),
    mistake=st.sampled_from([[], [], [], *MISTAKES]),
    shape=st.sampled_from(SHAPES),
    defaults=st.sampled_from(CONTENTS),
    own=st.sampled_from(CONTENTS),
    run=st.booleans(),
)
def test_a_job_changes_only_what_it_fills_in(host, monkeypatch, chosen, mistake, shape, defaults, own, run):
    """A random command line has the same meaning, or the same error, in a job as off SageMaker."""
    script = {"run": run, **shape, **default_file(defaults)}
    if run:
        script["parser_kwargs"] = {"fit": script["parser_kwargs"]}
    Path("own.yaml").write_text(yaml.safe_dump(own))
    arguments = [*(["fit"] if run else []), *(argument for choice in [*chosen, mistake] for argument in choice)]
    with monkeypatch.context() as elsewhere:
        elsewhere.delenv("SAGEMAKER_BASE_DIR")
        expected = parsed(host, Stock, arguments, script)
    assert parsed(host, Ours, arguments, script) == expected


def parsed(host, cli, arguments, script):
    """What a CLI makes of arguments: the configuration without what a job fills in, or the error."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            config = host.start(*arguments, cli=cli, **script).config.as_dict()
    except SystemExit:
        lines = said.getvalue().split("error: ")[-1].splitlines()
        return lines[0].replace(os.getcwd(), "")
    section = config.get("fit", config)
    for *path, last in FILLED:
        inner = section
        for name in path:
            inner = inner[name]
        inner.pop(last, None)
    return config


@pytest.mark.proof
@pytest.mark.processes
def test_a_missing_option_in_a_job_of_several_hosts_is_all_that_is_said(host):
    """The error of the command line is not followed by words on a Trainer that was never made."""
    host.configure(TWO_HOSTS)
    script = (
        "from tests.fakes.small_app import RootData, SmallModel; from lightning_sm import SageMakerCLI; "
        "SageMakerCLI(SmallModel, RootData)"
    )
    environment = {**os.environ, "PYTHONPATH": python_path(REPOSITORY)}
    command = [sys.executable, "-c", script, "fit"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=90, env=environment)
    assert ended.returncode == 2
    assert "data.root" in ended.stderr
    assert "No Trainer used" not in ended.stderr
