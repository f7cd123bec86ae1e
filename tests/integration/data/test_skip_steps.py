"""A run that leaves out steps trains on the batches of all others, exactly as a run that leaves out none."""

import pytest
import torch
from pytorch_lightning.callbacks import LearningRateFinder, ModelCheckpoint
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, get_worker_info

from lightning_sm import DataServiceSettings, RemoteDataModule
from lightning_sm.errors import DataSettingsError
from tests.integration.data.test_resume import (
    BATCH_SIZE,
    NUM_SAMPLES,
    NUM_STEPS,
    Augmented,
    Data,
    Recorder,
    fit,
    serving,
)

pytestmark = pytest.mark.processes


class Scheduled(Recorder):
    """Also keeps what the steps count: loggers' steps, learning rates, and the steps at which it validates."""

    def __init__(self):
        super().__init__()
        self.rates, self.validated = {}, []

    def training_step(self, batch, batch_index):
        if "long" in batch:
            batch = {name: torch.cat([batch["long"][name], batch["short"][name]]) for name in ("x", "index")}
        (rate,) = [group["lr"] for group in self.optimizers().param_groups]
        self.rates[self.current_epoch, batch_index] = self.trainer.global_step, rate
        return super().training_step(batch, batch_index)

    def on_validation_start(self):
        if not self.trainer.sanity_checking:
            self.validated.append(self.trainer.global_step)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-6)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9), "interval": "step"}]


def run(addresses, folder, skip_steps=None, *, data=None, **trainer):
    """Train two epochs; the model."""
    model = Scheduled()
    settings = DataServiceSettings(skip_steps=skip_steps, batches_per_epoch=NUM_STEPS)
    data = RemoteDataModule(data or Data(), addresses, settings=settings)
    fit(addresses, folder, model=model, remote=data, **trainer)
    return model


CASES = {
    "within an epoch": (["3-6"], {}),
    "from the first step on": ([0, 1], {}),
    "over the end of an epoch": (["9-12"], {}),
    "all of an epoch": (["0-10"], {}),
    "to the end": (["20-1000"], {}),
    "several ranges, validating within them": (["2-4", 6, "15-17"], {"val_check_interval": 4}),
    "accumulated": (["1-2", "4-6"], {"accumulate_grad_batches": 2}),
    "limited": (["3-4"], {"limit_train_batches": 5}),
    "up to the last step": (["12-30"], {"max_epochs": -1, "max_steps": 17}),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Runs that leave out nothing, each made when it is first asked for."""
    runs = {}

    def get(addresses, **changed):
        key = repr((addresses, changed))
        if key not in runs:
            runs[key] = run(addresses, tmp_path_factory.mktemp("whole"), **changed)
        return runs[key]

    return get


def remaining(model, skip_steps):
    """What a model has seen in other steps."""
    skipped = DataServiceSettings(skip_steps=skip_steps).skipped_steps
    left = [one for one in model.seen if not any(model.rates[one[:2]][0] in steps for steps in skipped)]
    assert 0 < len(left) < len(model.seen)
    return left


@pytest.mark.matrix(rows=["over the end of an epoch", "several ranges, validating within them", "accumulated"])
@pytest.mark.parametrize("name", CASES)
def test_everything_but_the_batches_is_that_of_a_whole_run(pool, whole, tmp_path, name):
    """Batches, random numbers, counts, learning rates and validations of the steps that remain are the same."""
    skip_steps, trainer = CASES[name]
    addresses = serving(pool, Data())
    complete = whole(addresses, **trainer)
    rest = run(addresses, tmp_path, skip_steps, **trainer)
    left = remaining(complete, skip_steps)
    assert rest.seen == left
    assert rest.rates == {one[:2]: complete.rates[one[:2]] for one in left}
    assert rest.validated == complete.validated


class Streamed(Augmented, IterableDataset):
    """The same numbers as a stream."""

    def __iter__(self):
        worker = get_worker_info()
        return (self[index] for index in range(worker.id, self.size, worker.num_workers))


class OfKind(Data):
    """Training data whose order something else than the data service makes, or several loaders."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def train_dataloader(self):
        if self.kind == "sampler":
            return DataLoader(Augmented(), batch_size=BATCH_SIZE, sampler=list(range(0, 2 * NUM_SAMPLES, 2)))
        if self.kind == "batch sampler":
            data = Augmented()
            return DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), BATCH_SIZE, drop_last=False))
        if self.kind == "stream":
            return DataLoader(Streamed(), batch_size=BATCH_SIZE)
        long, short = super().train_dataloader(), DataLoader(Augmented(37), batch_size=BATCH_SIZE, shuffle=True)
        return {"long": long, "short": short}


