"""RemoteDataModule as the user's DataModule: its state, checkpoints and copies, and the metrics of its loaders."""

import copy
import logging
import pickle

import pytest
import torch
from pytorch_lightning.loggers.logger import Logger

from tests.integration.data.numbers import Data

pytestmark = pytest.mark.processes


class InMemory(Logger):
    """A logger that keeps metrics and hyperparameters."""

    def __init__(self):
        super().__init__()
        self.metrics, self.hparams = [], {}

    @property
    def name(self):
        return "in memory"

    @property
    def version(self):
        return 0

    def log_metrics(self, metrics, step=None):
        self.metrics.append((step, metrics))

    def log_hyperparams(self, params):
        self.hparams.update(params)


@pytest.mark.parametrize(
    "copied",
    [
        pytest.param(lambda module: pickle.loads(pickle.dumps(module)), id="pickle"),  # noqa: S301  # pickled right here
        pytest.param(copy.deepcopy, id="deep", marks=pytest.mark.proof),
    ],
)
def test_copies_work(cluster, copied):
    """A module that a Trainer holds can be copied, as strategies that spawn processes require."""
    module = cluster.module()
    model, _ = cluster.fit("sequential", data=module, max_epochs=1)
    again, _ = cluster.fit("sequential", data=copied(module), max_epochs=1)
    assert again.seen == model.seen


class Ours(Data):
    """A DataModule that accepts only its expected state."""

    def load_state_dict(self, state_dict):
        assert state_dict == {"own": 7}
        self.own = 7


@pytest.mark.parametrize("is_remote_first", [True, False])
def test_checkpoints_have_the_state_of_the_users_datamodule(cluster, is_remote_first):
    """The state is saved under the name of its class, so a training resumes with and without data hosts."""
    first, second = Ours(cluster.folder), Ours(cluster.folder)
    first.own = 7
    cluster.module(first if is_remote_first else second)
    _, trainer = cluster.fit("sequential", data=first, max_epochs=1)
    trainer.save_checkpoint(cluster.folder / "state.ckpt")
    assert torch.load(cluster.folder / "state.ckpt", weights_only=True)["Ours"] == {"own": 7}
    model, _ = cluster.fit("sequential", data=second, ckpt_path=cluster.folder / "state.ckpt")
    assert second.own == 7
    assert model.indices("train") == list(range(23))


def test_metrics_reach_the_logger(cluster, caplog):
    """Waits, rates and retries are logged as metrics; without a problem, the log has at most one line per epoch."""
    caplog.set_level(logging.INFO, "lightning_sm")
    logger = InMemory()
    cluster.fit("sequential", "small", logger=logger, log_every_n_steps=2)
    logged = [(step, found) for step, found in logger.metrics if "data/produce_ms" in found]
    assert [step for step, _ in logged] == [1, 3, 5, 7, 9, 11]
    for _, found in logged:
        assert found["data/bytes_per_s"] >= 0
        assert found["data/retries"] == 0
        assert found["data/produce_ms"] > 0
        assert found["data/transfer_ms"] > 0
    timed = [found for _, found in logger.metrics if "time/step_ms" in found]
    assert timed
    for found in timed:
        assert 0 <= found["time/input_bound"] <= 1
        assert found["time/step_ms"] >= found["time/data_wait_ms"] >= 0
    assert logger.hparams == {"width": 2}
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("lightning_sm.data")]
    # On a busy machine, a host may build none of these few batches, or the training may wait for a second: both are
    # logged.
    assert not [
        line for line in lines if ": built none of " not in line and not line.startswith(("Epoch ", "Data hosts also"))
    ]
