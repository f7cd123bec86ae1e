"""SageMakerCLI in a job with a checkpoint folder: what a restarted job resumes from, and what it finds there."""

from pathlib import Path

import pytest
import yaml
from pytorch_lightning.callbacks import ModelCheckpoint

from tests.fakes.small_app import SmallModel

QUIET = ("--trainer.enable_model_summary=false", "--trainer.accelerator=cpu")
KEEP_LAST = "--trainer.callbacks={class_path: ModelCheckpoint, init_args: {save_last: true}}"


@pytest.fixture
def checkpoints(host):
    """The checkpoint folder of a job on the only host."""
    folder = host.base_dir / "ck"
    host.configure(checkpoint={"LocalPath": str(folder)})
    return folder


def fit(host, *arguments, epochs=1, **kwargs):
    """Train up to an epoch, and return what the Trainer resumed from."""
    cli = host.start("fit", f"--trainer.max_epochs={epochs}", *QUIET, *arguments, **kwargs)
    return cli, cli.trainer.ckpt_path


def interrupt(host, checkpoints, epochs):
    """Train on, and leave what an interruption would leave, beyond the last periodic checkpoint."""
    cli, _ = fit(host, "--trainer.enable_checkpointing=false", epochs=epochs)
    cli.trainer.save_checkpoint(checkpoints / "interrupted-step=4.ckpt")
    return str(checkpoints / "interrupted-step=4.ckpt")


class TestCkptPath:
    """What ckpt_path means in a job."""

    @pytest.mark.matrix
    @pytest.mark.parametrize("stated", [None, "null", "last"])
    @pytest.mark.parametrize("source", ["line", "file"])
    def test_the_newest_checkpoint(self, host, checkpoints, stated, source):
        """Without ckpt_path, or with null or last, it is the latest valid checkpoint, also of an interruption."""
        _, first = fit(host, KEEP_LAST)
        assert first is None
        interrupted = interrupt(host, checkpoints, epochs=2)
        (host.base_dir / "c.yaml").write_text(f"ckpt_path: {stated}")
        arguments = {"line": [f"--ckpt_path={stated}"], "file": [f"--config={host.base_dir / 'c.yaml'}"]}[source]
        cli, found = fit(host, KEEP_LAST, *(arguments if stated else []), epochs=3)
        assert (found, cli.ckpt_path) == (interrupted, interrupted)
        assert cli.trainer.global_step == 6

    def test_a_checkpoint_of_the_users(self, host, checkpoints):
        """A file that the user names is taken, though there is a newer one."""
        fit(host, KEEP_LAST)
        interrupt(host, checkpoints, epochs=2)
        older = str(checkpoints / "last.ckpt")
        cli, found = fit(host, f"--ckpt_path={older}", epochs=2)
        assert (found, cli.ckpt_path) == (older, older)

    def test_a_checkpoint_in_a_format_of_the_users(self, host, checkpoints, caplog):
        """Which one is furthest is read by the user's CheckpointIO; what it cannot read either is passed over."""
        own = "--trainer.plugins=tests.fakes.checkpoint_writers.AsFolder"
        fit(host, own)
        (path,) = checkpoints.iterdir()
        assert path.is_dir()
        (checkpoints / "broken.ckpt").write_text("half of something")
        cli, found = fit(host, own, epochs=2)
        assert found == str(path)
        assert cli.trainer.global_step == 4
        assert "broken.ckpt cannot be read" in caplog.text

    def test_last_beyond_the_folder(self, host, checkpoints):
        """If the checkpoint folder has none, last is what Lightning finds, such as in another folder."""
        keep = KEEP_LAST.replace("{save_last", f"{{dirpath: {host.base_dir / 'own'}, save_last")
        for expected in (None, str(host.base_dir / "own" / "last.ckpt")):
            _, found = fit(host, keep, "--ckpt_path=last", epochs=2)
            assert found == expected

    @pytest.mark.usefixtures("checkpoints")
    def test_what_the_job_found_is_not_saved(self, host):
        """The configuration beside the model names no file that another job does not have."""
        for epochs in (1, 2):
            fit(host, epochs=epochs)
            assert yaml.safe_load((host.model_dir / "config.yaml").read_text())["ckpt_path"] is None
        _, found = fit(host, f"--config={host.model_dir / 'config.yaml'}", epochs=3)
        assert found is not None

    def test_only_fit_resumes(self, host, checkpoints):
        """Other subcommands take the weights that they are told to."""
        fit(host)
        assert list(checkpoints.iterdir())
        cli = host.start("validate", *QUIET)
        assert (cli.ckpt_path, cli.trainer.ckpt_path) == (None, None)


