"""RemoteDataModule stands in for the user's DataModule: hooks, attributes, state, checkpoints, metrics."""

import copy
import logging
import os
import pickle
import re

import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers.logger import Logger

from lightning_sm import RemoteDataModule
from tests.integration.data.numbers import NUM_TEST, Cluster, Data, Recorder

pytestmark = pytest.mark.processes


class InMemory(Logger):
    """Keeps metrics and hyperparameters."""

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


def saved(cluster, train="sequential", **options):
    """Train two epochs, and keep a checkpoint after every step; the model, and the folder of the checkpoints."""
    folder = cluster.folder / f"checkpoints {len(list(cluster.folder.iterdir()))}"
    keep = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    model, _ = cluster.fit(train, callbacks=[keep], enable_checkpointing=True, **options)
    return model, folder


def test_hooks_run_where_they_belong(cluster):
    """What needs the data runs on the data hosts, what needs the device in the trainer; each as often as Lightning."""
    model, trainer = cluster.fit("sequential", max_epochs=1)
    hosts = [cluster.noted([host.pid]) for host in cluster.hosts]
    fits = ["setup fit", "train_dataloader 0", "val_dataloader"]
    assert all([note for note in notes if "prepare" not in note and "teardown" not in note] == fits for notes in hosts)
    transfers = ["on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"]
    assert cluster.noted([os.getpid()]) == transfers * len(model.seen)

    trainer.save_checkpoint(cluster.folder / "hooks.ckpt")
    cluster.fit("sequential", max_epochs=2, ckpt_path=cluster.folder / "hooks.ckpt")
    assert all("teardown fit" in cluster.noted([host.pid]) for host in cluster.hosts)
    assert cluster.noted([os.getpid()])[0] == "load_state_dict"


def test_data_is_prepared_and_torn_down_once(tmp_path):
    """prepare_data once per data host, teardown once per run, the last when the host leaves; all in one process."""
    cluster = Cluster(tmp_path, num_hosts=1)
    (host,) = cluster.hosts
    with host:
        pid = host.pid
        cluster.fit("sequential", max_epochs=1)
        before = cluster.noted([pid])
        cluster.choose()
        cluster.trainer().test(Recorder(), datamodule=cluster.module())
    assert before == ["prepare_data", "setup fit", "train_dataloader 0", "val_dataloader"]
    assert cluster.noted([pid]) == ["teardown fit", "setup test", "test_dataloader", "teardown test"]


def test_one_module_serves_several_runs(cluster):
    """fit, fit on, test and validate with one RemoteDataModule; each sees its data."""
    module, model = cluster.module(), Recorder()
    cluster.fit("sequential", model=model, data=module, max_epochs=1)
    _, trainer = cluster.fit("sequential", model=model, data=module, max_epochs=1)
    trainer.test(model, datamodule=module)
    trainer.validate(model, datamodule=module)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, datamodule=module)
    assert model.indices("train") == list(range(23)) * 3
    assert model.indices("test") == list(range(NUM_TEST))
    assert model.indices("val 0") == list(range(NUM_TEST)) * 4


def test_attributes_and_hyperparameters_shine_through(cluster):
    """Those of the user's DataModule, and plain values that setup() made on the data hosts; loggers get them, too."""
    module, logger = cluster.module(), InMemory()
    cluster.fit(data=module, max_epochs=1, limit_train_batches=1, logger=logger)
    assert module.num_classes == 10
    assert module.own == 0
    assert module.hparams == logger.hparams == {"width": 2}
    assert module.chosen("train").batch_size == 4
    with pytest.raises(AttributeError, match=r"Data has no attribute 'folders' on a trainer.*run on the data hosts"):
        _ = module.folders


@pytest.mark.parametrize(
    "copied",
    [
        pytest.param(lambda module: pickle.loads(pickle.dumps(module)), id="pickle"),  # noqa: S301  # pickled right here
        pytest.param(copy.deepcopy, id="deep", marks=pytest.mark.proof),
    ],
)
def test_copies_work(cluster, copied):
    """Also of a module that a Trainer holds, as strategies that spawn need it."""
    module = cluster.module()
    model, _ = cluster.fit("sequential", data=module, max_epochs=1)
    again, _ = cluster.fit("sequential", data=copied(module), max_epochs=1)
    assert again.hashes == model.hashes


