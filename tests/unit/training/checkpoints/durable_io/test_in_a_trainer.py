"""A Trainer writes its checkpoints durably with any CheckpointIO."""

from __future__ import annotations

import errno
import os
import pickle

import pytest
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

from lightning_sm.errors import CheckpointError
from lightning_sm.training.checkpoints.durable_io import DurableCheckpointIO, make_durable
from tests.fakes.checkpoint_writers import AsFolder, Failing, Recorder, ToPath, beside, names_in
from tests.fakes.small_app import SmallData, SmallModel, make_trainer


def fit(folder, plugins=None, **saving):
    """Train four steps with a durable checkpoint after each, and return the Trainer."""
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, **saving)
    trainer = make_trainer(callbacks=[saver], max_epochs=2, plugins=plugins)
    make_durable(trainer, folder)
    trainer.fit(SmallModel(), SmallData())
    return trainer


@pytest.mark.parametrize("plugins", [None, [AsFolder()], [AsyncCheckpointIO()], [AsyncCheckpointIO(AsFolder())]])
def test_a_trainer_keeps_one_more_than_it_was_told(folder, plugins):
    """With save_top_k=1, the last two checkpoints remain, with AsyncCheckpointIO possibly more."""
    fit(folder, plugins)
    names = sorted(os.listdir(folder))
    assert names[-2:] == ["step=3.ckpt", "step=4.ckpt"]
    assert len(names) == 2 or isinstance(plugins[0], AsyncCheckpointIO)
    assert beside(folder) == []


def test_a_trainer_resumes_from_what_was_written(folder):
    """A Trainer resumes from a file that another one wrote, both durably."""
    fit(folder)
    trainer = make_trainer(max_epochs=3, enable_checkpointing=False)
    make_durable(trainer, folder)
    trainer.fit(SmallModel(), SmallData(), ckpt_path=str(folder / "step=4.ckpt"))
    assert trainer.global_step == 6


def test_an_error_in_the_thread_of_async_checkpoint_io_ends_the_training(folder):
    """An error in the background is explained, and raised at the next save or at the end."""
    with pytest.raises(CheckpointError, match=r"was not written to .*: OSError"):
        fit(folder, [AsyncCheckpointIO(Failing(OSError(errno.ENOSPC, "No space left on device")))])
    assert names_in(folder) == beside(folder) == []


class _Wrapper(AsyncCheckpointIO):
    """A user's wrapper around another CheckpointIO."""


@pytest.mark.parametrize(
    "plugin", [None, AsFolder(), AsyncCheckpointIO(), AsyncCheckpointIO(ToPath()), _Wrapper(AsyncCheckpointIO())]
)
def test_the_innermost_is_wrapped_once(folder, plugin):
    """Only the CheckpointIO that writes, inside all wrappers, becomes durable, and only once."""
    trainer = make_trainer(plugins=plugin and [plugin])
    for _ in range(2):
        make_durable(trainer, folder)
    chain = [trainer.strategy.checkpoint_io]
    while hasattr(chain[-1], "checkpoint_io"):
        chain.append(chain[-1].checkpoint_io)
    assert [isinstance(one, DurableCheckpointIO) for one in chain] == [*[False] * (len(chain) - 2), True, False]
    assert plugin is None or plugin in chain
    assert type(chain[-1]) in (TorchCheckpointIO, AsFolder, ToPath)


def test_leftovers_of_a_killed_run_are_removed(folder):
    """A run removes the unfinished files of a run that was killed, and nothing else."""
    kept = ["a.ckpt", ".hidden", "version_0", "a.ckpt.sagemaker-uploaded", "b.ckpt.sagemaker-uploading"]
    unfinished = ["version_0/b.ckpt.sagemaker-ignore", "c.ckpt.sagemaker-ignore/deep/x"]
    for name in (*unfinished, *kept):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).exists() or (folder / name).write_text("half")
    make_durable(make_trainer(), folder)
    assert names_in(folder) == sorted(kept)


@pytest.mark.parametrize("local_rank", [0, 1])
def test_the_first_rank_of_each_host_removes_leftovers(folder, monkeypatch, local_rank):
    """Local rank 0 of each host removes leftovers, because hosts share no folder."""
    folder.mkdir()
    (folder / "a.ckpt.sagemaker-ignore").write_text("half")
    trainer = make_trainer()
    monkeypatch.setattr(type(trainer), "local_rank", local_rank)
    monkeypatch.setattr(type(trainer), "is_global_zero", False)
    make_durable(trainer, folder)
    assert names_in(folder) == ["a.ckpt.sagemaker-ignore"] * local_rank


def test_it_can_be_pickled_and_passes_the_end_on(folder):
    """It can be pickled with the Trainer, as strategies that spawn do, and passes teardown on to the CheckpointIO."""
    durable = pickle.loads(pickle.dumps(DurableCheckpointIO(Recorder(), folder)))  # noqa: S301 - its own bytes
    durable.teardown()
    assert durable.checkpoint_io.is_torn_down
