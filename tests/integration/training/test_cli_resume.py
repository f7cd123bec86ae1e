"""SageMakerCLI in a job with a checkpoint folder: the checkpoint from which a restarted job resumes."""

from pathlib import Path

import pytest
import yaml
from fsspec.core import url_to_fs
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import ModelCheckpoint

from lightning_sm import SageMakerCLI, SpotCheckpoint
from tests.fakes.small_app import SmallData, SmallModel, make_trainer

QUIET = ("--trainer.enable_model_summary=false", "--trainer.accelerator=cpu")
KEEP_LAST = "--trainer.callbacks={class_path: ModelCheckpoint, init_args: {save_last: true}}"


@pytest.fixture
def checkpoints(host):
    """The checkpoint folder of a job with one host."""
    folder = host.base_dir / "ck"
    host.configure(checkpoint={"LocalPath": str(folder)})
    return folder


def fit(host, *arguments, epochs=1, **kwargs):
    """Train up to an epoch, and return the CLI and the checkpoint from which the Trainer resumed."""
    cli = host.start("fit", f"--trainer.max_epochs={epochs}", *QUIET, *arguments, **kwargs)
    return cli, cli.trainer.ckpt_path


def interrupt(host, checkpoints, epochs):
    """Train on, and save a checkpoint as an interruption would, later than the last periodic one."""
    cli, _ = fit(host, "--trainer.enable_checkpointing=false", epochs=epochs)
    cli.trainer.save_checkpoint(checkpoints / "interrupted-step=4.ckpt")
    return str(checkpoints / "interrupted-step=4.ckpt")


class TestCkptPath:
    """The meaning of ckpt_path in a job."""

    @pytest.mark.matrix
    @pytest.mark.parametrize("stated", [None, "null", "last"])
    @pytest.mark.parametrize("source", ["line", "file"])
    def test_the_newest_checkpoint(self, host, checkpoints, stated, source):
        """Without ckpt_path, or with null or last, fit resumes from the latest valid checkpoint of any kind."""
        _, first = fit(host, KEEP_LAST)
        assert first is None
        interrupted = interrupt(host, checkpoints, epochs=2)
        (host.base_dir / "c.yaml").write_text(f"ckpt_path: {stated}")
        arguments = {"line": [f"--ckpt_path={stated}"], "file": [f"--config={host.base_dir / 'c.yaml'}"]}[source]
        cli, found = fit(host, KEEP_LAST, *(arguments if stated else []), epochs=3)
        assert found == interrupted
        assert cli.trainer.global_step == 6

    def test_a_restart_resumes_its_own_progress_and_not_the_users_file_again(self, host, checkpoints, caplog):
        """The first attempt starts from the file that the user names; a restart resumes from the job's checkpoint."""
        caplog.set_level("INFO", "lightning_sm")
        cli, _ = fit(host, "--trainer.enable_checkpointing=false")
        stated = host.base_dir / "pretrained.ckpt"
        cli.trainer.save_checkpoint(stated)
        arguments = (f"--ckpt_path={stated}", KEEP_LAST)
        _, found = fit(host, *arguments, epochs=2)
        assert found == str(stated)
        assert "Resuming from" not in caplog.text
        cli, found = fit(host, *arguments, epochs=3)
        assert (Path(found).parent, cli.trainer.global_step) == (checkpoints, 6)
        assert f"It takes precedence over ckpt_path={stated}." in caplog.text

    def test_a_file_that_the_user_names_wins_over_an_earlier_job(self, host, checkpoints, monkeypatch):
        """Another job's checkpoints at the same S3 address are used only if the user names no file."""
        for name, expected in (("job-1", None), ("job-2", checkpoints / "last.ckpt")):
            monkeypatch.setenv("TRAINING_JOB_NAME", name)
            _, found = fit(host, KEEP_LAST, *([] if expected is None else [f"--ckpt_path={expected}"]), epochs=2)
            assert found == (expected and str(expected))

    def test_last_beyond_the_folder(self, host, checkpoints):
        """If the checkpoint folder is empty, last means what Lightning finds, for example in another folder."""
        keep = KEEP_LAST.replace("{save_last", f"{{dirpath: {host.base_dir / 'own'}, save_last")
        for expected in (None, str(host.base_dir / "own" / "last.ckpt")):
            _, found = fit(host, keep, "--ckpt_path=last", epochs=2)
            assert found == expected

    @pytest.mark.usefixtures("checkpoints")
    def test_what_the_job_found_is_not_saved(self, host):
        """The configuration beside the model does not name the checkpoint, which another job does not have."""
        for epochs in (1, 2):
            fit(host, epochs=epochs)
            assert yaml.safe_load((host.model_dir / "config.yaml").read_text())["ckpt_path"] is None
        _, found = fit(host, f"--config={host.model_dir / 'config.yaml'}", epochs=3)
        assert found is not None

    def test_only_fit_resumes(self, host, checkpoints):
        """Other subcommands do not resume, but use the weights that the user names."""
        fit(host)
        assert list(checkpoints.iterdir())
        assert host.start("validate", *QUIET).trainer.ckpt_path is None

    def test_hyperparameters_of_any_type_are_resumed(self, host, checkpoints):
        """A valid checkpoint is loaded, whatever objects the user has put into it."""
        fit(host, model=PathModel)
        cli, found = fit(host, model=PathModel, epochs=2)
        assert (Path(found).parent, cli.trainer.global_step) == (checkpoints, 4)

    def test_a_dry_run_starts_from_the_beginning(self, host, checkpoints):
        """fast_dev_run does not resume, because then there might be no step left to try."""
        fit(host)
        _, found = fit(host, "--trainer.fast_dev_run=true")
        assert found is None


