"""Communication between the launcher and a training process during training."""

import signal

import pytest

from tests.fakes.job_folder import resource_config, write_job
from tests.integration.launching import failure, local_addresses, started, train

_START = """
import os, threading, time
import torch
from pytorch_lightning import LightningModule
from lightning_sm import SageMakerTrainer, SpotCheckpoint

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(2, 1)
    def training_step(self, batch, batch_idx):
        self.act(batch_idx)
        return self.line(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.rand(2000, 2), 2)

QUIET = dict(accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False)
"""


@pytest.fixture
def alone(tmp_path):
    """The only host of a job."""
    groups = {"trainer": ["algo-1"]}
    config = resource_config(groups, "algo-1", instance_types={"trainer": "ml.m5.large"}, interface="lo")
    return write_job(tmp_path / "ml", config)


def test_a_hang_is_noticed_and_shown(alone, work):
    """Training that stops making progress fails: the reason names the last step, and a file has all stacks."""
    (work / "train.py").write_text(
        _START
        + "def wait_for_ever():\n    threading.Event().wait()\n"
        + "Model.act = lambda self, index: wait_for_ever() if index == 5 else None\n"
        + "SageMakerTrainer(devices=1, **QUIET).fit(Model())\n"
    )
    ended = train(alone, work, "train.py", LIGHTNING_SM_HANG_S="1")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    reason = failure(alone)
    assert reason.startswith("The training hangs: no progress on host algo-1. Last seen: rank 0 at step 5, training (")
    stacks = alone / "output" / "data" / "algo-1" / "stacks-rank0.txt"
    assert f"Stacks: {stacks}." in reason
    assert " in wait_for_ever\n" in stacks.read_text()


def test_interrupted_workers_leave_with_their_parent(alone, work):
    """With ddp_fork and similar strategies, the parent exits once its workers have saved, not 95 s later."""
    (work / "train.py").write_text(
        _START
        + "Model.act = lambda self, index: print('ready', flush=True) if index == 2 else time.sleep(0.02)\n"
        + "if __name__ == '__main__':\n"
        + "    trainer = SageMakerTrainer(strategy='ddp_fork', devices=2, **QUIET)\n"
        + "    trainer.fit(Model())\n    print('fit returned', flush=True)\n"
    )
    with started(alone, work, "train.py", **local_addresses("algo-1")) as running:
        running.wait_for("ready")
        running.process.send_signal(signal.SIGTERM)
        assert running.exit_code() == 143, running.seen
        assert any("is saved in" in line for line in running.seen)
    assert "fit returned" not in running.seen
