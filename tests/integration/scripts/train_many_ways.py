"""Run many kinds of user scripts one after the other. Each rank writes the samples that it trained on to a folder."""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from pytorch_lightning import LightningDataModule
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

from lightning_sm import DataServiceSettings, SageMakerCLI, SageMakerTrainer
from tests.fakes.noting_model import NotingModel

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}


class Sample:
    """A class of the script that datasets and collate functions use."""

    def __init__(self, number):
        self.number = number


class Ids(Dataset):
    """Samples with these ids; with a DataModule, each sample includes the Trainer's current epoch."""

    def __init__(self, ids, datamodule=None):
        self.ids, self.datamodule = list(ids), datamodule

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        if self.datamodule is None:
            return torch.tensor(self.ids[index])
        return torch.tensor([self.ids[index], self.datamodule.trainer.current_epoch])


class Samples(Ids):
    """Samples of a class that is looked up in the script by name."""

    def __getitem__(self, index):
        return globals()["Sample"](self.ids[index])


def numbers(samples):
    """Collate samples of the script's class."""
    if not all(isinstance(sample, Sample) for sample in samples):
        raise TypeError(f"a sample is a {type(samples[0])}, which is not the script's own class")
    return torch.tensor([sample.number for sample in samples])


class Model(NotingModel):
    """Records the batches that it is trained and tested on."""

    def training_step(self, batch, batch_idx):
        self.seen.append(["train", self.current_epoch, batch.tolist()])
        return self.loss()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.seen.append([f"val {dataloader_idx}", self.current_epoch, batch.tolist()])

    def test_step(self, batch, batch_idx):
        self.seen.append(["test", 0, batch.tolist()])

    def predict_step(self, batch, batch_idx):
        return batch.tolist()


def trainer(**settings):
    service = DataServiceSettings(hooks=sys.argv[2] if len(sys.argv) > 2 else "trainers")
    return SageMakerTrainer(
        data_service=service, accelerator="cpu", **QUIET, **{"max_epochs": 1, "enable_checkpointing": False, **settings}
    )


def fit(datamodule=None, model=None, loaders=None, **settings):
    model = model or Model()
    trainer(**settings).fit(model, datamodule=datamodule, **(loaders or {}))
    return model.seen


class Fold(LightningDataModule):
    """One fold of a cross-validation."""

    def __init__(self, fold, batch_size=4):
        super().__init__()
        self.save_hyperparameters()
        self.fold = fold

    def setup(self, stage):
        self.train_ids = Ids(number for number in range(12) if number % 3 != self.fold)

    def train_dataloader(self):
        return DataLoader(self.train_ids, self.hparams.batch_size)


class Other(LightningDataModule):
    """Another data set."""

    def train_dataloader(self):
        return DataLoader(Ids(range(1000, 1006)), 3)


class Level(LightningDataModule):
    """A curriculum whose level the model raises."""

    def setup(self, stage):
        self.level = 1

    def train_dataloader(self):
        return DataLoader(Ids(range(2 * self.level)), 2)


class Curriculum(LightningDataModule):
    """A curriculum in an object that the dataset shares."""

    def __init__(self):
        super().__init__()
        self.limits = [2]

    def setup(self, stage):
        self.limited = self.limits

    def train_dataloader(self):
        return DataLoader(Ids(range(self.limited[0])), 2)


class Raise(Model):
    """Raises the level of the DataModule after each epoch."""

    def on_train_epoch_end(self):
        if hasattr(self.trainer.datamodule, "level"):
            self.trainer.datamodule.level += 1
        else:
            self.trainer.datamodule.limits[0] += 2


class Epochs(LightningDataModule):
    """A DataModule whose dataset and collate function read the epoch."""

    def collate(self, samples):
        return torch.cat([torch.stack(samples).flatten(), torch.tensor([self.trainer.current_epoch])])

    def train_dataloader(self):
        return DataLoader(Ids(range(4), self), 2, collate_fn=self.collate)


