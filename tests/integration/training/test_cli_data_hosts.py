"""SageMakerCLI with data hosts, which build nothing; trainers fetch the batches of whatever the script gives fit."""

import pickle

import pytest
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.loggers import CSVLogger

from lightning_sm import SageMakerCLI, SageMakerTrainer
from lightning_sm.data.trainer.remote_trainer import DataHostLoaders
from lightning_sm.job.topology import Role
from lightning_sm.training import cli as cli_module
from tests.fakes.small_app import SmallData, SmallModel

GROUPS = {"gpu": ["algo-1"], "data": ["algo-2"]}
DATA_HOST = (GROUPS, "algo-2")
SMALL_DATA = f"{SmallData.__module__}.{SmallData.__qualname__}"
built = []


class Counted:
    """Records which classes are instantiated."""

    def __init__(self):
        built.append(type(self).__name__)


class NeedyModel(Counted, SmallModel):
    """Has a required argument, which a data host does not need.

    Args:
        hidden: Any number.
    """

    def __init__(self, hidden: int):
        SmallModel.__init__(self)
        Counted.__init__(self)
        self.hidden = hidden


class OtherModel(NeedyModel):
    """A subclass that the configuration chooses."""


class NeedyData(Counted, SmallData):
    """Has an argument that the script links to the model's.

    Args:
        hidden: From the model.
    """

    def __init__(self, hidden: int):
        SmallData.__init__(self)
        Counted.__init__(self)


class OwnCallback(Counted, Callback):
    """A callback that the script configures.

    Args:
        path: Any text, without a default.
    """

    def __init__(self, path: str):
        super().__init__()
        self.path = path


class GroupsCLI(SageMakerCLI):
    """Adds argument groups of every kind, and a link."""

    def add_arguments_to_parser(self, parser):
        """Add classes with and without required arguments."""
        parser.add_class_arguments(CSVLogger, "mylogger")
        parser.add_subclass_arguments(OwnCallback, "chosen", required=False)
        parser.add_lightning_class_args(OwnCallback, "own_callback")
        parser.add_optimizer_args(torch.optim.AdamW)
        parser.set_defaults({"own_callback.path": "there"})
        parser.link_arguments("model.hidden", "data.hidden", apply_on="instantiate")


def make_model(hidden: int) -> LightningModule:
    """Create the model in a function.

    Args:
        hidden: Any number.
    """
    return NeedyModel(hidden)


@pytest.mark.parametrize(
    ("arguments", "script"),
    [
        (["--model.hidden=3"], {"model": NeedyModel}),
        (["--model.hidden=3"], {"model": make_model}),
        ([f"--model={__name__}.OtherModel", "--model.hidden=3"], {"model": NeedyModel, "subclass_mode_model": True}),
        ([f"--model={__name__}.OtherModel", "--model.hidden=3", f"--data={SMALL_DATA}"], {"model": None, "data": None}),
        (
            ["--model.hidden=3", "--mylogger.save_dir=x", f"--chosen={__name__}.OwnCallback", "--chosen.path=x"],
            {"model": NeedyModel, "data": NeedyData, "cli": GroupsCLI},
        ),
        (["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=x", "--optimizer=SGD", "--optimizer.lr=0.1"], {}),
    ],
    ids=["required", "function", "subclass", "any class", "groups and links", "optimizer"],
)
def test_nothing_is_built(host, monkeypatch, arguments, script):
    """A data host builds no model, DataModule or other class, whatever arguments they require."""
    served = []
    monkeypatch.setattr(cli_module, "serve", lambda job, topology, settings: served.append((topology.role, settings)))
    built.clear()
    host.configure(*DATA_HOST)
    with pytest.raises(SystemExit) as ended:
        host.start("fit", "--data_service.workers=3", *arguments, **script)
    assert ended.value.code == 0
    assert [(role, settings.workers) for role, settings in served] == [(Role.DATA, 3)]
    assert built == []


class OwnTrainer(Trainer):
    """Overrides ``Trainer.fit`` with other parameters."""

    def fit(self, model, batches, **others):
        """Fit."""
        super().fit(model, batches, **others)


def make_trainer(**arguments) -> OwnTrainer:
    """Create the Trainer in a function."""
    return OwnTrainer(**arguments)


class WithLoaders(SmallModel):
    """A model with its own loader."""

    def train_dataloader(self):
        """Return a loader."""
        return SmallData().train_dataloader()


@pytest.mark.parametrize("kind", [Trainer, OwnTrainer, SageMakerTrainer, make_trainer])
def test_what_the_script_hands_over_stays_as_it_is(host, monkeypatch, kind):
    """With ``run=False``, Lightning gets the script's data as it is, and one callback moves loaders to data hosts."""
    cli = host.configure(GROUPS, "algo-1").make("--trainer.logger=false", trainer_class=kind)
    got = []
    monkeypatch.setattr(cli.trainer, "_fit_impl", lambda *arguments: got.append(arguments[1:4]))
    other = SmallData()
    for first, given in (
        (cli.model, {"batches": other.train_dataloader()}),
        (cli.model, {"batches": None, "datamodule": other}),
        (WithLoaders(), {"batches": None}),
        (cli.model, {"batches": None, "datamodule": cli.datamodule}),
    ):
        batches = given.pop("batches")
        cli.trainer.fit(first, batches, **given)
        assert got.pop() == (batches, None, given.get("datamodule"))
        assert sum(isinstance(callback, DataHostLoaders) for callback in cli.trainer.callbacks) == 1


@pytest.mark.parametrize("kind", [Trainer, OwnTrainer])
def test_its_trainer_can_be_pickled(host, kind):
    """As for ``ddp_spawn``, the Trainer can be pickled; the copy keeps its class and the data hosts' addresses."""
    cli = host.configure(GROUPS, "algo-1").make("--trainer.logger=false", trainer_class=kind)
    copied = pickle.loads(pickle.dumps(cli.trainer))  # noqa: S301  # pickled right here
    assert isinstance(copied, kind)
    assert type(copied) is type(cli.trainer)
    assert copied._connection.addresses == cli.trainer._connection.addresses