class PathModel(SmallModel):
    """Saves an object that torch.load refuses with weights_only."""

    def on_save_checkpoint(self, checkpoint):
        """Add the object."""
        checkpoint["folder"] = Path("anywhere")


class TuneTrainer(Trainer):
    """Has an additional method that trains."""

    def tune(self, model, datamodule=None):
        """Train.

        Args:
            model: The model.
            datamodule: Its data.
        """
        self.fit(model, datamodule=datamodule)


class TuneCLI(SageMakerCLI):
    """Has an additional subcommand that trains."""

    @staticmethod
    def subcommands():
        """Add ``tune`` to Lightning's subcommands."""
        return {**SageMakerCLI.subcommands(), "tune": {"model", "datamodule"}}


class TemplateCLI(SageMakerCLI):
    """Overrides the arguments of fit, as a public template does."""

    def _prepare_subcommand_kwargs(self, subcommand):
        return {"model": self.model, "datamodule": self.datamodule}


class TestWhateverStartsFit:
    """A restarted job resumes, however its script starts fit."""

    @staticmethod
    def by_script(host):
        """Build the parts with the CLI, and call fit."""
        cli = host.make("--trainer.max_epochs=2", *QUIET)
        cli.trainer.fit(cli.model, cli.datamodule)
        return cli.trainer

    @staticmethod
    def by_subcommand(host):
        """Run the script's additional subcommand."""
        return host.start("tune", "--trainer.max_epochs=2", *QUIET, cli=TuneCLI, trainer_class=TuneTrainer).trainer

    @staticmethod
    def by_template(host):
        """Run fit with overridden arguments."""
        return fit(host, epochs=2, cli=TemplateCLI)[0].trainer

    @staticmethod
    def by_callback(host):
        """Use SpotCheckpoint with Lightning's Trainer."""
        folder = host.base_dir / "ck"
        host.new_process()
        trainer = make_trainer(max_epochs=2, callbacks=[SpotCheckpoint(folder)], default_root_dir=host.base_dir)
        trainer.fit(SmallModel(), SmallData())
        return trainer

    @pytest.mark.usefixtures("restored_signals")
    @pytest.mark.parametrize("way", ["by_script", "by_subcommand", "by_template", "by_callback"])
    def test_it_resumes(self, host, checkpoints, caplog, way):
        """The Trainer continues with the second epoch, and the log names the checkpoint."""
        fit(host)
        (path,) = checkpoints.glob("*.ckpt")
        caplog.set_level("INFO", "lightning_sm")
        trainer = getattr(self, way)(host)
        assert (trainer.ckpt_path, trainer.global_step) == (str(path), 4)
        assert f"Resuming from {path}" in caplog.text

    def test_each_fit_of_a_script_resumes_from_its_own_checkpoints(self, host, checkpoints):
        """A second training in one script does not resume from the checkpoint of the first."""

        def run(epochs):
            steps = []
            cli = host.make(f"--trainer.max_epochs={epochs}", *QUIET)
            cli.trainer.fit(cli.model, cli.datamodule)
            steps.append(cli.trainer.ckpt_path)
            second = make_trainer(
                max_epochs=epochs, callbacks=[SpotCheckpoint(checkpoints), ModelCheckpoint(checkpoints / "second")]
            )
            second.fit(SmallModel(), SmallData())
            return [*steps, second.ckpt_path, second.global_step]

        assert run(1) == [None, None, 2]
        first, second, steps = run(2)
        assert (Path(first).parent, Path(second).parent, steps) == (checkpoints, checkpoints / "second", 4)

    @pytest.mark.parametrize("has_checkpoint_dir", [True, False])
    def test_nothing_to_resume_from(self, host, caplog, has_checkpoint_dir):
        """A first attempt, or a job without a checkpoint folder, starts from the beginning without logging a resume."""
        caplog.set_level("INFO", "lightning_sm")
        host.configure(checkpoint={"LocalPath": str(host.base_dir / "ck")} if has_checkpoint_dir else None)
        _, found = fit(host)
        assert found is None
        assert "Resuming" not in caplog.text


