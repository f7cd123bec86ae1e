"""SageMakerCLI in a job: the sources of its arguments, and the settings that the cluster adds."""

import pytest
from pytorch_lightning import LightningDataModule
from pytorch_lightning.callbacks import TQDMProgressBar
from pytorch_lightning.cli import LightningCLI
from pytorch_lightning.plugins.environments import LightningEnvironment

from lightning_sm import SageMakerEnvironment
from lightning_sm.errors import OutputDirectoryError, TopologyError
from lightning_sm.training.callbacks.line_progress import LineProgress
from lightning_sm.training.cli import SageMakerCLI
from tests.fakes.small_app import TWO_HOSTS, PairData, PassingData, RootData, SmallData, SmallModel, make_pairs

ROOT_DATA = f"{RootData.__module__}.{RootData.__qualname__}"
FAST = ("--trainer.fast_dev_run=true", "--trainer.enable_model_summary=false")
# Three ways for a script to leave the choice of classes to the configuration.
ANY_DATA = {"data": SmallData, "subclass_mode_data": True}
NO_DATA = {"data": None}
ANY_MODEL_AND_DATA = {"model": None, "data": None}


def progress_bars(cli):
    """Return the types of the trainer's progress bars."""
    return [type(callback) for callback in cli.trainer.callbacks if "Progress" in type(callback).__name__]


