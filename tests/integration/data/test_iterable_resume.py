"""A Trainer over iterable datasets, resumed: the rest is what would have come."""

import hashlib

import pytest
import torch
from pytorch_lightning import LightningDataModule, LightningModule, Trainer
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_sm import DataHost, RemoteDataModule
from lightning_sm.data.settings import DataServiceSettings
from lightning_sm.errors import ResumeError

pytestmark = pytest.mark.processes

# Shards 0 to 7 have four batches of two samples, the others three: 56 in all.
NUM_BATCHES = 56


class Numbers(IterableDataset):
    """Numbers with noise, in shards of two lengths."""

    def __iter__(self):
        number = get_worker_info().id
        for position in range(8 if number < 8 else 6):
            yield {"index": 100 * number + position, "x": torch.rand(4)}


class Data(LightningDataModule):
    """Iterable training and validation data."""

    def train_dataloader(self):
        return DataLoader(Numbers(), batch_size=2)

    def val_dataloader(self):
        return DataLoader(Numbers(), batch_size=4)


class Recorder(LightningModule):
    """Keeps what it is given."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.seen, self.num_validated = [], 0

    def training_step(self, batch, batch_index):
        digest = hashlib.blake2b(batch["x"].numpy().tobytes(), digest_size=6).hexdigest()
        self.seen.append((tuple(batch["index"].tolist()), digest))
        return self.layer(batch["x"]).mean()

    def validation_step(self, batch, batch_index):
        self.num_validated += 1

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6)


class StopAt(Callback):
    """Ends the training in the middle, as an interruption would."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == self.step:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def hosts():
    """Two data hosts of different strength."""
    with DataHost(Data(), workers=1) as first, DataHost(Data(), workers=2) as second:
        yield [first.address, second.address]


def fit(addresses, folder, *, callbacks=(), ckpt_path=None, service=None, **settings):
    """Train, or until interrupted; the model."""
    model = Recorder()
    settings = {"max_epochs": 2, "accelerator": "cpu", "logger": False, "enable_progress_bar": False, **settings}
    trainer = Trainer(default_root_dir=folder, callbacks=list(callbacks), enable_model_summary=False, **settings)
    module = RemoteDataModule(Data(), addresses, settings=DataServiceSettings(**(service or {})))
    try:
        trainer.fit(model, datamodule=module, ckpt_path=ckpt_path)
    except SystemExit:  # Lightning's answer to KeyboardInterrupt
        assert any(isinstance(callback, StopAt) for callback in callbacks)
    return model


def saved_every_step(folder):
    """A callback that keeps a checkpoint after every step."""
    return ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)


@pytest.fixture(scope="module", params=[None, 40, 70], ids=lambda length: f"{length or 'no'} batches_per_epoch")
def service(request):
    """Passes that end with the shards, before, and after."""
    return {} if request.param is None else {"batches_per_epoch": request.param}


@pytest.fixture(scope="module")
def whole(hosts, service, tmp_path_factory):
    """An uninterrupted run."""
    return fit(hosts[:1], tmp_path_factory.mktemp("whole"), service=service)


def test_an_epoch_has_every_batch(whole, service):
    """Epochs are as long as they should be, with other noise in each, and validation sees all of its data."""
    length = service.get("batches_per_epoch", NUM_BATCHES)
    assert len(whole.seen) == 2 * length
    first, second = whole.seen[:length], whole.seen[length:]
    assert [indices for indices, _ in first] == [indices for indices, _ in second]
    assert not {digest for _, digest in first} & {digest for _, digest in second}
    assert whole.num_validated == 2 + 2 * 32  # the sanity check, and two batches of each shard in every epoch


@pytest.mark.parametrize("step", [1, 39, 52, 60])
def test_the_rest_is_the_same(hosts, service, whole, tmp_path, step):
    """Also after some shards have ended, and on other data hosts."""
    first = fit(hosts[:1], tmp_path, service=service, callbacks=[saved_every_step(tmp_path), StopAt(step)])
    rest = fit(hosts, tmp_path, service=service, ckpt_path=tmp_path / f"step={step}.ckpt")
    assert first.seen == whole.seen[: len(first.seen)]
    assert rest.seen == whole.seen[step:]


def test_the_next_epoch_begins_at_its_beginning(hosts, service, whole, tmp_path):
    """A checkpoint of the end of an epoch goes on with all of the next one."""
    fit(hosts[:1], tmp_path, service=service, max_epochs=1, callbacks=[ModelCheckpoint(tmp_path, filename="end")])
    rest = fit(hosts, tmp_path, service=service, ckpt_path=tmp_path / "end.ckpt")
    assert rest.seen == whole.seen[len(whole.seen) // 2 :]


def test_another_number_of_shards_is_refused(hosts, tmp_path):
    """The rest of an epoch means nothing in other shards; both numbers are named."""
    fit(hosts[:1], tmp_path, callbacks=[saved_every_step(tmp_path), StopAt(5)])
    with pytest.raises(ResumeError, match="16 shards, 1 ranks, batches of 2, and there are 8 shards"):
        fit(hosts, tmp_path, service={"virtual_shards": 8}, ckpt_path=tmp_path / "step=5.ckpt")