class Guarded(LightningDataModule):
    """Sets up once for fit, and uses the same vocabulary for test. The batch size changes in between."""

    ready = False

    def __init__(self):
        super().__init__()
        self.batch_size = 2

    def setup(self, stage):
        if self.ready:
            return
        if stage == "fit":
            self.vocabulary = {number: 10 * number for number in range(6)}
            self.ready = True

    def train_dataloader(self):
        return DataLoader(Ids(self.vocabulary), self.batch_size)

    def test_dataloader(self):
        return DataLoader(Ids(self.vocabulary.values()), self.batch_size)


class OfScript(LightningDataModule):
    """Uses classes and functions of the script, and large arrays and tensors."""

    def __init__(self, shift):
        super().__init__()
        self.memory = np.arange(50_000)
        self.tensor = torch.arange(50_000)
        self.shifted = lambda number: int(number) + shift

    def train_dataloader(self):
        ids = [self.shifted(self.memory[40_000]), int(self.tensor[7]), *map(self.shifted, range(2))]
        return DataLoader(Samples(ids), 2, collate_fn=numbers)


class Weighted(LightningDataModule):
    """Has state with keys and containers that JSON does not support."""

    def __init__(self):
        super().__init__()
        self.weights, self.shape = {0: 1.0, 1: 2.0}, (1, 2)

    def state_dict(self):
        return {"weights": self.weights, "shape": self.shape}

    def load_state_dict(self, state_dict):
        self.weights, self.shape = (
            {number: 2 * weight for number, weight in state_dict["weights"].items()},
            (*state_dict["shape"], 3),
        )

    def train_dataloader(self):
        return DataLoader(Ids(range(int(self.weights[1]) + len(self.shape))), 2)


class OwnLoaders(Model):
    """A model with loader hooks."""

    def setup(self, stage):
        self.ids = Ids(range(5))

    def train_dataloader(self):
        return DataLoader(self.ids, 2)

    def val_dataloader(self):
        return [DataLoader(Ids(range(10, 13)), 2), DataLoader(Ids(range(20, 22)), 2)]

    def test_dataloader(self):
        return DataLoader(Ids(range(30, 33)), 2)


class ReadsData(OwnLoaders):
    """Reads the Trainer's DataModule."""

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        super().validation_step(batch, batch_idx, dataloader_idx)
        data = self.trainer.datamodule
        data.fold += 1
        # Text, unlike a list of samples, because the number of steps depends on the number of ranks.
        self.seen.append(f"{data.fold} {data.hparams.batch_size} {type(data).__qualname__}")


class EpochsOfModel(Model):
    """Creates loaders whose dataset and collate function read the model's epoch."""

    def collate(self, samples):
        return torch.cat([torch.stack(samples).flatten(), torch.tensor([self.current_epoch])])

    def train_dataloader(self):
        return DataLoader(Ids(range(4), self), 2, collate_fn=self.collate)


def new_datamodules():
    return [fit(Fold(fold, batch_size=3 + fold)) for fold in range(3)]


def one_datamodule():
    datamodule, seen = Fold(0), []
    own = trainer()
    for fold in range(3):
        datamodule.fold = fold
        datamodule.hparams.batch_size = 2 + fold
        own.fit_loop.epoch_progress.reset()
        model = Model()
        own.fit(model, datamodule=datamodule)
        seen.append(model.seen)
    return seen


def two_classes():
    first, second = Fold(1), Other()
    return [fit(first), fit(second), fit(first)]


def levels():
    return [fit(data(), Raise(), max_epochs=3, reload_dataloaders_every_n_epochs=1) for data in (Level, Curriculum)]


def guarded():
    datamodule, model = Guarded(), Model()
    own = trainer()
    own.fit(model, datamodule=datamodule)
    datamodule.batch_size = 3
    own.test(model, datamodule=datamodule, verbose=False)
    trainer().fit(model, datamodule=datamodule)
    return model.seen


def from_datasets():
    data = LightningDataModule.from_datasets(
        TensorDataset(torch.arange(6)), TensorDataset(torch.arange(4)), batch_size=3
    )

    class First(Model):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch[0], batch_idx)

        def validation_step(self, batch, batch_idx):
            return super().validation_step(batch[0], batch_idx)

    model = First()
    trainer(overfit_batches=0).fit(model, datamodule=data)
    return [[what, epoch, sorted(batch) if what == "val 0" else len(batch)] for what, epoch, batch in model.seen]