@pytest.mark.matrix(rows=["stream"])
@pytest.mark.parametrize("kind", ["batch sampler", "stream", "two loaders, one of which cycles"])
def test_every_kind_of_order(pool, tmp_path, kind):
    """Positions in the order of a sampler, in shards that begin again, and in a loader that cycles move likewise."""
    data = OfKind(kind)
    addresses = serving(pool, data)[:2]
    complete = run(addresses, tmp_path, data=data)
    rest = run(addresses, tmp_path, ["3-6", 9, "14-18"], data=data)
    assert rest.seen == remaining(complete, ["3-6", 9, "14-18"])


@pytest.mark.matrix(rows=["within", "after the validation before"])
@pytest.mark.parametrize(
    ("step", "every"),
    [
        (2, {"every_n_train_steps": 1}),
        (5, {"every_n_train_steps": 1}),
        (9, {"every_n_train_steps": 1}),
        (3, {"every_n_epochs": 1}),
        (6, {"every_n_epochs": 1}),
    ],
    ids=["before", "within", "behind", "after the validation before", "after a validation within"],
)
def test_a_resumed_run(pool, tmp_path, step, every):
    """From a checkpoint before, in or behind the range, a run leaves out what is left of it, and validates alike."""
    addresses = serving(pool, Data())
    saved = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, **every)
    whole = run(addresses, tmp_path, callbacks=[saved], val_check_interval=3)
    rest = run(addresses, tmp_path, ["3-6"], ckpt_path=tmp_path / f"step={step}.ckpt", val_check_interval=3)
    left = [one for one in remaining(whole, ["3-6"]) if one[0] or one[1] >= step]
    assert rest.seen == left
    assert rest.rates == {one[:2]: whole.rates[one[:2]] for one in left}
    assert rest.validated == [at for at in whole.validated if at > step]


def test_a_stream_without_a_length_is_refused(pool, tmp_path):
    """Nobody knows then which step is the first of the next epoch."""
    data = OfKind("stream")
    addresses = serving(pool, data)[:1]
    remote = RemoteDataModule(data, addresses, settings=DataServiceSettings(skip_steps=["3-4"]))
    with pytest.raises(
        DataSettingsError, match=r"train_dataloader\(\) has no length. Set data_service.batches_per_epoch"
    ):
        fit(addresses, tmp_path, remote=remote)


class Fetching(Recorder):
    """Fetches its batches itself."""

    def training_step(self, dataloader_iter):
        next(dataloader_iter)


def test_a_step_that_fetches_by_itself_is_refused(pool, tmp_path):
    """Nobody but its code knows which batches are those of a step."""
    addresses = serving(pool, Data())[:1]
    remote = RemoteDataModule(Data(), addresses, settings=DataServiceSettings(skip_steps=["3-4"]))
    with pytest.raises(DataSettingsError, match="this training_step fetches as many as it wants"):
        fit(addresses, tmp_path, model=Fetching(), remote=remote)


def test_a_search_leaves_out_nothing(pool, tmp_path):
    """``LearningRateFinder`` trains on the batches of its own steps, and the fit behind it leaves out its steps."""
    addresses = serving(pool, Data())
    finder = LearningRateFinder(num_training_steps=8, early_stop_threshold=None, attr_name="rate")
    model = Tunable()
    settings = DataServiceSettings(skip_steps=["3-6"])
    remote = RemoteDataModule(Data(), addresses, settings=settings)
    fit(addresses, tmp_path, model=model, remote=remote, callbacks=[finder], max_epochs=1)
    numbers = [number for _, number, *_ in model.seen]
    assert numbers == [*range(8), *(number for number in range(NUM_STEPS) if not 3 <= number <= 6)]


class Tunable(Recorder):
    """Has a learning rate to search for."""

    rate = 1e-6

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.rate)
