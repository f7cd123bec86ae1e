"""SageMakerTrainer and SageMakerFabric, for scripts without LightningCLI."""

import inspect
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from pytorch_lightning import Callback, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint, TQDMProgressBar
from pytorch_lightning.cli import LightningCLI
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from pytorch_lightning.plugins.environments import LightningEnvironment

from lightning_sm import DataServiceSettings, SageMakerEnvironment, SageMakerFabric, SageMakerTrainer
from lightning_sm.data.trainer.datamodule import RemoteDataModule
from lightning_sm.data.trainer.remote_trainer import DataHostLoaders
from lightning_sm.errors import DataSettingsError, TopologyError
from lightning_sm.job.control_folder import ControlFolder
from lightning_sm.job.variables import CONTROL_DIR
from lightning_sm.training import trainer as trainer_module
from lightning_sm.training.callbacks.line_progress import LineProgress
from lightning_sm.training.callbacks.local_position import LocalPosition
from lightning_sm.training.callbacks.outputs import JobOutputs
from lightning_sm.training.callbacks.spot_checkpoint import SpotCheckpoint
from tests.fakes.small_app import TWO_HOSTS, SmallData, SmallModel
from tests.integration.hosts import REPOSITORY, SCRIPTS
from tests.quick_processes import python_path

WITH_DATA = {"gpu": ["algo-1"], "data": ["algo-2"]}
QUIET = {"accelerator": "cpu", "enable_model_summary": False}


def fit(host, **settings):
    """Run a script without a CLI, as if in a new process."""
    host.new_process()
    trainer = SageMakerTrainer(**QUIET, **{"max_epochs": 1, **settings})
    trainer.fit(SmallModel(), datamodule=SmallData())
    return trainer


def callbacks_of(trainer):
    """Return the types of the callbacks."""
    return {type(callback) for callback in trainer.callbacks}


class Works(Callback):
    """Records the phase that the launcher sees in each hook that may take any time.

    Args:
        folder: The control folder.
    """

    HOOKS = (
        *("setup", "on_fit_start", "on_sanity_check_start", "on_train_start", "on_train_epoch_start"),
        *("on_validation_start", "on_validation_epoch_start", "on_validation_epoch_end", "on_validation_end"),
        *("on_train_epoch_end", "on_train_end", "on_fit_end"),
    )

    def __init__(self, folder):
        self.phases = []
        for name in self.HOOKS:
            setattr(self, name, partial(self._note, ControlFolder(folder), name))

    def _note(self, control, name, *_args, **_kwargs):
        self.phases += [(name, beat.phase) for beat in control.beats()]


class TestElsewhere:
    """Trainer and Fabric outside SageMaker."""

    @pytest.fixture(autouse=True)
    def _laptop(self, host, monkeypatch):
        monkeypatch.delenv("SAGEMAKER_BASE_DIR")

    def test_it_is_the_trainer(self):
        """Outside SageMaker, SageMakerTrainer adds no callback, and only Lightning writes files."""
        trainer = SageMakerTrainer(**QUIET, max_epochs=1, data_service=DataServiceSettings(workers=1))
        assert callbacks_of(trainer) == callbacks_of(Trainer(**QUIET))
        trainer.fit(SmallModel(), SmallData())
        assert trainer.global_step == 2
        assert [path.name for path in Path.cwd().iterdir()] == ["lightning_logs"]

    def test_fabric_is_fabric(self):
        """Outside SageMaker, SageMakerFabric runs in one process, as Fabric does."""
        fabric = SageMakerFabric(accelerator="cpu", devices=1)
        fabric.launch()
        assert fabric.world_size == 1


