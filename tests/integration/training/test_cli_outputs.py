"""Outputs of SageMakerCLI: logs, checkpoints, and the best model in the model directory."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jsonargparse.typing import Path_fr
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from pytorch_lightning.plugins.io import TorchCheckpointIO

from lightning_sm.training.callbacks.spot_checkpoint import SpotCheckpoint
from lightning_sm.training.cli import SageMakerCLI
from tests.fakes.small_app import SmallModel

QUIET = ("--trainer.enable_model_summary=false", "--trainer.accelerator=cpu")
MODEL_FILES = {"model.ckpt", "state_dict.pt", "config.yaml"}
BEST_AND_LAST = (
    "--trainer.callbacks={class_path: ModelCheckpoint,"
    " init_args: {monitor: val_score, mode: max, save_last: true, filename: '{epoch}'}}"
)


def fit(host, *arguments, epochs=1, **kwargs):
    """Train for a few epochs of two batches."""
    return host.start("fit", f"--trainer.max_epochs={epochs}", *QUIET, *arguments, **kwargs)


def files_in(folder):
    """Relative paths of all files in a folder."""
    return {str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file()}


def exported_epoch(host):
    """Epoch of the model in the model directory."""
    return torch.load(host.model_dir / "model.ckpt", weights_only=True)["epoch"]


class BestOnly(SmallModel):
    """Brings its own checkpoint callback."""

    def configure_callbacks(self):
        """Keep the best two."""
        return [ModelCheckpoint(monitor="val_score", mode="max", save_top_k=2, filename="own-{epoch}")]


class CheckpointCLI(SageMakerCLI):
    """Adds a checkpoint callback to the parser."""

    def add_arguments_to_parser(self, parser):
        """Make it configurable as --keep.dirpath and so on."""
        parser.add_lightning_class_args(ModelCheckpoint, "keep")


class HubModel(SmallModel):
    """Needs secrets, and has a parameter that is only named like one.

    Args:
        hub_token: Any text.
        credentials: A file with credentials.
        token: Sizes of a part of the model.
        options: Anything.
    """

    def __init__(self, hub_token: str, credentials: Path_fr, token: dict[str, int], options: dict[str, Any]) -> None:
        super().__init__()
        self.given = (hub_token, credentials, token, options)


class FolderIO(TorchCheckpointIO):
    """Writes a checkpoint as a folder, as sharded strategies do."""

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        """Write one part."""
        Path(path).mkdir(parents=True)
        super().save_checkpoint(checkpoint, Path(path) / "part.pt", storage_options)


class DeepSpeedIO(TorchCheckpointIO):
    """Writes a checkpoint as a folder with the names of DeepSpeed's files."""

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        """Write the file of rank 0, and ``latest``, which names its subfolder."""
        super().save_checkpoint(checkpoint, Path(path) / "checkpoint" / "mp_rank_00_model_states.pt", storage_options)
        (Path(path) / "latest").write_text("checkpoint")


