"""How a rank of a pipeline reads a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning_fabric.plugins import TorchCheckpointIO

from lightning_sm import PipelineParallelStrategy
from lightning_sm.training.checkpoints.durable_io import DurableCheckpointIO


def _is_mapped(path):
    return str(path) in Path("/proc/self/maps").read_text()


@pytest.fixture
def saved(tmp_path):
    """A checkpoint."""
    path = tmp_path / "last.ckpt"
    TorchCheckpointIO().save_checkpoint({"state_dict": {"weight": torch.arange(1000.0)}}, path)
    return path


@pytest.mark.parametrize("is_durable", [True, False])
@pytest.mark.parametrize("options", [{}, {"weights_only": True}])
def test_ranks_of_a_host_share_the_memory_of_a_checkpoint(saved, is_durable, options):
    """The file is mapped, also through the wrapper that each job has, and changes of a tensor stay in the process."""
    strategy = PipelineParallelStrategy()
    if is_durable:
        strategy.checkpoint_io = DurableCheckpointIO(TorchCheckpointIO(), saved.parent)
    loaded = strategy.load_checkpoint(saved, **options)
    assert _is_mapped(saved)
    loaded["state_dict"]["weight"] += 1
    del loaded
    assert not _is_mapped(saved)
    assert torch.equal(torch.load(saved)["state_dict"]["weight"], torch.arange(1000.0))


@pytest.mark.parametrize("is_missing", [True, False])
def test_what_lightning_did_not_write_itself_is_read_by_its_own_reader(saved, is_missing):
    """A CheckpointIO of the user's may encrypt or compress; and a missing file is the error that it always was."""

    class Own(TorchCheckpointIO):
        def load_checkpoint(self, path, **options):
            return {"own": path, **options}

    strategy = PipelineParallelStrategy()
    if is_missing:
        with pytest.raises(FileNotFoundError):
            strategy.load_checkpoint(saved.parent / "other.ckpt")
        return
    strategy.checkpoint_io = Own()
    assert strategy.load_checkpoint(saved, weights_only=False) == {"own": saved, "weights_only": False}
    assert not _is_mapped(saved)