class TestInAJob:
    """Trainer and Fabric on a trainer host."""

    def test_it_adds_what_the_cli_adds(self, host):
        """SageMakerTrainer sets the cluster, folders and callbacks that SageMakerCLI sets."""
        expected = host.configure(TWO_HOSTS).make()
        host.new_process()
        trainer = SageMakerTrainer(**QUIET)
        assert trainer.num_nodes == 2
        assert isinstance(trainer.strategy.cluster_environment, SageMakerEnvironment)
        assert trainer.default_root_dir == expected.trainer.default_root_dir == str(host.output_dir)
        assert callbacks_of(trainer) >= {LineProgress, LocalPosition, JobOutputs, SpotCheckpoint, ModelCheckpoint}

    @pytest.mark.usefixtures("restored_signals")
    def test_a_restarted_job_resumes_and_leaves_its_model(self, host):
        """Checkpoints go to the checkpoint folder, the next attempt resumes from there, and the model is exported."""
        folder = host.base_dir / "ck"
        host.configure(checkpoint={"LocalPath": str(folder)})
        fit(host)
        trainer = fit(host, max_epochs=2)
        assert (Path(trainer.ckpt_path).parent, trainer.global_step) == (folder, 4)
        assert sorted(path.name for path in host.model_dir.iterdir()) == ["model.ckpt", "state_dict.pt"]

    @pytest.mark.usefixtures("restored_signals")
    def test_a_test_after_a_failed_fit_loads_what_it_names(self, host, tmp_path):
        """A test after a failed fit loads the checkpoint it names, not the latest, from which fit would resume."""
        folder = host.base_dir / "ck"
        host.configure(checkpoint={"LocalPath": str(folder)})
        named = tmp_path / "named.ckpt"
        fit(host).save_checkpoint(named)

        class Fails(SmallModel):
            def setup(self, stage):
                raise ArithmeticError

        host.new_process()
        trainer = SageMakerTrainer(**QUIET, max_epochs=2)
        with pytest.raises(ArithmeticError):
            trainer.fit(Fails(), datamodule=SmallData())
        trainer.test(SmallModel(), datamodule=SmallData(), ckpt_path=named)
        assert Path(trainer.ckpt_path) == named

    @pytest.mark.usefixtures("restored_signals")
    def test_callbacks_may_take_any_time_at_the_end_of_an_epoch_or_a_validation(self, host, tmp_path, monkeypatch):
        """The launcher is told that a hook may take any time before the user's callback runs in it."""
        (folder := tmp_path / "control").mkdir()
        monkeypatch.setenv(CONTROL_DIR.name, str(folder))
        works = Works(folder)
        fit(host, callbacks=[works], max_epochs=2)
        assert {name for name, _ in works.phases} == set(Works.HOOKS)
        assert [(name, phase) for name, phase in works.phases if not phase.may_pause] == []

    @pytest.mark.usefixtures("restored_signals")
    def test_relative_folders_are_those_of_the_job(self, host):
        """Relative folders of loggers and callbacks are moved into the job's folders."""
        host.configure(tensorboard={"LocalPath": str(host.base_dir / "tb")})
        loggers = [CSVLogger("mine"), TensorBoardLogger("board"), CSVLogger("/abs")]
        trainer = SageMakerTrainer(
            **QUIET, logger=loggers, default_root_dir="root", callbacks=[ModelCheckpoint("ckpts"), TQDMProgressBar()]
        )
        assert [logger.save_dir for logger in trainer.loggers] == [
            str(host.output_dir / "mine"),
            str(host.base_dir / "tb" / "board"),
            "/abs",
        ]
        assert trainer.default_root_dir == str(host.output_dir / "root")
        assert trainer.checkpoint_callback.dirpath == str(host.output_dir / "ckpts")
        assert LineProgress not in callbacks_of(trainer)
        fit(host, logger=CSVLogger("mine"))
        assert list((host.output_dir / "mine").rglob("metrics.csv"))
        assert list(Path.cwd().iterdir()) == []

    def test_the_default_logger_is_tensorboards_if_the_job_has_its_folder(self, host):
        """The default logger writes to the job's TensorBoard folder, as with the CLI."""
        host.configure(tensorboard={"LocalPath": str(host.base_dir / "tb")})
        (logger,) = SageMakerTrainer(**QUIET).loggers
        assert (type(logger), logger.save_dir) == (TensorBoardLogger, str(host.base_dir / "tb"))

    @pytest.mark.parametrize(
        ("settings", "text"),
        [
            (
                {"num_nodes": 3},
                "(?s)num_nodes=3 does not match .* leave num_nodes out: SageMakerCLI, SageMakerTrainer and SageMakerF",
            ),
            ({"plugins": [LightningEnvironment()]}, r"trainer\.plugins has LightningEnvironment"),
        ],
    )
    def test_contradictions_are_refused(self, host, settings, text):
        """A setting that contradicts the cluster is an error before training."""
        host.configure(TWO_HOSTS)
        with pytest.raises(TopologyError, match=text):
            SageMakerTrainer(**QUIET, **settings)

    @pytest.mark.parametrize("cls", [SageMakerTrainer, SageMakerFabric])
    def test_lightnings_default_of_one_node_gives_way(self, host, cls):
        """``num_nodes=1`` is overridden: scripts pass on Lightning's default as ``num_nodes=args.num_nodes``."""
        host.configure(TWO_HOSTS)
        made = cls(accelerator="cpu", devices=1, num_nodes=1)
        assert made.strategy.cluster_environment.num_nodes == 2
        assert (made.num_nodes if cls is SageMakerTrainer else made._connector._num_nodes_flag) == 2

    def test_it_may_be_the_clis_trainer(self, host):
        """As SageMakerCLI's trainer, SageMakerTrainer adds nothing twice, and the options of fit are Lightning's."""
        cli = host.configure(WITH_DATA).make(trainer_class=SageMakerTrainer)
        names = [type(callback).__name__ for callback in cli.trainer.callbacks]
        assert len(names) == len(set(names))
        assert inspect.signature(SageMakerTrainer.fit) == inspect.signature(Trainer.fit)
        assert "ckpt_path" in host.start("validate", trainer_class=SageMakerTrainer, cli=_Parses).config.validate