class TestModel:
    """The best model is exported once, at the end of fit."""

    def test_a_model_can_be_used_with_and_without_lightning(self, host):
        """model.ckpt, state_dict.pt and config.yaml restore the model, its weights and its configuration."""
        cli = fit(host, "--model.num_classes=4")
        assert files_in(host.model_dir) == MODEL_FILES
        weights = cli.model.state_dict()
        plain = torch.load(host.model_dir / "state_dict.pt", weights_only=True)
        assert all(torch.equal(plain[name], weights[name]) for name in weights)
        restored = SmallModel.load_from_checkpoint(host.model_dir / "model.ckpt", num_classes=4).state_dict()
        assert all(torch.equal(restored[name], weights[name]) for name in weights)
        again = host.make(f"--config={host.model_dir / 'config.yaml'}", args=None, cli=_WithCkptPath)
        assert again.model.layer.out_features == 4

    def test_config_yaml_has_no_secrets(self, host, tmp_path):
        """Secrets reach the script, but no file of the job, whatever the type of their parameter."""
        secret = tmp_path / "S3CR3T.json"
        secret.write_text("{}")
        cli = fit(
            host,
            "--model.hub_token=S3CR3T",
            f"--model.credentials={secret}",
            "--model.token={dim: 3}",
            "--model.options={a: [{password: S3CR3T, port: 3}], tokenizer: bert}",
            "--trainer.logger=CSVLogger",
            f"--trainer.logger.save_dir={tmp_path / 'logs'}",
            model=HubModel,
        )
        assert cli.model.given[0] == "S3CR3T"
        assert str(cli.model.given[1]) == str(secret)
        assert cli.model.given[3]["a"] == [{"password": "S3CR3T", "port": 3}]
        config = yaml.safe_load((host.model_dir / "config.yaml").read_text())["model"]
        assert config == {
            "hub_token": None,
            "credentials": None,
            "token": {"dim": 3},
            "options": {"a": [{"password": None, "port": 3}], "tokenizer": "bert"},
        }
        saved = [path for path in tmp_path.rglob("config.yaml") if path.is_file()]
        assert len(saved) == 2  # beside the model, and by Lightning beside the logs
        for path in saved:
            assert "S3CR3T" not in path.read_text(), path

    @pytest.mark.matrix
    @pytest.mark.parametrize(
        ("arguments", "epoch"),
        [
            ([], 2),
            (["--trainer.enable_checkpointing=false"], 3),  # written after the last epoch's end
            (["--trainer.callbacks={class_path: ModelCheckpoint, init_args: {save_top_k: 0}}"], 3),
            ([BEST_AND_LAST], 1),
            (["--trainer.callbacks+=ModelCheckpoint", BEST_AND_LAST.replace("callbacks=", "callbacks+=")], 1),
        ],
    )
    @pytest.mark.parametrize("has_checkpoint_dir", [True, False])
    def test_the_best_model_is_exported(self, host, arguments, epoch, has_checkpoint_dir):
        """The best model of the first callback that monitors a metric is exported, else the newest or current model."""
        host.configure(checkpoint={"LocalPath": str(host.base_dir / "ck")} if has_checkpoint_dir else None)
        fit(host, "--model.scores=[0, 2, 1]", *arguments, epochs=3)
        assert exported_epoch(host) == epoch
        assert files_in(host.model_dir) == MODEL_FILES

    @pytest.mark.parametrize("way", ["model", "defaults", "parser"])
    def test_checkpoint_callbacks_from_elsewhere_count(self, host, way):
        """A checkpoint callback from the model, trainer_defaults or the parser is routed and exported alike."""
        checkpoints = host.base_dir / "ck"
        host.configure(checkpoint={"LocalPath": str(checkpoints)})
        own = ModelCheckpoint(monitor="val_score", mode="max", filename="own-{epoch}")
        settings = {
            "model": {"model": BestOnly},
            "defaults": {"trainer_defaults": {"callbacks": own}},
            "parser": {"cli": CheckpointCLI},
        }[way]
        arguments = ["--keep.monitor=val_score", "--keep.mode=max", "--keep.filename=own-{epoch}"]
        fit(host, "--model.scores=[0, 2, 1]", *(arguments if way == "parser" else []), epochs=3, **settings)
        assert exported_epoch(host) == 1
        assert "own-epoch=1.ckpt" in files_in(checkpoints)

    def test_a_resumed_job_exports_the_best_of_all_attempts(self, host):
        """The second attempt resumes from the last checkpoint, and exports the best one, saved by the first."""
        checkpoints = host.base_dir / "ck"
        host.configure(checkpoint={"LocalPath": str(checkpoints)})
        arguments = ("--model.scores=[0, 2, 1, 1]", BEST_AND_LAST, "--ckpt_path=last")
        assert fit(host, *arguments, epochs=2).trainer.current_epoch == 2
        first = torch.load(host.model_dir / "state_dict.pt", weights_only=True)
        for file in MODEL_FILES:
            (host.model_dir / file).unlink()
        cli = fit(host, *arguments, epochs=4)
        assert (cli.trainer.current_epoch, cli.trainer.global_step) == (4, 8)
        assert exported_epoch(host) == 1
        second = torch.load(host.model_dir / "state_dict.pt", weights_only=True)
        assert all(torch.equal(first[name], second[name]) for name in first)
        # Keep the replaced best checkpoint: the newest may not be uploaded when the host is taken away.
        assert {path.name for path in checkpoints.rglob("*.ckpt")} == {"epoch=0.ckpt", "epoch=1.ckpt", "last.ckpt"}

    def test_a_job_that_has_nothing_left_to_train_exports_too(self, host):
        """An attempt that resumes after the last epoch still exports a model."""
        host.configure(checkpoint={"LocalPath": str(host.base_dir / "ck")})
        for _ in range(2):
            fit(host, "--model.scores=[1, 0]", BEST_AND_LAST, "--ckpt_path=last", epochs=2)
            assert exported_epoch(host) == 0
            (host.model_dir / "model.ckpt").unlink()

    def test_the_folder_of_the_checkpoints_may_have_moved(self, host):
        """If the checkpoint folder has moved, the best checkpoint is found in the new folder by its name."""
        arguments = ("--model.scores=[0, 1, 2]", BEST_AND_LAST, "--ckpt_path=last")
        fit(host.configure(checkpoint={"LocalPath": str(host.base_dir / "old")}), *arguments, epochs=3)
        (host.model_dir / "model.ckpt").unlink()
        (host.base_dir / "old").rename(host.base_dir / "new")
        fit(host.configure(checkpoint={"LocalPath": str(host.base_dir / "new")}), *arguments, epochs=3)
        assert exported_epoch(host) == 2

    def test_a_best_checkpoint_that_is_gone_is_replaced(self, host, caplog):
        """If the best checkpoint is lost, the current model is exported, and a warning is logged."""

        class LastCheckpoint(ModelCheckpoint):
            def on_train_end(self, trainer, pl_module):
                Path(self.best_model_path).unlink()

        fit(host, trainer_defaults={"callbacks": LastCheckpoint()})
        assert "does not exist: exporting another one" in caplog.text
        assert files_in(host.model_dir) == MODEL_FILES

    def test_a_best_checkpoint_on_another_file_system(self, host):
        """A dirpath that is an address is kept, and the best checkpoint is fetched from it."""
        fit(
            host,
            "--model.scores=[2, 1]",
            BEST_AND_LAST.replace("{monitor", "{dirpath: 'memory://ck', monitor"),
            epochs=2,
        )
        assert exported_epoch(host) == 0
        assert files_in(host.model_dir) == MODEL_FILES
        assert not files_in(Path.cwd())

    @pytest.mark.parametrize("argument", [[], ["--trainer.enable_checkpointing=false"]])
    def test_a_sharded_checkpoint_is_exported_as_it_is(self, host, caplog, argument):
        """A checkpoint that is a folder becomes the folder model.ckpt, and the log shows how to consolidate it."""
        caplog.set_level("INFO", "lightning_sm")
        fit(host, *argument, trainer_defaults={"plugins": [FolderIO()]}, save_config_callback=None)
        assert files_in(host.model_dir) == {"model.ckpt/part.pt", "config.yaml"}
        assert "dcp_to_torch model.ckpt model.pt" in caplog.text

    def test_a_deepspeed_checkpoint_is_exported_with_its_subfolder(self, host, caplog):
        """All files of a DeepSpeed checkpoint are exported, and the log has the command that makes plain weights."""
        caplog.set_level("INFO", "lightning_sm")
        fit(host, trainer_defaults={"plugins": [DeepSpeedIO()]}, save_config_callback=None)
        files = {"model.ckpt/latest", "model.ckpt/checkpoint/mp_rank_00_model_states.pt", "config.yaml"}
        assert files_in(host.model_dir) == files
        assert "run `python model.ckpt/zero_to_fp32.py model.ckpt weights`" in caplog.text

    def test_a_fast_dev_run_passes(self, host):
        """A fast_dev_run also exports a model, which shows that the model directory is writable."""
        fit(host, "--trainer.fast_dev_run=true")
        assert files_in(host.model_dir) == MODEL_FILES
        assert not files_in(host.output_dir)

    @pytest.mark.parametrize("subcommand", ["validate", "test"])
    def test_only_fit_exports(self, host, subcommand):
        """Other subcommands export no model."""
        host.start(subcommand, *QUIET)
        assert not files_in(host.model_dir)