class TestArguments:
    """Arguments come from the hyperparameters, the config channel and the caller of the CLI."""

    @pytest.mark.parametrize(
        "args",
        [["--data.batch_size=2", "--trainer.max_epochs=3"], {"data": {"batch_size": 2}, "trainer": {"max_epochs": 3}}],
    )
    def test_arguments_given_by_the_script(self, host, caplog, args):
        """Arguments that the script passes, as a list or a dict, count as the user's; hyperparameters do not."""
        cli = host.configure(channels=["training"], hyperparameters={"data.batch_size": "8"}).make(args=args)
        assert (cli.datamodule.batch_size, cli.trainer.max_epochs) == (2, 3)
        assert cli.datamodule.data_dir == str(host.channel("training"))
        assert "so the hyperparameters --data.batch_size have no effect" in caplog.text

    def test_arguments_of_a_subcommand_given_as_a_dict(self, host):
        """Arguments of a subcommand that the script passes as a dict count as the user's."""
        trainer = {"fast_dev_run": True, "enable_model_summary": False}
        args = {"subcommand": "fit", "fit": {"data": {"data_dir": "nowhere"}, "trainer": trainer}}
        assert host.configure(channels=["training"]).start(args=args).datamodule.data_dir == "nowhere"

    def test_the_toolkits_command_line_is_replaced(self, host):
        """Values that the toolkit mangles are reread from the hyperparameters file, and the subcommand becomes fit."""

        class OptionsCLI(SageMakerCLI):
            def add_arguments_to_parser(self, parser):
                parser.add_argument("--k", type=bool)
                parser.add_argument("--none", type=int | None, default=1)
                parser.add_argument("--nested", type=dict[str, object])
                parser.add_argument("--b", type=int)

        host.configure(
            hyperparameters={
                "k": "true",
                "none": "null",
                "nested": '{"x": 1, "y": [1, 2]}',
                "b": "4",
                "trainer.fast_dev_run": "true",
                "sagemaker_program": '"train.py"',
            }
        )
        rendered = [
            "-b",
            "4",
            "--k",
            "True",
            "--nested",
            "x=1,y=[1, 2]",
            "--none",
            "",
            "--trainer.fast_dev_run",
            "True",
        ]
        cli = host.start(*rendered, cli=OptionsCLI)
        config = cli.config.fit
        assert (config.k, config.none, config.nested, config.b) == (True, None, {"x": 1, "y": [1, 2]}, 4)
        assert cli.subcommand == "fit"
        assert cli.trainer.fast_dev_run

    @pytest.mark.parametrize("given", [[], ["validate"]])
    def test_without_arguments_the_hyperparameters_are_read(self, host, given):
        """An empty command line gets the hyperparameters; one with arguments is left alone."""
        host.configure(hyperparameters={"data.batch_size": "2", "trainer.fast_dev_run": "true"})
        cli = host.start(*given)
        assert (cli.subcommand, cli.datamodule.batch_size) == (("validate", 4) if given else ("fit", 2))

    @pytest.mark.parametrize("form", ["--config={}", "--config {}"])
    def test_a_file_may_name_the_subcommand(self, host, form):
        """A configuration file with the section of a subcommand runs that subcommand, as in LightningCLI."""
        path = host.base_dir / "c.yaml"
        path.write_text("validate: {trainer: {fast_dev_run: true}, data: {batch_size: 3}}")
        cli = host.start(*form.format(path).split())
        assert (cli.subcommand, cli.datamodule.batch_size) == ("validate", 3)

    def test_the_environment_may_name_the_subcommand(self, host, monkeypatch):
        """With ``default_env``, a variable names the subcommand, as in LightningCLI."""
        monkeypatch.setenv("PL_SUBCOMMAND", "validate")
        monkeypatch.setenv("PL_VALIDATE__TRAINER__FAST_DEV_RUN", "true")
        cli = host.start("--data.batch_size=3", parser_kwargs={"default_env": True})
        assert (cli.subcommand, cli.datamodule.batch_size) == ("validate", 3)

    def test_files_of_the_config_channel(self, host):
        """Files are read in order, hyperparameters override them, and their values count as the user's."""
        host.configure(channels=["config", "training"], hyperparameters={"data.batch_size": "8"})
        folder = host.channel("config")
        (folder / "1.yaml").write_text("{data: {batch_size: 2, data_dir: own}, trainer: {max_epochs: 3}}")
        (folder / "2.json").write_text('{"trainer": {"max_epochs": 4}}')
        cli = host.make("--data.batch_size", "8")
        assert (cli.datamodule.batch_size, cli.datamodule.data_dir, cli.trainer.max_epochs) == (8, "own", 4)

    @pytest.mark.parametrize("arguments", [["--help"], ["fit", "--help"]])
    def test_help(self, host, capsys, arguments):
        """``--help`` works in a job and exits with code 0."""
        with pytest.raises(SystemExit, match="0"):
            host.start(*arguments)
        assert "fit" in capsys.readouterr().out

    def test_print_config_shows_what_it_shows_elsewhere(self, host, capsys):
        """``--print_config`` prints the configuration in a job."""
        with pytest.raises(SystemExit, match="0"):
            host.start("fit", "--print_config")
        assert "data_dir: nowhere" in capsys.readouterr().out

    @pytest.mark.parametrize("source", ["line", "file", "dict"])
    def test_an_unknown_key_is_named(self, host, capsys, source):
        """An unknown key fails the job with exit code 2 and an error that names the key."""
        (host.base_dir / "c.yaml").write_text("trainer: {max_epoks: 1}")
        arguments = {"line": ["--trainer.max_epoks=1"], "file": [f"--config={host.base_dir / 'c.yaml'}"], "dict": []}
        args = {"trainer": {"max_epoks": 1}} if source == "dict" else None
        with pytest.raises(SystemExit, match="2"):
            host.make(*arguments[source], args=args)
        assert "max_epoks" in capsys.readouterr().err

    @pytest.mark.matrix
    @pytest.mark.parametrize("any_data", [True, False])
    @pytest.mark.parametrize(
        "text",
        [
            "trainer: {num_nodes: abc}",
            "trainer: {devices: {a: 1}}",
            "trainer: {default_root_dir: [1]}",
            "trainer: {logger: {save_dir: x}}",
            "trainer: {plugins: 5}",
            "data: {data_dir: 5}",
            "data: {class_path: SmallData, init_args: {nope: 1}}",
            "data: {class_path: Nope}",
            "data: {class_path: os.path}",
            "data: {class_path: builtins.dict}",
            "data: {class_path: 5}",
            "[1, 2]",
        ],
    )
    @pytest.mark.parametrize("groups", [{"gpu": ["algo-1"]}, {"gpu": ["algo-1"], "data": ["algo-2"]}])
    def test_a_wrong_config_ends_as_in_lightning_cli(self, host, capsys, any_data, text, groups):
        """The values that the job adds do not break on a configuration that the parser refuses, or hide its error."""
        host.configure(groups)
        (host.base_dir / "c.yaml").write_text(text)
        ends = []
        for cli in (LightningCLI, SageMakerCLI):
            with pytest.raises(SystemExit) as end:
                host.make(f"--config={host.base_dir / 'c.yaml'}", cli=cli, subclass_mode_data=any_data)
            ends.append((end.value.code, capsys.readouterr().err.rpartition("error: ")[2]))
        assert ends[0] == ends[1]
        assert ends[0][0] == 2

    def test_a_wrong_value_is_named(self, host, capsys):
        """A value of the wrong type fails the job with exit code 2 and an error that names the argument."""
        with pytest.raises(SystemExit, match="2"):
            host.make("--data.batch_size=many")
        assert "batch_size" in capsys.readouterr().err