def bare_loaders():
    model, own = Model(), trainer()
    train, rest = random_split(Ids(range(10)), [6, 4], torch.Generator().manual_seed(1))
    own.fit(model, DataLoader(train, 4), [DataLoader(rest, 2), DataLoader(Ids(range(50, 53)), 2)])
    own.test(model, DataLoader(Ids(range(60, 63)), 2), verbose=False)
    return model.seen, own.predict(model, DataLoader(Ids(range(70, 73)), 2))


def own_loaders():
    model, own = OwnLoaders(), trainer()
    own.fit(model)
    own.test(model, verbose=False)
    return model.seen


def epochs_of_model():
    model = EpochsOfModel()
    trainer(max_epochs=3).fit(model)
    return model.seen


def both():
    """Loaders passed to ``fit`` take precedence over the model's loaders, but only for their stage."""
    model, own = OwnLoaders(), trainer()
    own.fit(model, DataLoader(Ids(range(100, 104)), 2))
    own.fit_loop.epoch_progress.reset()
    own.fit(model, val_dataloaders=DataLoader(Ids(range(200, 204)), 2))
    own.validate(model, verbose=False)
    own.test(model, verbose=False)
    return model.seen


def switched_off():
    """A model and a DataModule switch off a loader hook by setting it to None."""
    model, data = OwnLoaders(), Guarded()
    model.val_dataloader = data.test_dataloader = None
    trainer().fit(model)
    trainer().fit(model, datamodule=data)
    return model.seen


def after_a_datamodule():
    """A DataModule stays attached when loaders are passed later, with its attributes and its state in checkpoints."""
    model, own, data = ReadsData(), trainer(), Weighted()
    data.fold, data.hparams["batch_size"] = 3, 4
    own.fit(model, datamodule=data)
    own.validate(model, DataLoader(Ids(range(40, 44)), 2), verbose=False)
    own.validate(model, verbose=False)
    own.fit_loop.epoch_progress.reset()
    own.fit(model, DataLoader(Ids(range(50, 54)), 2), DataLoader(Ids(range(60, 62)), 2))
    path = Path(sys.argv[1]) / "attached.ckpt"
    own.save_checkpoint(path)
    saved = torch.load(path, weights_only=False)["Weighted"]
    return model.seen, str(data.fold), str(saved)


def by_the_cli():
    """A script that creates model and Trainer with the CLI, then calls the Trainer with other data."""
    quiet = {**QUIET, "accelerator": "cpu", "max_epochs": 1, "enable_checkpointing": False}
    cli = SageMakerCLI(OwnLoaders, Other, run=False, args=[], trainer_defaults=quiet, save_config_callback=None)
    cli.trainer.fit(cli.model, DataLoader(Ids(range(100, 104)), 2))
    cli.trainer.test(cli.model, verbose=False)
    cli.trainer.fit_loop.epoch_progress.reset()
    cli.trainer.fit(cli.model, datamodule=Fold(1))
    cli.trainer.fit_loop.epoch_progress.reset()
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    return cli.model.seen


def resumed():
    folder = Path(sys.argv[1])
    own = trainer(max_epochs=1)
    own.fit(Model(), datamodule=Weighted())
    own.save_checkpoint(folder / "last.ckpt")
    model = Model()
    trainer(max_epochs=2).fit(model, datamodule=Weighted(), ckpt_path=folder / "last.ckpt")
    return model.seen


WAYS = {
    "new DataModules": new_datamodules,
    "attributes between fits": one_datamodule,
    "two classes": two_classes,
    "levels": levels,
    "epochs": lambda: fit(Epochs(), max_epochs=2),
    "guarded setup": guarded,
    "classes of the script": lambda: fit(OfScript(100)),
    "from_datasets": from_datasets,
    "bare loaders": bare_loaders,
    "own loaders": own_loaders,
    "epochs of the model": epochs_of_model,
    "both": both,
    "switched off": switched_off,
    "resumed": resumed,
    "by the CLI": by_the_cli,
    "after a DataModule": after_a_datamodule,
}

if __name__ == "__main__":
    seen = {name: way() for name, way in WAYS.items()}
    Path(f"{sys.argv[1]}/seen-{trainer().global_rank}.json").write_text(json.dumps(seen))