class _WithCkptPath(SageMakerCLI):
    """Accepts the arguments of fit without its subcommand."""

    def add_arguments_to_parser(self, parser):
        """Add the arguments of fit that config.yaml contains."""
        parser.add_argument("--ckpt_path", type=str | None)
        parser.add_argument("--weights_only", type=bool | None)


class TestFolders:
    """Relative folders are moved into the job's folders, and others are kept."""

    def test_everything_is_below_the_hosts_own_folder(self, host):
        """A plain fit writes logs, configuration and checkpoints to the host's output folder, and nothing elsewhere."""
        fit(host)
        found = files_in(host.output_dir)
        assert {str(Path(name).parent) for name in found} == {
            "lightning_logs/version_0",
            "lightning_logs/version_0/checkpoints",
        }
        assert "lightning_logs/version_0/config.yaml" in found
        assert not files_in(Path.cwd())

    @pytest.mark.matrix
    @pytest.mark.parametrize(
        ("folder", "expected"),
        [("logs", "{output}/logs"), (".", "{output}"), ("/abs/logs", "/abs/logs"), ("s3://bucket/x", "s3://bucket/x")],
    )
    @pytest.mark.parametrize("in_script", [True, False])
    def test_default_root_dir(self, host, folder, expected, in_script):
        """A relative root, even the script's, moves below the host's folder; other folders and addresses are kept."""
        arguments = [] if in_script else [f"--trainer.default_root_dir={folder}"]
        defaults = {"default_root_dir": folder} if in_script else {}
        trainer = host.make("--trainer.logger=false", *arguments, trainer_defaults=defaults).trainer
        assert trainer.default_root_dir == expected.format(output=host.output_dir)

    @pytest.mark.matrix
    @pytest.mark.parametrize("folder", ["logs", "/abs/logs"])
    @pytest.mark.parametrize("several", [True, False])
    def test_folders_of_loggers(self, host, folder, several):
        """A relative save_dir of one or several loggers is moved below the host's folder."""
        entry = f"{{class_path: CSVLogger, init_args: {{save_dir: {folder}}}}}"
        loggers = host.make(f"--trainer.logger={f'[{entry}]' if several else entry}").trainer.loggers
        assert [log.save_dir for log in loggers] == [str(host.output_dir / folder)]

    @pytest.mark.parametrize("has_checkpoint_dir", [True, False])
    def test_folders_of_checkpoint_callbacks(self, host, has_checkpoint_dir):
        """A relative dirpath is below the checkpoint folder if there is one, else the host's; None means the folder."""
        checkpoints = host.base_dir / "ck"
        host.configure(checkpoint={"LocalPath": str(checkpoints)} if has_checkpoint_dir else None)
        entries = [
            "{class_path: ModelCheckpoint, init_args: {dirpath: sub, monitor: a}}",
            "{class_path: ModelCheckpoint, init_args: {dirpath: /abs, monitor: b}}",
            "{class_path: ModelCheckpoint, init_args: {monitor: c}}",
            "{class_path: OnExceptionCheckpoint, init_args: {dirpath: crash}}",
        ]
        cli = host.make(f"--trainer.callbacks=[{', '.join(entries)}]", "--keep.dirpath=kept", cli=CheckpointCLI)
        base = checkpoints if has_checkpoint_dir else host.output_dir
        callbacks = [item for item in cli.trainer.checkpoint_callbacks if not isinstance(item, SpotCheckpoint)]
        found = {getattr(item, "monitor", "crash"): item.dirpath for item in callbacks}
        assert found == {
            "a": str(base / "sub"),
            "b": "/abs",
            "c": str(checkpoints) if has_checkpoint_dir else None,
            "crash": str(base / "crash"),
            None: str(base / "kept"),
        }

    def test_a_relative_folder_of_a_profiler_is_below_the_hosts(self, host):
        """A profiler writes where SageMaker uploads from, not into the working directory."""
        trainer = host.make("--trainer.profiler=SimpleProfiler", "--trainer.profiler.dirpath=times").trainer
        assert trainer.profiler.dirpath == str(host.output_dir / "times")

    def test_the_last_checkpoint_is_no_link(self, host):
        """save_last=link makes a copy, because SageMaker does not upload links."""
        host.configure(checkpoint={"LocalPath": str(host.base_dir / "ck")})
        fit(host, "--trainer.callbacks=[{class_path: ModelCheckpoint, init_args: {save_last: link}}]", epochs=1)
        last = host.base_dir / "ck" / "last.ckpt"
        assert last.is_file()
        assert not last.is_symlink()

    @pytest.mark.parametrize("argument", [[], ["--trainer.logger=true"]])
    def test_tensorboard_has_a_folder_of_its_own(self, host, argument):
        """With a TensorBoard output, events go where SageMaker uploads them during training."""
        folder = host.base_dir / "tb"
        host.configure(tensorboard={"LocalPath": str(folder)})
        fit(host, *argument)
        assert any("events.out" in name for name in files_in(folder))
        assert not files_in(host.output_dir)

    def test_tensorboard_loggers_of_the_users_own(self, host):
        """A relative TensorBoard folder is moved below the synchronized one; other loggers use the output folder."""
        host.configure(tensorboard={"LocalPath": str(host.base_dir / "tb")})
        entries = "{class_path: %s, init_args: {save_dir: logs}}"
        loggers = f"[{entries % 'TensorBoardLogger'}, {entries % 'CSVLogger'}]"
        tensorboard, csv = host.make(f"--trainer.logger={loggers}").trainer.loggers
        assert isinstance(tensorboard, TensorBoardLogger)
        assert isinstance(csv, CSVLogger)
        assert [tensorboard.save_dir, csv.save_dir] == [
            str(host.base_dir / "tb" / "logs"),
            str(host.output_dir / "logs"),
        ]

    def test_no_logger_stays_none(self, host):
        """If the user disables logging, no TensorBoard logger is added."""
        assert host.configure(tensorboard={}).make("--trainer.logger=false").trainer.loggers == []

    def test_an_existing_configuration_is_no_error(self, host):
        """A second attempt in the same folder overwrites config.yaml, unless the script forbids it."""
        logger = "--trainer.logger={class_path: CSVLogger, init_args: {save_dir: logs, version: same}}"
        for _ in range(2):
            fit(host, logger)
        with pytest.raises(RuntimeError, match=r"expected .*config\.yaml to NOT exist"):
            fit(host, logger, save_config_kwargs={"overwrite": False})
