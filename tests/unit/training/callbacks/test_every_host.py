"""Lightning's own Trainer and Fabric in a job with several hosts."""

from __future__ import annotations

import json
from importlib.metadata import entry_points

import pytest
import torch
from lightning_fabric import Fabric
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.cli import LightningCLI
from torch.utils.data import DataLoader, TensorDataset

from lightning_sm.errors import TopologyError
from lightning_sm.job.variables import SEPARATE_HOSTS
from lightning_sm.training import group_exit
from lightning_sm.training.callbacks.every_host import EveryHost
from lightning_sm.training.callbacks_factory import callbacks

_QUIET = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}


class _Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        raise AssertionError("a step was trained")

    def test_step(self, batch, batch_idx):
        self.log("output", self.layer(batch[0]).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(4, 2)))

    test_dataloader = train_dataloader


@pytest.fixture
def two_hosts(monkeypatch, tmp_path):
    """The first of two trainer hosts."""
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path))
    monkeypatch.setenv("SM_HOSTS", json.dumps(["algo-1", "algo-2"]))
    monkeypatch.setenv("SM_CURRENT_HOST", "algo-1")


@pytest.mark.parametrize("num_nodes", [1, 3])
@pytest.mark.usefixtures("two_hosts")
def test_a_trainer_that_does_not_span_the_hosts_is_an_error_before_its_first_step(num_nodes):
    """Lightning loads the check by itself, and the error contains both numbers and the remedy."""
    (check,) = (one for one in Trainer(**_QUIET).callbacks if isinstance(one, EveryHost))
    trainer = Trainer(**_QUIET)
    trainer.strategy.num_nodes = num_nodes
    with pytest.raises(
        TopologyError, match=rf"Trainer\(num_nodes={num_nodes}\) does not match .* in the job, 2 \(SM_"
    ) as error:
        check.setup(trainer, _Model(), "fit")
    assert "Set num_nodes=2" in str(error.value)


@pytest.mark.usefixtures("two_hosts")
def test_scripts_of_lightning_alone_do_not_train_a_model_on_each_host():
    """On two hosts, Trainer, LightningCLI and Fabric refuse to train with their defaults."""
    with pytest.raises(TopologyError, match="each of these hosts would train a model of its own"):
        Trainer(**_QUIET).fit(_Model())
    with pytest.raises(TopologyError, match=r"SageMakerCLI in place of LightningCLI"):
        LightningCLI(_Model, trainer_defaults=_QUIET, save_config_callback=None, args=["fit"])
    with pytest.raises(TopologyError, match=r"Fabric\(num_nodes=1\)"):
        Fabric(accelerator="cpu").setup(_Model())


@pytest.mark.usefixtures("two_hosts")
def test_a_test_may_run_on_one_host():
    """A test can run on one host, which Lightning recommends so that no sample counts twice."""
    (metrics,) = Trainer(**_QUIET).test(_Model(), verbose=False)
    assert metrics.keys() == {"output"}


def test_hosts_may_train_apart_on_purpose(two_hosts, monkeypatch):
    """Nothing is checked if the job allows separate hosts, on a single host, or outside a job."""
    assert len(callbacks()) == 1
    monkeypatch.setenv(SEPARATE_HOSTS.name, "1")
    assert callbacks() == []
    monkeypatch.setenv(SEPARATE_HOSTS.name, "0")
    monkeypatch.setenv("SM_HOSTS", '["algo-1"]')
    assert callbacks() == []
    monkeypatch.delenv("SM_HOSTS")
    monkeypatch.delenv("SM_CURRENT_HOST")
    assert callbacks() == []


@pytest.mark.parametrize("hosts", [["algo-1"], ["algo-1", "algo-2"]])
def test_trainers_of_a_job_leave_their_process_groups_at_exit(two_hosts, monkeypatch, hosts):
    """Otherwise, a Gloo thread may abort a finished training; scripts outside a job stay as they are."""
    left = []
    monkeypatch.setattr(group_exit, "leave_at_exit", lambda: left.append(True))
    monkeypatch.setenv("SM_HOSTS", json.dumps(hosts))
    Trainer(**_QUIET)
    Fabric(accelerator="cpu")
    assert left == [True, True]
    monkeypatch.delenv("SM_HOSTS")
    monkeypatch.delenv("SM_CURRENT_HOST")
    Trainer(**_QUIET)
    assert left == [True, True]


@pytest.mark.parametrize("name", ["pytorch_lightning", "lightning.pytorch", "lightning_fabric", "lightning.fabric"])
def test_both_distributions_of_lightning_find_the_check(name):
    """The check is an entry point for both distributions of Lightning, which use different groups."""
    assert callbacks in [one.load() for one in entry_points(group=f"{name}.callbacks_factory")]
