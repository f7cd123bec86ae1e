"""Sharded checkpoints, a part on each host: removed on every host, and invalid while they are overwritten."""

import pytest
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins.environments import LightningEnvironment
from pytorch_lightning.strategies import ModelParallelStrategy

from lightning_sm.errors import StrategyError
from lightning_sm.training.checkpoints.durable_io import make_durable
from lightning_sm.training.checkpoints.sharded import install_shard_hooks


@pytest.fixture
def strategy_of(tmp_path, monkeypatch):
    """A function that creates a rank's strategy, with the checkpoint folder ``tmp_path/checkpoints``."""

    def make(global_rank, local_rank):
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        settings = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = Trainer(
            accelerator="cpu", strategy=ModelParallelStrategy(), plugins=[LightningEnvironment()], devices=1, **settings
        )
        trainer.strategy.cluster_environment.set_global_rank(global_rank)
        make_durable(trainer, tmp_path / "checkpoints")
        install_shard_hooks(trainer)
        return trainer.strategy

    return make


def test_an_object_store_is_refused():
    """An object store is refused, because Lightning would silently write to a local folder named like the address."""
    address = "memory://bucket/checkpoints"
    trainer = Trainer(
        accelerator="cpu", strategy=ModelParallelStrategy(), plugins=[LightningEnvironment()], devices=1, logger=False
    )
    trainer.callbacks.append(ModelCheckpoint(address))
    why = (
        rf"ModelParallelStrategy cannot write checkpoints to {address}, .* a folder memory:/bucket/checkpoints on each"
    )
    with pytest.raises(StrategyError, match=why):
        install_shard_hooks(trainer)


def sharded(folder, name):
    """A checkpoint with one shard."""
    path = folder / "checkpoints" / name
    path.mkdir(parents=True)
    (path / "__8_0.distcp").write_bytes(b"a shard of rank 8")
    return path


@pytest.mark.parametrize(("global_rank", "local_rank", "removes"), [(0, 0, True), (8, 0, True), (9, 1, False)], ids=str)
def test_each_host_removes_its_shards(tmp_path, strategy_of, global_rank, local_rank, removes):
    """One rank per host removes shards, and keeps the last removed checkpoint until the next removal, as for files."""
    strategy = strategy_of(global_rank, local_rank)
    first, second = sharded(tmp_path, "1.ckpt"), sharded(tmp_path, "2.ckpt")
    strategy.remove_checkpoint(str(first))
    strategy.remove_checkpoint(str(second))
    assert first.exists() is not removes
    assert second.exists()


def test_a_single_file_is_removed_by_rank_0_only(tmp_path, strategy_of):
    """Only rank 0 removes a single file: other hosts have a downloaded copy, or share the same file."""
    strategy = strategy_of(8, 0)
    for name in ("1.ckpt", "2.ckpt"):
        (tmp_path / "checkpoints").mkdir(exist_ok=True)
        (tmp_path / "checkpoints" / name).write_bytes(b"whole")
        strategy.remove_checkpoint(str(tmp_path / "checkpoints" / name))
    assert (tmp_path / "checkpoints" / "1.ckpt").exists()


@pytest.mark.parametrize("global_rank", [0, 8])
@pytest.mark.parametrize("name", [".metadata", "meta.pt", "latest"])
def test_shards_of_two_steps_are_never_valid(tmp_path, strategy_of, monkeypatch, global_rank, name):
    """Each host removes the old checkpoint's files before it writes the first shard of the new one."""
    last = sharded(tmp_path, "last.ckpt")
    (last / name).touch()
    seen = []

    def save(_, checkpoint, path, storage_options):
        seen.append((checkpoint, last.exists()))

    monkeypatch.setattr(ModelParallelStrategy, "save_checkpoint", save)
    strategy_of(global_rank, 0).save_checkpoint({"global_step": 2}, str(last))
    assert seen == [({"global_step": 2}, False)]


def test_an_exported_model_keeps_its_shards(tmp_path, strategy_of, monkeypatch):
    """A hard link to a shard from the model directory keeps its content when the checkpoint is overwritten."""
    last = sharded(tmp_path, "last.ckpt")
    (tmp_path / "model").hardlink_to(last / "__8_0.distcp")

    def save(_, checkpoint, path, storage_options):
        last.mkdir()
        (last / "__8_0.distcp").write_bytes(b"another step")

    monkeypatch.setattr(ModelParallelStrategy, "save_checkpoint", save)
    strategy_of(0, 0).save_checkpoint({"global_step": 2}, str(last))
    assert (tmp_path / "model").read_bytes() == b"a shard of rank 8"
