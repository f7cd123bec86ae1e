"""A resumed training sees the rest of the epoch as if it had never stopped, whatever the shape of the cluster."""

import hashlib

import pytest
import torch
from pytorch_lightning import LightningDataModule, LightningModule, Trainer
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_sm import RemoteDataModule
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


@pytest.fixture
def hosts(pool):
    """Addresses of three data hosts of different strength."""
    return serving(pool, Data())


def serving(pool, data):
    """Serve a DataModule; the addresses."""
    return [host.address for host in pool.serve(data.train_dataloader, data.val_dataloader)]


def fit(addresses, folder, *, model=None, data=None, remote=None, callbacks=(), ckpt_path=None, **trainer):
    """Train two epochs on data hosts, or until interrupted; the batches that were seen."""
    model = model or Recorder()
    settings = {"max_epochs": 2, "accelerator": "cpu", "logger": False, "enable_progress_bar": False, **trainer}
    trainer = Trainer(default_root_dir=folder, callbacks=list(callbacks), enable_model_summary=False, **settings)
    try:
        trainer.fit(model, datamodule=remote or RemoteDataModule(data or Data(), addresses), ckpt_path=ckpt_path)
    except SystemExit:  # Lightning's answer to KeyboardInterrupt
        assert any(isinstance(callback, StopAt) for callback in callbacks)
    return model.seen


class Trained:
    """Trainings that were interrupted and kept a checkpoint of every step, each made when it is first asked for.

    Args:
        folder: Where their checkpoints are.
    """

    def __init__(self, folder):
        self._folder = folder
        self._seen = {}

    def until(self, stop_at, addresses, *, reads_number_of_steps=False, **trainer):
        """Train until a step; what was seen, and the folder of the checkpoints."""
        key = repr((stop_at, addresses, reads_number_of_steps, trainer))
        folder = self._folder / f"{hash(key):x}"
        if key not in self._seen:
            saved = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
            model, callbacks = Recorder(reads_number_of_steps), [saved, StopAt(stop_at)]
            self._seen[key] = fit(addresses, folder, model=model, callbacks=callbacks, **trainer)
        return self._seen[key], folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Interrupted trainings."""
    return Trained(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def whole(pool, tmp_path_factory):
    """An uninterrupted run on one data host."""
    return fit(serving(pool, Data())[:1], tmp_path_factory.mktemp("whole"))


# Pairwise: step, data hosts before and after, whether a schedule reads the number of steps.
ALONE, OTHERS, MORE = ([0], [0]), ([0, 1], [2]), ([1], [0, 1, 2])
LAST_STEP = NUM_STEPS + 4
RESUMED = [
    (7, OTHERS, False),
    (NUM_STEPS, OTHERS, True),
    *(
        pytest.param(*row, marks=pytest.mark.proof)
        for row in (
            (1, ALONE, False),
            (1, OTHERS, True),
            (1, MORE, True),
            (7, ALONE, True),
            (7, MORE, True),
            (NUM_STEPS, ALONE, True),
            (NUM_STEPS, MORE, False),
            (LAST_STEP, ALONE, True),
            (LAST_STEP, OTHERS, False),
            (LAST_STEP, MORE, False),
        )
    ),
]


@pytest.mark.parametrize(("step", "shape", "reads_number_of_steps"), RESUMED)
def test_the_rest_is_the_same(hosts, whole, trained, step, shape, reads_number_of_steps):
    """In the middle and at the end of an epoch, on other data hosts, and if a schedule reads the number of steps."""
    before, after = shape
    first, folder = trained.until(
        LAST_STEP, [hosts[number] for number in before], reads_number_of_steps=reads_number_of_steps
    )
    rest = fit(
        [hosts[number] for number in after],
        folder,
        model=Recorder(reads_number_of_steps),
        ckpt_path=folder / f"step={step}.ckpt",
    )
    assert first == whole[:LAST_STEP]
    assert rest == whole[step:]


def test_a_later_fit_has_its_own_seed(hosts, whole, trained, tmp_path, monkeypatch):
    """Not that of the checkpoint from which an earlier fit over the same DataModule has resumed."""
    _, folder = trained.until(7, hosts[:1])
    seen = []
    for ckpt_path in (None, folder / "step=7.ckpt"):
        module = RemoteDataModule(Data(), hosts[:1])
        first = fit(hosts, tmp_path, remote=module, ckpt_path=ckpt_path)
        assert first == whole[7 if ckpt_path else 0 :]
        monkeypatch.setenv("PL_GLOBAL_SEED", "6")
        seen.append(fit(hosts, tmp_path, remote=module))
        monkeypatch.delenv("PL_GLOBAL_SEED")
    assert seen[0] == seen[1] != whole


def test_limited_epochs_resume_where_they_were_cut(hosts, whole, trained):
    """With limit_train_batches, the second epoch begins at its beginning."""
    first, folder = trained.until(7, hosts[:1], limit_train_batches=5)
    rest = fit(hosts[1:2], folder, ckpt_path=folder / "step=7.ckpt", limit_train_batches=5)
    limited = [*whole[:5], *whole[NUM_STEPS : NUM_STEPS + 5]]
    assert first == limited[:7]
    assert rest == limited[7:]


def test_another_batch_size_continues_with_the_same_samples(hosts, whole, trained, pool):
    """Half the batch size: the same samples, in the same order, in twice the steps."""
    _, folder = trained.until(LAST_STEP, hosts[:2])
    halved = Data(batch_size=5)
    rest = fit(serving(pool, halved)[:1], folder, data=halved, ckpt_path=folder / "step=6.ckpt", max_epochs=1)
    assert [index for _, _, indices, _ in rest for index in indices] == [
        index for epoch, _, indices, _ in whole[6:] if epoch == 0 for index in indices
    ]
    assert rest[0][1] == 12


def test_other_data_in_the_middle_of_an_epoch_is_refused(hosts, trained, pool):
    """The rest of an epoch over other data means nothing; both are named."""
    _, folder = trained.until(LAST_STEP, hosts[:2])
    other = Data(size=99)
    addresses = serving(pool, other)[:1]
    with pytest.raises(ResumeError, match=r"over Augmented of 103 .* now serve Augmented of 99"):
        fit(addresses, folder, data=other, ckpt_path=folder / "step=6.ckpt")


class Chunks(Sampler):
    """A batch sampler with a size of its own."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        order = torch.randperm(NUM_SAMPLES).tolist()
        return iter([order[start : start + self.size] for start in range(0, NUM_SAMPLES, self.size)])


