"""A Trainer over iterable datasets, resumed: the rest is what would have come."""

import hashlib

import pytest
import torch
from pytorch_lightning import LightningDataModule, LightningModule, Trainer
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_sm import RemoteDataModule
from lightning_sm.data.settings import DataServiceSettings
from lightning_sm.errors import ResumeError

pytestmark = pytest.mark.processes

# Shards 0 to 7 have four batches of two samples, the others three: 56 in all. Checkpoints have the number of shards,
# which is not the default: what resumes needs no setting.
NUM_BATCHES = 56
SHARDED = {"virtual_shards": 16}


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
def hosts(pool):
    """Addresses of two data hosts of different strength."""
    data = Data()
    return [host.address for host in pool.serve(data.train_dataloader, data.val_dataloader)[:2]]


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


class Whole:
    """Uninterrupted runs that kept a checkpoint of every step and epoch, each made when it is first asked for.

    Args:
        addresses: Where they trained.
        folder: Where their checkpoints are.
    """

    def __init__(self, addresses, folder):
        self._addresses = addresses
        self._folder = folder
        self._models = {}

    def trained(self, batches_per_epoch):
        """Train, with passes of some length; the model, and the folder of the checkpoints."""
        folder = self._folder / str(batches_per_epoch)
        if batches_per_epoch not in self._models:
            steps = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
            ends = ModelCheckpoint(folder, filename="end of {epoch}", save_top_k=-1)
            self._models[batches_per_epoch] = fit(
                self._addresses, folder, callbacks=[steps, ends], service=SHARDED | service(batches_per_epoch)
            )
        return self._models[batches_per_epoch], folder


def service(batches_per_epoch):
    """Settings of the data service."""
    return {} if batches_per_epoch is None else {"batches_per_epoch": batches_per_epoch}


@pytest.fixture(scope="module")
def whole(hosts, tmp_path_factory):
    """Uninterrupted runs on one data host."""
    return Whole(hosts[:1], tmp_path_factory.mktemp("whole"))


def lengths(*cheap):
    """Passes that end with the shards, before, and after."""
    return [pytest.param(one, marks=[] if one in cheap else [pytest.mark.proof]) for one in (None, 40, 70)]


@pytest.mark.parametrize("length", lengths(None, 70))
def test_an_epoch_has_every_batch(whole, length):
    """Epochs are as long as they should be, with other noise in each, and validation sees all of its data."""
    model, _ = whole.trained(length)
    length = length or NUM_BATCHES
    assert len(model.seen) == 2 * length
    first, second = model.seen[:length], model.seen[length:]
    assert [indices for indices, _ in first] == [indices for indices, _ in second]
    assert not {digest for _, digest in first} & {digest for _, digest in second}
    assert model.num_validated == 2 + 2 * 32  # the sanity check, and two batches of each shard in every epoch


@pytest.mark.parametrize(
    ("length", "step"),
    [
        (None, 52),
        (70, 60),
        *(
            pytest.param(length, step, marks=pytest.mark.proof)
            for length in (None, 40, 70)
            for step in (1, 39, 52, 60)
            if (length, step) not in {(None, 52), (70, 60)}
        ),
    ],
)
def test_the_rest_is_the_same(hosts, whole, length, step):
    """Also after some shards have ended, and on other data hosts."""
    model, folder = whole.trained(length)
    rest = fit(hosts, folder, service=service(length), ckpt_path=folder / f"step={step}.ckpt")
    assert rest.seen == model.seen[step:]


@pytest.mark.parametrize("length", lengths(None))
def test_the_next_epoch_begins_at_its_beginning(hosts, whole, length):
    """A checkpoint of the end of an epoch resumes with all of the next one."""
    model, folder = whole.trained(length)
    rest = fit(hosts, folder, service=service(length), ckpt_path=folder / "end of epoch=0.ckpt")
    assert rest.seen == model.seen[len(model.seen) // 2 :]


@pytest.mark.proof
def test_an_interrupted_run_resumes_as_one_that_saved_and_continued(hosts, whole, tmp_path):
    """An interruption shows neither in what came before it nor in what comes after the resumption."""
    model, _ = whole.trained(None)
    saved = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    first = fit(hosts[:1], tmp_path, callbacks=[saved, StopAt(52)], service=SHARDED)
    rest = fit(hosts, tmp_path, ckpt_path=tmp_path / "step=52.ckpt")
    assert first.seen == model.seen[:52]
    assert rest.seen == model.seen[52:]


def test_another_number_of_shards_is_refused(hosts, whole):
    """The rest of an epoch means nothing in other shards; both numbers are named."""
    _, folder = whole.trained(None)
    with pytest.raises(ResumeError, match="16 virtual shards, world size 1, batch size 2, but now it has 8 virtual"):
        fit(hosts, folder, service={"virtual_shards": 8}, ckpt_path=folder / "step=5.ckpt")