class TestCluster:
    """num_nodes, devices and the cluster environment come from the job."""

    @pytest.mark.parametrize("name", ["algo-1", "algo-2"])
    def test_the_trainer_fits_the_job(self, host, monkeypatch, name):
        """Two hosts with two processes each form a world of size 4, and each host gets its ranks."""
        monkeypatch.setenv("LIGHTNING_SM_DEVICES", "2")
        trainer = host.configure(TWO_HOSTS, name).make("--trainer.accelerator=cpu").trainer
        environment = trainer.strategy.cluster_environment
        assert isinstance(environment, SageMakerEnvironment)
        assert (trainer.num_nodes, trainer.num_devices, trainer.world_size) == (2, 2, 4)
        assert trainer.global_rank == (0 if name == "algo-1" else 2)

    def test_matching_settings_are_accepted(self, host, monkeypatch):
        """Settings that match the cluster are accepted."""
        monkeypatch.setenv("LIGHTNING_SM_DEVICES", "2")
        cli = host.configure(TWO_HOSTS).make("--trainer.num_nodes=2", "--trainer.devices=2")
        assert cli.trainer.world_size == 4

    @pytest.mark.parametrize(
        ("argument", "text"),
        [
            ("--trainer.num_nodes=3", "num_nodes=3 does not match the number of trainer hosts in the job, 2 "),
            ("--trainer.devices=4", "devices=4 does not match .* on each host, 2,"),
            ("--trainer.devices=[0]", "devices=1 does not match .* on each host, 2,"),
        ],
    )
    def test_contradicting_settings_are_refused(self, host, monkeypatch, argument, text):
        """A setting that contradicts the cluster raises an error that names both values."""
        monkeypatch.setenv("LIGHTNING_SM_DEVICES", "2")
        with pytest.raises(TopologyError, match=text):
            host.configure(TWO_HOSTS).make(argument)

    def test_a_contradicting_variable_is_refused(self, host, monkeypatch):
        """A setting from an environment variable counts as the user's and is checked like an argument."""
        monkeypatch.setenv("PL_TRAINER__NUM_NODES", "3")
        with pytest.raises(TopologyError, match="num_nodes=3 does not match"):
            host.configure(TWO_HOSTS).make(parser_kwargs={"default_env": True})

    def test_lightnings_default_of_one_node_gives_way(self, host):
        """``num_nodes=1`` is overridden: scripts pass on Lightning's default, and no job can mean it."""
        assert host.configure(TWO_HOSTS).make("--trainer.num_nodes=1").trainer.num_nodes == 2

    def test_the_scripts_defaults_give_way(self, host):
        """``trainer_defaults``, often set for a laptop, are not the user's choice for this job and are overridden."""
        cli = host.configure(TWO_HOSTS).make(trainer_defaults={"num_nodes": 1, "max_epochs": 7})
        assert (cli.trainer.num_nodes, cli.trainer.max_epochs) == (2, 7)

    def test_the_environment_may_be_in_the_configuration(self, host):
        """A SageMakerEnvironment in ``trainer.plugins`` is used."""
        trainer = host.configure(TWO_HOSTS).make("--trainer.plugins=lightning_sm.SageMakerEnvironment").trainer
        assert isinstance(trainer.strategy.cluster_environment, SageMakerEnvironment)
        assert trainer.strategy.cluster_environment.num_nodes == 2

    def test_the_environment_may_be_the_strategys(self, host):
        """A SageMakerEnvironment in the strategy's arguments is used."""
        nested = "{class_path: DDPStrategy, init_args: {cluster_environment: lightning_sm.SageMakerEnvironment}}"
        trainer = host.configure(TWO_HOSTS).make(f"--trainer.strategy={nested}").trainer
        assert isinstance(trainer.strategy.cluster_environment, SageMakerEnvironment)

    @pytest.mark.parametrize("where", ["plugins", "strategy"])
    def test_a_foreign_environment_is_refused(self, host, where):
        """Other cluster environments are refused, because they number the ranks differently."""
        foreign = f"{LightningEnvironment.__module__}.LightningEnvironment"
        if where == "strategy":
            foreign = f"{{class_path: DDPStrategy, init_args: {{cluster_environment: {foreign}}}}}"
        with pytest.raises(
            TopologyError, match=rf"trainer\.{where} has LightningEnvironment.*Remove LightningEnvironment"
        ):
            host.make(f"--trainer.{where}={foreign}")

    def test_a_trainer_need_not_see_the_data(self, host):
        """A channel that only data hosts have fills a required argument on the trainer."""
        host.configure({"gpu": ["algo-1"], "data": ["algo-2"]}, "algo-1")
        host.channels_of_data_hosts = ["training"]
        cli = host.make(data=RootData, channels={"training": "root"})
        assert cli.datamodule.root == str(host.channel("training"))

    @pytest.mark.matrix
    @pytest.mark.parametrize("mode", ["class", "subclass", "any"])
    @pytest.mark.parametrize(
        ("data", "folders"),
        [
            (RootData, {"root": "train"}),
            (PairData, {"images_dir": "images", "labels_dir": "labels", "mask_dir": None}),
            (PassingData, {"data_dir": "train", "images_dir": "images", "labels_dir": "labels"}),
        ],
    )
    def test_folders_are_those_of_the_channels_of_data_hosts(self, host, caplog, mode, data, folders):
        """Channels of data hosts fill folders of any name, whoever chose the class, and the log lists them."""
        caplog.set_level("INFO", "lightning_sm")
        host.configure({"gpu": ["algo-1"], "data": ["algo-2"]}, "algo-1")
        host.channels_of_data_hosts = ["train", "images", "labels"]
        modes = {
            "class": ([], {"data": data}),
            "subclass": ([f"--data={data.__name__}"], {"data": SmallData, "subclass_mode_data": True}),
            "any": ([f"--data={data.__name__}"], {"data": None}),
        }
        arguments, settings = modes[mode]
        module = host.make(*arguments, **settings).datamodule
        expected = {name: channel and str(host.channel(channel)) for name, channel in folders.items()}
        assert {name: getattr(module, name) for name in folders} == expected
        lines = "\n".join(text for text in caplog.messages if text.startswith("Channels: "))
        assert all(f"data.{name} = {folder}" in lines for name, folder in expected.items() if folder)

    def test_only_what_is_missing_is_filled(self, host):
        """A folder that the user sets or that a channel of the trainer fills is kept."""
        host.configure({"gpu": ["algo-1"], "data": ["algo-2"]}, "algo-1", channels=["labels"])
        host.channels_of_data_hosts = ["training", "images", "labels"]
        mapping = {"labels": "images_dir", "images": "labels_dir"}
        arguments = ["--data=PassingData", "--data.data_dir=own"]
        module = host.make(*arguments, data=SmallData, subclass_mode_data=True, channels=mapping)
        found = (module.datamodule.data_dir, module.datamodule.images_dir, module.datamodule.labels_dir)
        assert found == ("own", str(host.channel("labels")), str(host.channel("images")))

    def test_a_mapped_argument_is_filled_too(self, host):
        """A mapped argument is filled whatever its name, even if a function creates the DataModule."""
        host.configure({"gpu": ["algo-1"], "data": ["algo-2"]}, "algo-1")
        host.channels_of_data_hosts = ["a", "images"]
        module = host.make(data=make_pairs, channels={"a": "labels_path", "b": "model.weights"}).datamodule
        assert (module.images_dir, module.labels_dir) == (str(host.channel("images")), str(host.channel("a")))

    def test_settings_of_the_data_service_are_saved(self, host):
        """The saved configuration includes the settings of the data service."""
        host.configure({"gpu": ["algo-1"], "data": ["algo-2"]}, "algo-1")
        cli = host.make("--data_service.workers=3")
        assert cli.data_service.workers == 3
        assert "workers: 3" in cli._parser(cli.subcommand).dump(cli.config, skip_none=False)

    def test_a_trainer_of_such_a_job_counts_trainers_only(self, host):
        """Data hosts do not count as nodes, and may have channels that the trainer does not have."""
        host.configure({"gpu": ["algo-1"], "data": ["algo-2"]}, "algo-1", channels=["training"])
        assert host.make(data=RootData, channels={"images": "model.weights"}).trainer.num_nodes == 1

    def test_a_trainer_of_the_scripts_own(self, host):
        """A function that creates the Trainer need not accept every argument that the job sets."""
        from pytorch_lightning import Trainer

        def make_trainer(plugins: list | None = None, callbacks: list | None = None, max_epochs: int = 1) -> Trainer:
            return Trainer(plugins=plugins, callbacks=callbacks, max_epochs=max_epochs, logger=False, accelerator="cpu")

        cli = host.configure(tensorboard={}).make("--trainer.max_epochs=3", trainer_class=make_trainer)
        assert (cli.trainer.max_epochs, cli.trainer.loggers, progress_bars(cli)) == (3, [], [LineProgress])


