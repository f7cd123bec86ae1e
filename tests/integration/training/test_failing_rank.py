"""A rank that raises an exception while the others wait for it in a collective call."""

import os
import sys
import textwrap

import pytest

from lightning_sm._lightning import ModelCheckpoint
from lightning_sm.job.control_folder import ControlFolder, Phase
from lightning_sm.job.failure_file import read_failures
from lightning_sm.job.variables import CONTROL_DIR
from lightning_sm.training.callbacks.failing_rank import FailingRank
from tests.integration.hosts import REPOSITORY, Hosts, run_together
from tests.integration.interrupted_fits import Interrupt, Model, is_interrupted
from tests.quick_processes import python_path

_SCRIPT = """
import os, sys
from pathlib import Path
import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from lightning_sm.training.callbacks.failing_rank import FailingRank
from lightning_sm.training.callbacks.local_position import LocalPosition

folder, failing = Path(sys.argv[1]), int(sys.argv[2])

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(2, 1)
    def training_step(self, batch, batch_idx):
        if batch_idx == 3 and self.global_rank == failing:
            raise ValueError("a bad sample")
        return self.line(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.rand(64, 2), 2)

model = Model()
trainer = Trainer(
    accelerator="cpu", devices=1, num_nodes=2, strategy="ddp", max_epochs=1, logger=False, enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[FailingRank(), LocalPosition(), ModelCheckpoint(folder, save_on_exception=True)],
)
trainer.fit(model)
"""


@pytest.mark.matrix(first=1)
@pytest.mark.parametrize("failing", [1, 0])
def test_one_rank_fails_and_saves_nothing(tmp_path, failing):
    """A failing rank prints its traceback and exits without waiting for another rank to save a checkpoint."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(_SCRIPT))
    hosts = Hosts(tmp_path / "hosts")  # reserves the port
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(hosts.main_port), "LOCAL_RANK": "0"}
    env |= {"WORLD_SIZE": "2", "PYTHONPATH": python_path(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(tmp_path / "saved"), str(failing)]
    ended = run_together({str(rank): (command, {**env, "NODE_RANK": str(rank)}) for rank in range(2)})[str(failing)]
    assert ended.code == 1
    assert "ValueError: a bad sample" in ended.output
    assert list((tmp_path / "saved").glob("*.ckpt")) == []


_LEAVES = """
import atexit
from lightning_sm._lightning import destroy_dist_connection
from lightning_sm.job.failure_file import report_failures
from lightning_sm.training.group_exit import leave_at_exit

report_failures()
leave_at_exit()
atexit.register(destroy_dist_connection)  # as Lightning does with NCCL

def destroy():
    os.write(1, b"DESTROYED\\n")

torch.distributed.destroy_process_group = destroy
"""


@pytest.mark.matrix(first=1)
@pytest.mark.parametrize(
    ("failure", "code"), [("sys.exit(9)", 9), ("raise ValueError('a bad sample')", 1)], ids=["sys.exit", "exception"]
)
def test_a_failing_rank_waits_for_no_peer_at_its_exit(tmp_path, failure, code):
    """Even with sys.exit, a failing rank tells the launcher, and does not destroy the group, which would block."""
    script = tmp_path / "train.py"
    source = textwrap.dedent(_SCRIPT).replace('raise ValueError("a bad sample")', failure)
    script.write_text(source.replace("model = Model()", f"{_LEAVES}\nmodel = Model()"))
    hosts = Hosts(tmp_path / "hosts")  # reserves the port
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(hosts.main_port), "LOCAL_RANK": "0"}
    env |= {"WORLD_SIZE": "2", "PYTHONPATH": python_path(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(tmp_path / "saved"), "1"]
    folders = [tmp_path / f"control-{rank}" for rank in range(2)]
    variables = {}
    for rank, folder in enumerate(folders):
        folder.mkdir()
        variables[str(rank)] = (command, {**env, "NODE_RANK": str(rank), CONTROL_DIR.name: str(folder)})
    ended = run_together(variables)["1"]
    assert ended.code == code
    assert "DESTROYED" not in ended.output
    (beat,) = ControlFolder(folders[1]).beats()
    assert (beat.phase, beat.rank) == (Phase.FAILED, 1)
    assert beat.error.startswith("SystemExit: 9" if code == 9 else "ValueError: a bad sample")
    (said,) = read_failures(folders[1]).values()
    assert said is None if code == 9 else said.lines == ("ValueError: a bad sample",)


@pytest.mark.usefixtures("restored_signals")
def test_no_second_checkpoint_is_written_for_an_interruption(tmp_path):
    """ModelCheckpoint does not save an interruption again: SpotCheckpoint already has, and every second counts."""
    folder = tmp_path / "run"
    also = ModelCheckpoint(folder / "exceptions", save_on_exception=True, every_n_epochs=99)
    assert is_interrupted(folder, Model(), FailingRank(), Interrupt("on_train_batch_start", 3), also)
    assert [path.name for path in folder.rglob("*.ckpt")] == ["interrupted-epoch=0-step=2.ckpt"]
