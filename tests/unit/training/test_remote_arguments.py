"""Which loaders a Trainer fetches from data hosts, by the arguments of its methods."""

import pickle

import pytest
import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.demos.boring_classes import BoringDataModule, BoringModel
from pytorch_lightning.utilities.model_helpers import is_overridden

from lightning_sm.data.settings import DataServiceSettings
from lightning_sm.data.trainer.connection import ServiceConnection
from lightning_sm.data.trainer.datamodule import RemoteDataModule
from lightning_sm.training.fetching_trainer import remote_arguments

STAGES = ("train", "val", "test", "predict")


@pytest.fixture
def trainer():
    """A Trainer that has not run."""
    return Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)


def fetched(trainer, method, remote=None, **given):
    """The stages of which the Trainer fetches the loaders from the data hosts; None: it reads what it was given."""
    connection = ServiceConnection(["algo-2:1"], DataServiceSettings(), "job")
    arguments = remote_arguments(trainer, method, given, connection, {} if remote is None else remote)
    if arguments is given:
        return None
    assert set(arguments) == {*given, "datamodule"} - {"train_dataloaders", "val_dataloaders", "dataloaders"}
    assert isinstance(arguments["datamodule"], RemoteDataModule)
    return [stage for stage in STAGES if is_overridden(f"{stage}_dataloader", arguments["datamodule"])]


def test_hooks_of_the_model_make_the_loaders_that_were_not_handed_over(trainer):
    """As in Lightning: a model that is given training data still validates on its own."""
    assert fetched(trainer, "fit", model=BoringModel(), train_dataloaders=[1]) == list(STAGES)
    assert fetched(trainer, "fit", model=BoringModel(), val_dataloaders=[1]) == list(STAGES)
    assert fetched(trainer, "fit", model=LightningModule(), train_dataloaders=[1]) == ["train"]


def test_a_compiled_model_has_the_hooks_of_the_original(trainer):
    """As in Lightning, which unwraps it."""
    assert fetched(trainer, "fit", model=torch.compile(BoringModel())) == list(STAGES)


@pytest.mark.parametrize("module", [BoringModel, BoringDataModule])
def test_a_hook_that_is_none_is_no_hook(trainer, module):
    """As in Lightning: ``model.val_dataloader = None`` turns the validation off."""
    own = module()
    own.val_dataloader = None
    given = {"model": own} if module is BoringModel else {"model": BoringModel(), "datamodule": own}
    assert fetched(trainer, "fit", **given) == ["train", "test", "predict"]


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
def test_after_fit_the_hooks_of_the_model_count(trainer, method):
    """Lightning reads them again; the DataModule of ``fit`` has no loaders for later calls that do not name it."""
    trainer.datamodule = RemoteDataModule(BoringDataModule(), ["algo-2:1"])
    assert fetched(trainer, method, model=BoringModel()) == list(STAGES)
    assert fetched(trainer, method, model=LightningModule()) is None


class Stated(BoringDataModule):
    """Has hyperparameters, an attribute and a state of its own."""

    def __init__(self, width=3):
        super().__init__()
        self.save_hyperparameters()
        self.vocabulary = ["a"]

    def state_dict(self):
        """Return the attribute."""
        return {"vocabulary": self.vocabulary}


def test_a_datamodule_stays_attached_in_calls_with_loaders(trainer):
    """As in Lightning: ``trainer.datamodule`` is what ``fit`` got, for the model and for checkpoints."""
    data = Stated()
    trainer.datamodule = RemoteDataModule(data, ["algo-2:1"])
    connection = ServiceConnection(["algo-2:1"], DataServiceSettings(), "job")
    for _ in range(2):  # the second call follows one with loaders
        given = {"model": BoringModel(), "dataloaders": [1]}
        trainer.datamodule = remote_arguments(trainer, "validate", given, connection, {})["datamodule"]
        assert trainer.datamodule.vocabulary is data.vocabulary
        assert trainer.datamodule.hparams == {"width": 3}
        assert trainer.datamodule.state_dict() == {"vocabulary": data.vocabulary}
        assert type(trainer.datamodule).__qualname__ == "Stated"
        trainer.datamodule.vocabulary = [*data.vocabulary, "b"]
    assert data.vocabulary == ["a", "b", "b"]
    with pytest.raises(AttributeError, match="Stated has no attribute 'labels' on a trainer"):
        _ = trainer.datamodule.labels
    copied = pickle.loads(pickle.dumps(trainer.datamodule))  # noqa: S301  # pickled right here
    assert (copied.vocabulary, type(copied).__qualname__) == (data.vocabulary, "Stated")


@pytest.mark.parametrize("given", [{}, {"model": None}])
def test_a_call_without_a_model_takes_that_of_the_last_call(trainer, given):
    """``trainer.test()`` and ``trainer.test(None)`` are the same."""
    trainer.strategy._lightning_module = BoringModel()
    assert fetched(trainer, "test", **given) == list(STAGES)


def test_what_lightning_decides_is_left_to_it(trainer):
    """No loaders at all, and loaders beside a DataModule, are its errors."""
    assert fetched(trainer, "fit", model=LightningModule()) is None
    assert fetched(trainer, "fit", model=BoringModel(), train_dataloaders=[1], datamodule=BoringDataModule()) is None
    remote = RemoteDataModule(BoringDataModule(), ["algo-2:1"])
    assert fetched(trainer, "fit", model=BoringModel(), datamodule=remote) is None


def test_calls_with_the_same_datamodule_or_model_fetch_with_the_same_object(trainer):
    """Hosts keep what they have then."""
    remote, model, data = {}, BoringModel(), BoringDataModule()
    for method in ("fit", "test"):
        fetched(trainer, method, remote, model=model)
        fetched(trainer, method, remote, model=model, datamodule=data)
    assert len(remote) == 2