class TestProgressBars:
    """LineProgress is the progress bar unless the user chooses another one or disables it."""

    def test_lines_by_default(self, host):
        """A job without settings has LineProgress and no other bar."""
        assert progress_bars(host.make()) == [LineProgress]

    @pytest.mark.parametrize("argument", ["--trainer.enable_progress_bar=false", "--trainer.barebones=true"])
    def test_none_if_switched_off(self, host, argument):
        """With progress bars disabled, neither LineProgress nor Lightning's bar is added."""
        assert progress_bars(host.configure(tensorboard={}).make(argument)) == []

    @pytest.mark.parametrize("way", ["line", "defaults", "parser", "kwargs"])
    def test_the_users_own_bar(self, host, way):
        """A bar in trainer.callbacks, in trainer_defaults, from the parser or from the caller replaces LineProgress."""

        class BarCLI(SageMakerCLI):
            def add_arguments_to_parser(self, parser):
                parser.add_lightning_class_args(TQDMProgressBar, "bar")

        if way == "line":
            cli = host.make("--trainer.callbacks+=TQDMProgressBar")
        elif way == "defaults":
            cli = host.make(trainer_defaults={"callbacks": TQDMProgressBar()})
        elif way == "parser":
            cli = host.make(cli=BarCLI)
        else:
            cli = host.make()
            cli.trainer = cli.instantiate_trainer(callbacks=TQDMProgressBar())
        assert progress_bars(cli) == [TQDMProgressBar]