class Ordered(Data):
    """Training data in an order of a kind."""

    def __init__(self, kind, size=BATCH_SIZE):
        super().__init__()
        self.kind, self.batch_size = kind, size

    def train_dataloader(self):
        if self.kind == "batch sampler":
            return DataLoader(Augmented(), batch_sampler=Chunks(self.batch_size))
        return DataLoader(Augmented(), batch_size=self.batch_size, shuffle=self.kind == "shuffled")


def fit_and_stop(addresses, folder, data, step):
    """Train until a step, and return the checkpoint of the step before."""
    saved = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    if addresses:
        fit(addresses, folder, data=data, callbacks=[saved, StopAt(step)])
    else:
        settings = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "max_epochs": 2}
        trainer = Trainer(default_root_dir=folder, callbacks=[saved, StopAt(step)], **settings)
        with pytest.raises(SystemExit):
            trainer.fit(Recorder(), datamodule=data)
    return folder / f"step={step}.ckpt"


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (Ordered("batch sampler"), Ordered("batch sampler", 20), r"batch sampler \(digest .*\), but now .* \(digest"),
        (Ordered("sequential"), Ordered("shuffled"), r"in its order, but now it is read shuffled"),
        (
            Ordered("shuffled"),
            Ordered("batch sampler"),
            r"shuffled, but now it is read in the order of a batch sampler",
        ),
    ],
    ids=["size of a batch sampler", "shuffle", "a batch sampler"],
)
def test_another_order_in_the_middle_of_an_epoch_is_refused(hosts, tmp_path, before, after, message):
    """Samples would repeat and others be missing, without a word; at the end of an epoch, all of it may change."""
    checkpoint = fit_and_stop(hosts[:1], tmp_path, before, NUM_STEPS + 1)
    with pytest.raises(ResumeError, match=message):
        fit(hosts[:1], tmp_path, data=after, ckpt_path=tmp_path / "step=4.ckpt")
    rest = fit(hosts[:1], tmp_path, data=after, ckpt_path=tmp_path / f"step={NUM_STEPS}.ckpt")
    assert sorted(index for _, _, indices, _ in rest for index in indices) == list(range(NUM_SAMPLES))
    assert checkpoint.exists()


def test_the_epoch_of_a_batch_sampler_continues(hosts, tmp_path):
    """Its order is that of the checkpoint, also if an epoch ends early now."""
    data = Ordered("batch sampler")
    whole = fit(hosts[:1], tmp_path / "whole", data=data, max_epochs=1)
    fit_and_stop(hosts[:1], tmp_path, data, 4)
    for limit, stop in ((1.0, NUM_STEPS), (6, 6)):
        rest = fit(
            hosts[1:2],
            tmp_path,
            data=data,
            ckpt_path=tmp_path / "step=4.ckpt",
            max_epochs=1,
            limit_train_batches=limit,
        )
        assert rest == whole[4:stop]


def test_an_epoch_that_began_without_data_hosts_is_refused_unless_it_is_in_order(hosts, tmp_path):
    """The order of a local loader cannot be continued; that of the data can, and so can any at the end of an epoch."""
    shuffled = fit_and_stop([], tmp_path / "shuffled", Ordered("shuffled"), NUM_STEPS).with_name("step=4.ckpt")
    with pytest.raises(ResumeError, match="saved without data hosts, after batch 4 of an epoch"):
        fit(hosts[:1], tmp_path, data=Ordered("shuffled"), ckpt_path=shuffled)
    at_the_end = shuffled.with_name(f"step={NUM_STEPS}.ckpt")
    rest = fit(hosts[:1], tmp_path, data=Ordered("shuffled"), ckpt_path=at_the_end)
    assert sorted(index for _, _, indices, _ in rest for index in indices) == list(range(NUM_SAMPLES))
    in_order = fit_and_stop([], tmp_path / "in order", Ordered("sequential"), 4)
    rest = fit(hosts[:1], tmp_path, data=Ordered("sequential"), ckpt_path=in_order, max_epochs=1)
    assert [index for _, _, indices, _ in rest for index in indices] == list(range(4 * BATCH_SIZE, NUM_SAMPLES))