class TestWithoutRun:
    """A script that calls trainer.fit itself."""

    def test_the_script_gets_the_checkpoint_to_resume_from(self, host, checkpoints, caplog):
        """The CLI has the latest valid checkpoint as an attribute, and one line says what to do with it."""
        fit(host)
        caplog.set_level("INFO", "lightning_sm")
        cli = host.make("--trainer.max_epochs=2", *QUIET)
        (path,) = checkpoints.iterdir()
        assert cli.ckpt_path == str(path)
        (line,) = (text for text in caplog.messages if "ckpt_path" in text)
        assert str(path) in line
        assert "pass ckpt_path=cli.ckpt_path to trainer.fit" in line
        cli.trainer.fit(cli.model, cli.datamodule, ckpt_path=cli.ckpt_path)
        assert cli.trainer.global_step == 4

    @pytest.mark.parametrize("has_checkpoint_dir", [True, False])
    def test_nothing_to_resume_from(self, host, caplog, has_checkpoint_dir):
        """In a first attempt, and in a job without a checkpoint folder, it is None, and nothing is said."""
        caplog.set_level("INFO", "lightning_sm")
        host.configure(checkpoint={"LocalPath": str(host.base_dir / "ck")} if has_checkpoint_dir else None)
        assert host.make().ckpt_path is None
        assert "ckpt_path" not in caplog.text


class OwnCheckpoint(SmallModel):
    """Brings a checkpoint callback with a relative folder."""

    def configure_callbacks(self):
        """Keep the last."""
        return [ModelCheckpoint(dirpath="ckpts", save_last=True)]


class TestFoldersOfInstances:
    """A ModelCheckpoint that the script makes, which has made its folder absolute."""

    @pytest.mark.matrix
    @pytest.mark.parametrize("way", ["defaults", "model"])
    @pytest.mark.parametrize("has_checkpoint_dir", [True, False])
    def test_a_relative_folder(self, host, caplog, way, has_checkpoint_dir):
        """It is moved below the checkpoint folder, from which the job resumes, else below the host's; once said."""
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

    @pytest.mark.matrix
    @pytest.mark.parametrize("here", ["code", "", "/"])
    @pytest.mark.parametrize("folder", ["{base}/ck/sub", "{base}/own", "/fsx/ck", "memory://ck"])
    def test_another_folder(self, host, checkpoints, monkeypatch, here, folder):
        """The job's folders, absolute ones elsewhere and addresses stay, also below the working directory."""
        monkeypatch.chdir(checkpoints.parent.parent / here)
        dirpath = folder.format(base=host.base_dir)
        callback = ModelCheckpoint(dirpath=dirpath)
        host.make(trainer_defaults={"callbacks": [callback]}, save_config_callback=None)
        assert callback.dirpath == dirpath

    @pytest.mark.matrix(first=1)
    @pytest.mark.parametrize("here", ["code", "checkpoints", ""])
    def test_a_working_directory_among_the_jobs_folders(self, host, checkpoints, monkeypatch, here):
        """The code's folder is no place for checkpoints; the checkpoint folder is, and in base_dir nobody can tell."""
        host.configure(checkpoint={"LocalPath": str(host.base_dir / "checkpoints")})
        (host.base_dir / here).mkdir(exist_ok=True)
        monkeypatch.chdir(host.base_dir / here)
        callback = ModelCheckpoint(dirpath="sub")
        host.make(trainer_defaults={"callbacks": [callback]})
        assert callback.dirpath == str(host.base_dir / ("checkpoints" if here else "") / "sub")
