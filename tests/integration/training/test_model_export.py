"""Model export to the model directory: its content, its cost, and the export of a stopped job."""

import errno
import os
import re
import shutil
import signal
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pytorch_lightning import Callback
from pytorch_lightning.plugins.io import TorchCheckpointIO

from lightning_sm.errors import CheckpointError, JobConfigError
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.variables import MODEL
from lightning_sm.training.callbacks import outputs
from lightning_sm.training.callbacks.outputs import JobOutputs
from lightning_sm.training.callbacks.spot_checkpoint import TrainingInterrupted

MODEL_FILES = {"model.ckpt", "state_dict.pt", "config.yaml"}
BEST = (
    "--trainer.callbacks={class_path: ModelCheckpoint, init_args: {monitor: val_score, mode: max, filename: '{epoch}'}}"
)


def fit(host, *arguments, epochs=1, **kwargs):
    """Train for a few epochs of two batches."""
    quiet = ("--trainer.enable_model_summary=false", "--trainer.accelerator=cpu")
    return host.start("fit", f"--trainer.max_epochs={epochs}", *quiet, *arguments, **kwargs)


def files_in(folder):
    """Relative paths of all files in a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


class FolderIO(TorchCheckpointIO):
    """Writes a checkpoint as a folder, as sharded strategies do."""

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        """Write one part."""
        Path(path).mkdir(parents=True)
        super().save_checkpoint(checkpoint, Path(path) / "part.pt", storage_options)


@pytest.fixture
def checkpoints(host):
    """The job's checkpoint folder."""
    host.configure(checkpoint={"LocalPath": str(host.base_dir / "ck")})
    return host.base_dir / "ck"


def peak_kb():
    """Return the peak memory of this process since the last ``reset_peak``."""
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def reset_peak():
    """Reset the kernel's record of the peak memory."""
    Path("/proc/self/clear_refs").write_text("5")  # man 5 proc


def test_the_best_checkpoint_is_that_of_the_only_model_checkpoint(host, recwarn):
    """``ckpt_path="best"`` warns of several ModelCheckpoints only if the script has several."""
    cli = fit(host, BEST)
    cli.trainer.test(cli.model, cli.datamodule, ckpt_path="best", verbose=False)
    assert not [str(one.message) for one in recwarn if "multiple `ModelCheckpoint`" in str(one.message)]