def test_the_seed_decides(cluster, monkeypatch):
    """Equal seeds give equal batches, another seed other ones; the default is that of seed_everything."""
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")
    first, again, other = (cluster.fit(data=cluster.module(seed=seed), max_epochs=1)[0].hashes for seed in (None, 5, 6))
    assert first == again
    assert first != other


class Ours(Data):
    """Strict in what it loads."""

    def load_state_dict(self, state_dict):
        assert state_dict == {"own": 7}
        self.own = 7


def test_checkpoints_resume_without_data_hosts(cluster):
    """The state of the DataModule is the user's own, and Lightning finds nothing that it refuses."""
    remote = RemoteDataModule(Ours(cluster.folder), [host.address for host in cluster.hosts])
    remote._datamodule.own = 7
    _, folder = saved(cluster, data=remote)
    assert torch.load(folder / "step=9.ckpt", weights_only=True)["Ours"] == {"own": 7}
    local = Ours(cluster.folder)
    model, trainer = cluster.fit("sequential", data=local, ckpt_path=folder / "step=9.ckpt")
    assert local.own == 7
    assert trainer.global_step == 12
    assert len(model.batches("train")) == 3


def test_checkpoints_without_data_hosts_resume_with_them(cluster):
    """Where they stopped."""
    local = Ours(cluster.folder)
    local.own = 7
    _, folder = saved(cluster, data=local)
    remote = RemoteDataModule(Ours(cluster.folder), [host.address for host in cluster.hosts])
    model, _ = cluster.fit("sequential", data=remote, ckpt_path=folder / "step=9.ckpt")
    assert remote.own == 7
    assert model.indices("train") == list(range(12, 23))


def test_a_checkpoint_brings_its_seed(cluster):
    """The rest of the epoch has the order of its beginning, whatever the seed of the process that resumes."""
    whole, folder = saved(cluster, "shuffled", data=cluster.module(seed=5))
    rest, _ = cluster.fit(data=cluster.module(seed=6), ckpt_path=folder / "step=3.ckpt")
    assert rest.batches("train") == whole.batches("train")[3:]


@pytest.mark.parametrize(
    "train",
    ["max_size_cycle", *(pytest.param(train, marks=pytest.mark.proof) for train in ("dict", "max_size", "min_size"))],
)
def test_loaders_of_different_lengths_resume(cluster, train):
    """Also where the short one has ended or has restarted."""
    whole, folder = saved(cluster, train)
    for step in (2, len(whole.batches("train")) - 2):
        rest, _ = cluster.fit(train, ckpt_path=folder / f"step={step}.ckpt")
        assert rest.batches("train") == whole.batches("train")[step:]


def test_metrics_reach_the_logger(cluster, caplog):
    """Waiting, rates and repairs; and one line at the end of each epoch, for all hosts, if nothing is wrong."""
    caplog.set_level(logging.INFO, "lightning_sm")
    logger = InMemory()
    cluster.fit("sequential", "small", logger=logger, log_every_n_steps=2)
    logged = [(step, found) for step, found in logger.metrics if "data/wait_ms" in found]
    assert [step for step, _ in logged] == [1, 3, 5, 7, 9, 11]
    for _, found in logged:
        assert 0 <= found["data/input_bound"] <= 1
        assert found["data/wait_ms"] >= 0
        assert found["data/bytes_per_s"] >= 0
        assert found["data/step_ms"] >= found["data/wait_ms"]
        assert found["data/retries"] == 0
        assert found["data/produce_ms"] > 0
        assert found["data/transfer_ms"] > 0
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("lightning_sm.data")]
    # Of a few batches, a host may build none on a busy machine, or the training may wait for a second.
    lines = [line for line in lines if ": no batch built, of " not in line]
    verdict = r"( \| Training waits .*)?"
    assert [re.fullmatch(rf"epoch=(\d)/2 data_wait=[\d.]+%{verdict}", line)[1] for line in lines] == ["1", "2"]
