"""A removed checkpoint stays on disk until the next removal."""

from __future__ import annotations

import os

from pytorch_lightning.plugins.io import TorchCheckpointIO

from lightning_sm.training.checkpoints.durable_io import DurableCheckpointIO
from tests.fakes.checkpoint_writers import NEW, OLD, AsFolder, names_in


def test_a_removed_checkpoint_stays_until_the_next_removal(folder):
    """The checkpoint that was removed last is still on disk."""
    durable, paths = DurableCheckpointIO(TorchCheckpointIO(), folder), [folder / f"{name}.ckpt" for name in "abc"]
    for path in paths:
        durable.save_checkpoint(OLD, path)
    for path, left in zip(paths, ([*"abc"], [*"bc"], [*"c"]), strict=True):
        durable.remove_checkpoint(str(path))
        assert names_in(folder) == [f"{name}.ckpt" for name in left]
    durable.remove_checkpoint(paths[-1])  # a second time
    assert names_in(folder) == ["c.ckpt"]


def test_what_is_saved_again_is_not_removed(folder):
    """A checkpoint saved again under a removed one's name is kept."""
    durable = DurableCheckpointIO(TorchCheckpointIO(), folder)
    for name in "abc":
        durable.save_checkpoint(OLD, folder / f"{name}.ckpt")
    durable.remove_checkpoint(folder / "a.ckpt")
    durable.save_checkpoint(NEW, folder / "a.ckpt")
    durable.remove_checkpoint(folder / "b.ckpt")
    durable.remove_checkpoint(folder / "c.ckpt")
    assert names_in(folder) == ["a.ckpt", "c.ckpt"]


def test_a_removal_before_the_file_is_written_deletes_nothing(folder):
    """Removing a file that AsyncCheckpointIO has yet to write deletes nothing: the last file on disk stays."""
    durable = DurableCheckpointIO(TorchCheckpointIO(), folder)
    durable.save_checkpoint(OLD, folder / "a.ckpt")
    durable.remove_checkpoint(folder / "a.ckpt")
    durable.remove_checkpoint(folder / "b.ckpt")
    assert names_in(folder) == ["a.ckpt"]


def test_folders_are_removed_like_files(folder):
    """A checkpoint that is a folder is removed like a file."""
    durable = DurableCheckpointIO(AsFolder(), folder)
    for name in "ab":
        durable.save_checkpoint(OLD, folder / f"{name}.ckpt")
        durable.remove_checkpoint(folder / f"{name}.ckpt")
    assert sorted(os.listdir(folder)) == ["b.ckpt"]