class _Parses(LightningCLI):
    """Parses the arguments, and then stops."""

    def instantiate_classes(self):
        """Build nothing."""

    def _run_subcommand(self, subcommand):
        """Run nothing."""


class TestDataHosts:
    """Trainer and RemoteDataModule in a job with a data group."""

    @pytest.mark.parametrize("given", [{"datamodule": SmallData()}, {}], ids=["DataModule", "nothing"])
    def test_a_data_host_serves(self, host, monkeypatch, given):
        """A data host serves and exits, whatever fit() gets, even without the script's accelerator."""
        served = []
        monkeypatch.setattr(trainer_module, "serve", lambda *arguments: served.append(arguments))
        host.configure(WITH_DATA, "algo-2")
        settings = DataServiceSettings(workers=3)
        trainer = SageMakerTrainer(accelerator="gpu", devices=8, data_service=settings)
        trainer.logger.experiment.add_scalar("nothing", 1)
        with pytest.raises(SystemExit) as ended:
            trainer.fit(SmallModel(), **given)
        assert ended.value.code == 0
        ((_, topology, used),) = served
        assert (topology.current_host, used) == ("algo-2", settings)

    def test_a_trainer_gets_what_the_script_hands_over(self, host, monkeypatch):
        """Lightning gets loaders and DataModules unchanged, and one callback moves their workers to data hosts."""
        host.configure(WITH_DATA)
        trainer = SageMakerTrainer(**QUIET)
        got = []
        monkeypatch.setattr(trainer, "_fit_impl", lambda *arguments: got.append(arguments[1:4]))
        data, loader = SmallData(), SmallData().train_dataloader()
        trainer.fit(SmallModel(), loader)
        trainer.fit(SmallModel(), datamodule=data)
        trainer.fit(SmallModel())
        assert got == [(loader, None, None), (None, None, data), (None, None, None)]
        assert sum(isinstance(callback, DataHostLoaders) for callback in trainer.callbacks) == 1

    def test_without_addresses_it_is_that_of_the_job(self, host):
        """Without addresses, RemoteDataModule uses the job's data hosts; the DataModule stays the same object."""
        data = SmallData()
        assert RemoteDataModule(data) is data
        host.configure(WITH_DATA)
        assert RemoteDataModule(data) is data
        assert isinstance(data, RemoteDataModule)
        assert data._service_connection.is_of_job
        with pytest.raises(DataSettingsError, match="empty list of addresses"):
            RemoteDataModule(data, [])


@pytest.mark.proof
@pytest.mark.processes
def test_fabric_on_two_hosts(tmp_path):
    """An unmodified Fabric script forms one world of all hosts."""
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "lightning_sm", "local", "--group", "trainer=2", "--base-dir", str(tmp_path)),
            *("--env", f"PYTHONPATH={python_path(REPOSITORY)}", "--", str(SCRIPTS / "reduce_with_fabric.py")),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for rank in (0, 1):
        assert f"rank {rank} of 2: the sum of all ranks is 3" in ended.stdout
