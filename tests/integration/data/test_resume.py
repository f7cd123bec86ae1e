"""A resumed training sees the rest of the epoch as if it had never stopped, whatever the shape of the cluster."""

import hashlib

import pytest
import torch
from pytorch_lightning import LightningDataModule, LightningModule, Trainer
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader, Dataset

from lightning_sm import DataHost, RemoteDataModule
from lightning_sm.errors import ResumeError

pytestmark = pytest.mark.processes

NUM_SAMPLES, BATCH_SIZE, NUM_STEPS = 103, 10, 11


class Augmented(Dataset):
    """Numbers with noise, which shows whether the random state is that of the sample."""

    def __init__(self, size=NUM_SAMPLES):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {"x": torch.rand(4) + index, "index": index}


class Data(LightningDataModule):
    """Shuffled training data, and validation data in order."""

    def __init__(self, batch_size=BATCH_SIZE, size=NUM_SAMPLES):
        super().__init__()
        self.batch_size, self.size = batch_size, size

    def train_dataloader(self):
        return DataLoader(Augmented(self.size), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(Augmented(17), batch_size=5)

    def state_dict(self):
        return {"own": 7}

    def load_state_dict(self, state_dict):
        assert state_dict == {"own": 7}


class Recorder(LightningModule):
    """Keeps a hash of every batch that it is given."""

    def __init__(self, reads_number_of_steps=False):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.reads_number_of_steps = reads_number_of_steps
        self.seen = []

    def training_step(self, batch, batch_index):
        digest = hashlib.blake2b(batch["x"].numpy().tobytes(), digest_size=6).hexdigest()
        self.seen.append((self.current_epoch, batch_index, tuple(batch["index"].tolist()), digest))
        return self.layer(batch["x"]).mean()

    def validation_step(self, batch, batch_index):
        pass

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-6)
        if not self.reads_number_of_steps:
            return optimizer
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-5, total_steps=steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class StopAt(Callback):
    """Ends the process's training in the middle, as an interruption would."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == self.step:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def hosts():
    """Three data hosts of different strength."""
    with (
        DataHost(Data(), workers=1) as first,
        DataHost(Data(), workers=2) as second,
        DataHost(Data(), workers=3) as third,
    ):
        yield [first.address, second.address, third.address]


def fit(addresses, folder, *, model=None, data=None, callbacks=(), ckpt_path=None, **trainer):
    """Train two epochs on data hosts, or until interrupted; the batches that were seen."""
    model = model or Recorder()
    settings = {"max_epochs": 2, "accelerator": "cpu", "logger": False, "enable_progress_bar": False, **trainer}
    trainer = Trainer(default_root_dir=folder, callbacks=list(callbacks), enable_model_summary=False, **settings)
    try:
        trainer.fit(model, datamodule=RemoteDataModule(data or Data(), addresses), ckpt_path=ckpt_path)
    except SystemExit:  # Lightning's answer to KeyboardInterrupt
        assert any(isinstance(callback, StopAt) for callback in callbacks)
    return model.seen


def saved_every_step(folder):
    """A callback that keeps a checkpoint after every step."""
    return ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)


@pytest.fixture(scope="module")
def whole(hosts, tmp_path_factory):
    """An uninterrupted run on one data host."""
    return fit(hosts[:1], tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("reads_number_of_steps", [False, True])
@pytest.mark.parametrize("shape", [([0], [0]), ([0, 1], [2]), ([1], [0, 1, 2])])
@pytest.mark.parametrize("step", [1, 7, NUM_STEPS, NUM_STEPS + 4])
def test_the_rest_is_the_same(hosts, whole, tmp_path, step, shape, reads_number_of_steps):
    """In the middle and at the end of an epoch, on other data hosts, and if a schedule reads the number of steps."""
    before, after = shape
    first = fit(
        [hosts[number] for number in before],
        tmp_path,
        model=Recorder(reads_number_of_steps),
        callbacks=[saved_every_step(tmp_path), StopAt(step)],
    )
    checkpoint = tmp_path / f"step={step}.ckpt"
    rest = fit(
        [hosts[number] for number in after], tmp_path, model=Recorder(reads_number_of_steps), ckpt_path=checkpoint
    )
    assert first == whole[: len(first)]
    assert rest == whole[step:]


def test_limited_epochs_resume_where_they_were_cut(hosts, whole, tmp_path):
    """With limit_train_batches, the second epoch begins at its beginning."""
    first = fit(hosts[:1], tmp_path, callbacks=[saved_every_step(tmp_path), StopAt(7)], limit_train_batches=5)
    rest = fit(hosts[1:2], tmp_path, ckpt_path=tmp_path / "step=7.ckpt", limit_train_batches=5)
    limited = [*whole[:5], *whole[NUM_STEPS : NUM_STEPS + 5]]
    assert first == limited[: len(first)]
    assert rest == limited[7:]


def test_another_batch_size_goes_on_with_the_same_samples(hosts, whole, tmp_path):
    """Half the batch size: the same samples, in the same order, in twice the steps."""
    fit(hosts[:1], tmp_path, callbacks=[saved_every_step(tmp_path), StopAt(6)])
    with DataHost(Data(batch_size=5), workers=1) as host:
        rest = fit([host.address], tmp_path, data=Data(batch_size=5), ckpt_path=tmp_path / "step=6.ckpt", max_epochs=1)
    assert [index for _, _, indices, _ in rest for index in indices] == [
        index for epoch, _, indices, _ in whole[6:] if epoch == 0 for index in indices
    ]
    assert rest[0][1] == 12


def test_other_data_in_the_middle_of_an_epoch_is_refused(hosts, tmp_path):
    """The rest of an epoch over other data means nothing; both are named."""
    fit(hosts[:1], tmp_path, callbacks=[saved_every_step(tmp_path), StopAt(6)])
    with (
        DataHost(Data(size=99), workers=1) as host,
        pytest.raises(ResumeError, match=r"over Augmented of 103 .* now serve Augmented of 99"),
    ):
        fit([host.address], tmp_path, data=Data(size=99), ckpt_path=tmp_path / "step=6.ckpt")
