# One of two ranks, which have separate folders with the same relative paths, like hosts without a shared folder. The
# ranks save a sharded model and export the best checkpoint, and the current weights. Rank 0 is slow, and rank 1 must
# wait for it, but not in a collective call, which has a timeout.
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import distributed
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard

from lightning_sm._lightning import ModelCheckpoint
from lightning_sm.training.callbacks.outputs import JobOutputs
from lightning_sm.training.group_exit import leave_at_exit

RANK, FOLDER = int(sys.argv[1]), Path(sys.argv[2])


def save(path):
    """Save as Lightning's strategies do: each rank writes its shards, and rank 0 the index and all else."""
    path.mkdir(parents=True, exist_ok=True)
    weights = get_model_state_dict(model)
    moments = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    dcp.save({"state_dict": weights, "optimizer_0": moments}, checkpoint_id=path)
    if RANK == 0:
        torch.save({"global_step": 1}, path / "meta.pt")


def broadcast(value):
    values = [value]
    distributed.broadcast_object_list(values, 0)
    return values[0]


class SlowOutputs(JobOutputs):
    """Takes a second longer on rank 0."""

    def _export(self, trainer, checkpoint):
        super()._export(trainer, checkpoint)
        if RANK == 0:
            time.sleep(1)
            Path(self._model_dir, "complete").touch()


def refuse_barrier(name):
    raise AssertionError(f"the barrier {name} would fail after the strategy's timeout")


def export(model_dir, best):
    callback = ModelCheckpoint()
    callback.best_model_path = best
    strategy = SimpleNamespace(broadcast=broadcast, barrier=refuse_barrier)
    trainer = SimpleNamespace(
        strategy=strategy,
        local_rank=0,
        is_global_zero=RANK == 0,
        callbacks=[callback],
        checkpoint_callbacks=[callback],
        save_checkpoint=lambda path: save(Path(path)),
    )
    SlowOutputs(SimpleNamespace(model_dir=Path(model_dir), checkpoint_dir=None)).on_fit_end(trainer, None)
    # In SageMaker's local mode, the first host that exits stops the others, so rank 0 must have finished.
    assert Path(FOLDER, "0", model_dir, "complete").exists()


here = FOLDER / str(RANK)
here.mkdir()
os.chdir(here)
leave_at_exit()  # like SageMakerTrainer: FSDP2 keeps its groups
distributed.init_process_group("gloo", init_method=f"file://{FOLDER}/meeting", rank=RANK, world_size=2)
torch.manual_seed(0)
# With 5 rows, the shards differ in size. The norm gets random weights, so that they differ from its defaults.
model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.LayerNorm(5))
torch.nn.init.normal_(model[1].weight)
if RANK == 0:
    torch.save(model.state_dict(), "expected.pt")
fully_shard(model)
save(Path("best.ckpt"))
with torch.no_grad():
    for parameter in model.parameters():
        parameter.add_(1)
export("model-best", "best.ckpt")
export("model-current", "")