class TestSize:
    """The export uses no more time, memory and disk than necessary."""

    @pytest.mark.parametrize(
        ("model", "expected"), [("full", MODEL_FILES), ("weights", {"state_dict.pt", "config.yaml"}), ("none", set())]
    )
    @pytest.mark.parametrize("argument", [[], ["--trainer.enable_checkpointing=false"]])
    def test_the_job_says_what_it_leaves(self, host, monkeypatch, model, expected, argument):
        """The job chooses to export everything, all but the checkpoint, or nothing; no unfinished file remains."""
        monkeypatch.setenv(MODEL.name, model)
        weights = fit(host, *argument).model.state_dict()
        assert files_in(host.model_dir) == expected
        if expected:
            plain = torch.load(host.model_dir / "state_dict.pt", weights_only=True)
            assert all(torch.equal(plain[name], weights[name]) for name in weights)

    def test_averaged_weights_are_exported(self, host):
        """Without a metric, the model has the averages that StochasticWeightAveraging sets after the last epoch."""
        averaging = "{class_path: StochasticWeightAveraging, init_args: {swa_lrs: 0.5, swa_epoch_start: 1}}"
        weights = fit(host, f"--trainer.callbacks={averaging}", epochs=4).model.state_dict()
        exported = torch.load(host.model_dir / "state_dict.pt", weights_only=True)
        assert all(torch.equal(exported[name], weights[name]) for name in weights)

    def test_weights_of_a_remote_checkpoint(self, host, monkeypatch):
        """A remote checkpoint that was fetched for its weights is removed afterwards."""
        monkeypatch.setenv(MODEL.name, "weights")
        fit(host, BEST.replace("{monitor", "{dirpath: 'memory://weights', monitor"))
        assert files_in(host.model_dir) == {"state_dict.pt", "config.yaml"}

    def test_shards_that_cannot_become_weights_are_exported(self, host, monkeypatch):
        """If shards cannot be converted to weights, they are exported as they are, rather than nothing."""
        monkeypatch.setenv(MODEL.name, "weights")
        fit(host, trainer_defaults={"plugins": [FolderIO()]}, save_config_callback=None)
        assert files_in(host.model_dir) == {"model.ckpt/part.pt", "config.yaml"}

    def test_another_word_is_an_error_at_the_start(self, host, monkeypatch):
        """An invalid value fails before training, with an error that names the variable."""
        monkeypatch.setenv(MODEL.name, "best")
        with pytest.raises(JobConfigError, match=r"LIGHTNING_SM_MODEL='best': expected full, weights or none"):
            host.make()

    def test_the_checkpoint_is_linked(self, host, checkpoints):
        """A file in the checkpoint folder is linked instead of copied, even if the same one is exported again."""
        for _ in range(2):
            fit(host, "--model.scores=[1, 0]", BEST, epochs=2)
            assert (host.model_dir / "model.ckpt").samefile(checkpoints / "epoch=0.ckpt")
            assert files_in(host.model_dir) == MODEL_FILES

    def test_shards_are_linked(self, host, checkpoints):
        """Each file of a sharded checkpoint is linked."""
        fit(host, trainer_defaults={"plugins": [FolderIO()]}, save_config_callback=None)
        (best,) = checkpoints.glob("epoch*.ckpt")
        assert (host.model_dir / "model.ckpt" / "part.pt").samefile(best / "part.pt")

    @pytest.mark.parametrize("is_impossible", [True, False])
    def test_where_no_link_is_possible_it_is_copied(self, host, monkeypatch, is_impossible):
        """A checkpoint is copied between file systems, and outside the checkpoint folder, where it may be rewritten."""
        if is_impossible:
            host.configure(checkpoint={"LocalPath": str(host.base_dir / "ck")})
            monkeypatch.setattr(os, "link", _refuse_links)
        fit(host)
        assert files_in(host.model_dir) == MODEL_FILES
        assert (host.model_dir / "model.ckpt").stat().st_nlink == 1

    def test_states_of_optimizers_are_not_read(self, host, checkpoints):
        """Exporting a checkpoint of 240 MB, almost all of it optimizer states, uses less than 60 MB of memory."""
        checkpoints.mkdir()
        (host.model_dir).mkdir(parents=True, exist_ok=True)
        best = checkpoints / "best.ckpt"
        torch.save({"state_dict": {"weight": torch.ones(10)}, "optimizer_states": torch.zeros(60_000_000)}, best)
        exporter = JobOutputs(SageMakerJob.from_environment())
        reset_peak()
        before = peak_kb()
        exporter._export_file(str(best))
        assert peak_kb() - before < 60_000
        assert files_in(host.model_dir) == {"model.ckpt", "state_dict.pt"}


@pytest.mark.parametrize("model", ["full", "weights"])
def test_a_full_model_folder_is_explained(host, monkeypatch, model):
    """The error names the folder, and says how to keep the model of a completed training."""
    monkeypatch.setenv("LIGHTNING_SM_MODEL", model)
    host.model_dir.mkdir(parents=True)
    (host.model_dir / ".state_dict.pt.incoming").symlink_to("/dev/full")
    with pytest.raises(CheckpointError) as caught:
        fit(host)
    text = str(caught.value)
    assert text.startswith(f"The model was not written to {host.model_dir}: ")
    assert "give the job a larger volume (volume_gb in job.yaml" in text
    assert ("If the disk is full, try LIGHTNING_SM_MODEL=weights." in text) == (model == "full")


def test_a_first_job_has_no_warning_of_its_own_folder(host):
    """Lightning does not warn that the checkpoint folder is not empty, since the job keeps its record there."""
    host.configure(checkpoint={"LocalPath": str(host.base_dir / "ck")})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(host)
        assert (host.base_dir / "ck" / "lightning-sm-record").is_dir()
        fit(host, epochs=2)
    assert [one for one in caught if "is not empty" in str(one.message)] == []


def _refuse_links(*_, **__):
    raise OSError(errno.EXDEV, "Invalid cross-device link")


