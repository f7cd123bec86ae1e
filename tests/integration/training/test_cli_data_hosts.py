"""SageMakerCLI on a data host: it builds nothing, because it serves the DataModule of rank 0."""

import pytest
import torch
from pytorch_lightning import Callback, LightningModule
from pytorch_lightning.loggers import CSVLogger

from lightning_sm import SageMakerCLI
from lightning_sm.job.topology import Role
from lightning_sm.training import cli as cli_module
from tests.fakes.small_app import SmallData, SmallModel

DATA_HOST = ({"gpu": ["algo-1"], "data": ["algo-2"]}, "algo-2")
SMALL_DATA = f"{SmallData.__module__}.{SmallData.__qualname__}"
built = []


class Counted:
    """Notes what is built."""

    def __init__(self):
        built.append(type(self).__name__)


class NeedyModel(Counted, SmallModel):
    """Has an argument without a default, which a data host has no use for.

    Args:
        hidden: Any number.
    """

    def __init__(self, hidden: int):
        SmallModel.__init__(self)
        Counted.__init__(self)
        self.hidden = hidden


class OtherModel(NeedyModel):
    """To be chosen."""


class NeedyData(Counted, SmallData):
    """Has an argument that the script links to the model's.

    Args:
        hidden: From the model.
    """

    def __init__(self, hidden: int):
        SmallData.__init__(self)
        Counted.__init__(self)


class OwnCallback(Counted, Callback):
    """Is configured by the script.

    Args:
        path: Any text, without a default.
    """

    def __init__(self, path: str):
        super().__init__()
        self.path = path


class GroupsCLI(SageMakerCLI):
    """Adds groups of every kind, and links."""

    def add_arguments_to_parser(self, parser):
        """Add classes with and without required arguments."""
        parser.add_class_arguments(CSVLogger, "mylogger")
        parser.add_subclass_arguments(OwnCallback, "chosen", required=False)
        parser.add_lightning_class_args(OwnCallback, "own_callback")
        parser.add_optimizer_args(torch.optim.AdamW)
        parser.set_defaults({"own_callback.path": "there"})
        parser.link_arguments("model.hidden", "data.hidden", apply_on="instantiate")


def make_model(hidden: int) -> LightningModule:
    """Make the model by a function.

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
        (
            [f"--model={__name__}.OtherModel", "--model.hidden=3", f"--data={SMALL_DATA}"],
            {"model": None, "data": None},
        ),
        (
            ["--model.hidden=3", "--mylogger.save_dir=x", f"--chosen={__name__}.OwnCallback", "--chosen.path=x"],
            {"model": NeedyModel, "data": NeedyData, "cli": GroupsCLI},
        ),
        (
            ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=x", "--optimizer=SGD", "--optimizer.lr=0.1"],
            {},
        ),
    ],
    ids=["required", "function", "subclass", "any class", "groups and links", "optimizer"],
)
def test_nothing_is_built(host, monkeypatch, arguments, script):
    """Neither the model nor the DataModule nor any other group, whatever arguments it requires."""
    served = []
    monkeypatch.setattr(cli_module, "serve", lambda job, topology, settings: served.append((topology.role, settings)))
    built.clear()
    host.configure(*DATA_HOST)
    with pytest.raises(SystemExit) as ended:
        host.start("fit", "--data_service.workers=3", *arguments, **script)
    assert ended.value.code == 0
    assert [(role, settings.workers) for role, settings in served] == [(Role.DATA, 3)]
    assert built == []