class OwnCheckpoint(SmallModel):
    """Brings a checkpoint callback with a relative folder."""

    def configure_callbacks(self):
        """Keep the last."""
        return [ModelCheckpoint(dirpath="ckpts", save_last=True)]


class TestFoldersOfInstances:
    """ModelCheckpoints that the script creates, which have made their folders absolute."""

    @pytest.mark.matrix
    @pytest.mark.parametrize("way", ["defaults", "model"])
    @pytest.mark.parametrize("has_checkpoint_dir", [True, False])
    def test_a_relative_folder(self, host, caplog, way, has_checkpoint_dir):
        """A relative folder is moved below the checkpoint folder, if any, else the host's, and is logged once."""
        caplog.set_level("INFO", "lightning_sm")
        host.configure(checkpoint={"LocalPath": str(host.base_dir / "ck")} if has_checkpoint_dir else None)
        callback = ModelCheckpoint(dirpath="ckpts", save_last=True)
        settings = {"trainer_defaults": {"callbacks": [callback]}} if way == "defaults" else {"model": OwnCheckpoint}
        fit(host, **settings)
        last = (host.base_dir / "ck" if has_checkpoint_dir else host.output_dir) / "ckpts" / "last.ckpt"
        assert last.is_file()
        assert not list(Path.cwd().iterdir())
        assert sum("ModelCheckpoint: dirpath" in text for text in caplog.messages) == 1
        _, found = fit(host, epochs=2, model=settings.get("model", SmallModel))
        assert (found is not None and Path(found).parent == last.parent) == has_checkpoint_dir

    @pytest.mark.parametrize("way", ["script", "configuration"])
    def test_an_absolute_folder_below_the_working_directory(self, host, checkpoints, way):
        """An absolute folder below the working directory is moved, because it may have been relative."""
        folder = Path.cwd() / "ckpts"
        callback = f"--trainer.callbacks={{class_path: ModelCheckpoint, init_args: {{dirpath: {folder}}}}}"
        if way == "script":
            cli = host.make(trainer_defaults={"callbacks": [ModelCheckpoint(dirpath=folder)]})
        else:
            cli = host.make(callback)
        assert cli.trainer.checkpoint_callback.dirpath == str(checkpoints / "ckpts")

    @pytest.mark.matrix
    @pytest.mark.parametrize("here", ["code", "", "/"])
    @pytest.mark.parametrize("folder", ["{base}/ck/sub", "{base}/own", "/fsx/ck", "memory://ck"])
    def test_another_folder(self, host, checkpoints, monkeypatch, here, folder):
        """The job's folders, absolute ones elsewhere and addresses are kept, even below the working directory."""
        monkeypatch.chdir(checkpoints.parent.parent / here)
        dirpath = folder.format(base=host.base_dir)
        callback = ModelCheckpoint(dirpath=dirpath)
        host.make(trainer_defaults={"callbacks": [callback]}, save_config_callback=None)
        assert callback.dirpath == dirpath

    @pytest.mark.matrix(first=1)
    @pytest.mark.parametrize("here", ["code", "checkpoints", ""])
    def test_a_working_directory_among_the_jobs_folders(self, host, checkpoints, monkeypatch, here):
        """A dirpath below the code's folder is moved; one below the checkpoint folder or base_dir is kept."""
        host.configure(checkpoint={"LocalPath": str(host.base_dir / "checkpoints")})
        (host.base_dir / here).mkdir(exist_ok=True)
        monkeypatch.chdir(host.base_dir / here)
        callback = ModelCheckpoint(dirpath="sub")
        host.make(trainer_defaults={"callbacks": [callback]})
        assert callback.dirpath == str(host.base_dir / ("checkpoints" if here else "") / "sub")


def test_a_job_that_writes_to_an_object_store_is_told_that_nothing_resumes_from_there(host, caplog):
    """A dirpath in an object store logs a warning, because a job resumes only from its checkpoint folder."""
    store = f"memory://{host.base_dir.parent.name}"
    fit(host, f"--trainer.callbacks={{class_path: ModelCheckpoint, init_args: {{dirpath: '{store}'}}}}")
    assert caplog.text.count(f"The job does not resume from {store}, the dirpath of a callback.") == 1
    filesystem, root = url_to_fs(store)
    filesystem.rm(root, recursive=True)