@pytest.mark.matrix
@pytest.mark.parametrize("folder", ["model", "output/data/algo-1", "checkpoints", "tensorboard"])
@pytest.mark.parametrize("obstacle", ["file", "read-only"])
def test_a_folder_that_cannot_be_written_is_named_at_once(host, folder, obstacle):
    """A file in place of a folder, or a folder that is not writable, fails the job before training."""
    path = host.base_dir / folder
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("") if obstacle == "file" else path.symlink_to("/sys/kernel")
    host.configure(
        checkpoint={"LocalPath": str(host.base_dir / "checkpoints")},
        tensorboard={"LocalPath": str(host.base_dir / "tensorboard")},
    )
    with pytest.raises(OutputDirectoryError, match=f"{folder} is not writable"):
        host.make()


def test_a_class_that_is_none_is_refused_as_anywhere(host, capsys):
    """An unknown class is refused with LightningCLI's error."""
    with pytest.raises(SystemExit, match="2"):
        host.make("--data=NoSuchData", data=LightningDataModule, subclass_mode_data=True)
    assert "NoSuchData" in capsys.readouterr().err


def test_the_classes_of_a_job_are_the_users(host):
    """The CLI instantiates the script's classes, and has the job and its topology as attributes."""
    cli = host.configure(TWO_HOSTS).make()
    assert (type(cli.model), type(cli.datamodule)) == (SmallModel, SmallData)
    assert (cli.job.current_host, cli.topology.num_nodes) == ("algo-1", 2)


def test_arguments_of_lightning_cli_may_be_given_by_position(host):
    """A script that passes LightningCLI's arguments by position only needs the new class name."""
    positional = [None, {"overwrite": False}]
    cli = host.make(cli=lambda model, data, **kwargs: SageMakerCLI(model, data, *positional, **kwargs))
    assert (cli.save_config_callback, cli.save_config_kwargs) == (None, {"overwrite": False})


def test_a_job_of_one_host_and_one_device_shows_its_table(host, caplog):
    """A single process logs its host and versions, although Lightning never asks it for ranks."""
    with caplog.at_level("INFO", logger="lightning_sm"):
        host.make()
    (table,) = (record.getMessage() for record in caplog.records if "node rank" in record.getMessage())
    assert "algo-1*" in table
    assert "main address algo-1:" in table
    assert "torch" in table