class _Stop(Callback):
    """Stops the job at the start of an epoch's first step."""

    def __init__(self, epoch):
        self.epoch = epoch

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        """Send SIGUSR2, the signal that comes before SIGTERM."""
        if (trainer.current_epoch, batch_idx) == (self.epoch, 0):
            os.kill(os.getpid(), signal.SIGUSR2)


@pytest.mark.usefixtures("restored_signals")
class TestStop:
    """A stopped job exports its best model so far, once the checkpoint is saved."""

    @staticmethod
    def stop(host, *arguments, epoch=2, **defaults):
        """Train until the job is stopped."""
        plugins = defaults.pop("plugins", [])
        settings = {"callbacks": _Stop(epoch), "plugins": plugins}
        with pytest.raises(TrainingInterrupted) as caught:
            fit(host, "--model.scores=[0, 2, 1]", BEST, *arguments, epochs=5, trainer_defaults=settings)
        assert caught.value.code == 143

    @pytest.mark.parametrize(
        ("model", "expected"), [("full", MODEL_FILES), ("weights", {"state_dict.pt", "config.yaml"}), ("none", set())]
    )
    def test_the_best_model_so_far_is_exported(self, host, checkpoints, monkeypatch, model, expected):
        """The second epoch's model is exported, though the third has begun, as far as LIGHTNING_SM_MODEL allows."""
        monkeypatch.setenv(MODEL.name, model)
        self.stop(host)
        assert len(list(checkpoints.glob("interrupted-*.ckpt"))) == 1
        assert files_in(host.model_dir) == expected
        if model == "full":
            assert torch.load(host.model_dir / "model.ckpt", weights_only=True)["epoch"] == 1
            assert (host.model_dir / "model.ckpt").samefile(checkpoints / "epoch=1.ckpt")

    def test_without_a_best_model_the_interrupted_one_is_exported(self, host, checkpoints):
        """In the first epoch, the checkpoint of the interruption is exported, because there is no other."""
        self.stop(host, epoch=0)
        (saved,) = checkpoints.glob("interrupted-*.ckpt")
        assert files_in(host.model_dir) == MODEL_FILES
        assert (host.model_dir / "model.ckpt").samefile(saved)

    @pytest.mark.usefixtures("checkpoints")
    @pytest.mark.parametrize("plugins", [[], [FolderIO()]])
    def test_what_takes_time_is_left_out(self, host, monkeypatch, plugins):
        """A large checkpoint is not exported, because it is being uploaded from the checkpoint folder."""
        monkeypatch.setattr(outputs, "_STOP_BYTES", 0)
        self.stop(host, plugins=plugins)
        assert files_in(host.model_dir) == set()

    @pytest.mark.parametrize("model", ["full", "weights"])
    def test_shards_are_exported_by_the_hosts_that_wrote_them(self, host, checkpoints, monkeypatch, caplog, model):
        """Rank 0 exports its shards; so do other hosts, unless they have the index and thus downloaded everything.

        If only the weights are requested, a log line says how to make them.
        """
        monkeypatch.setenv(MODEL.name, model)
        self.stop(host, plugins=[FolderIO()])
        assert files_in(host.model_dir) == {"model.ckpt/part.pt", "config.yaml"}
        assert "dcp_to_torch model.ckpt" in caplog.text
        exporter, best = JobOutputs(SageMakerJob.from_environment()), checkpoints / "epoch=1.ckpt"
        other = SimpleNamespace(is_global_zero=False, local_rank=0)
        for has_index in (False, True):
            shutil.rmtree(host.model_dir / "model.ckpt")
            exporter._export(other, str(best))
            assert (host.model_dir / "model.ckpt").exists() is not has_index
            (host.model_dir / "model.ckpt").mkdir(exist_ok=True)
            (best / ".metadata").touch()

    @pytest.mark.usefixtures("checkpoints")
    def test_an_export_that_fails_does_not_turn_the_stop_into_a_failure(self, host, monkeypatch, caplog):
        """If the export fails, the exit code is still that of an interruption, and the log has the reason."""

        def refuse(*_, **__):
            raise RuntimeError("broken")

        monkeypatch.setattr(torch, "load", refuse)
        self.stop(host)
        assert "The model trained so far was not exported (RuntimeError: broken)." in caplog.text
