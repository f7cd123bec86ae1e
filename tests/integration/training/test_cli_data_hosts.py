"""SageMakerCLI on a data host: it builds the DataModule, and of the rest only what the DataModule's arguments need."""

from functools import partial

import pytest
import torch
from pytorch_lightning import Callback, LightningModule
from pytorch_lightning.loggers import CSVLogger

from lightning_sm import SageMakerCLI
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


class OwnCallback(Counted, Callback):
    """Is configured by the script.

    Args:
        path: Any text, without a default.
    """

    def __init__(self, path: str):
        super().__init__()
        self.path = path


class Tokenizer(Counted):
    """Something that model and data share.

    Args:
        size: Number of tokens.
    """

    def __init__(self, size: int):
        super().__init__()
        self.size = size


class LinkedData(SmallData):
    """Gets its arguments from elsewhere.

    Args:
        hidden: From the model.
        tokenizer: From the script's own group.
        batch_size: From the command line.
    """

    def __init__(self, hidden: int = 0, tokenizer: object = None, batch_size: int = 4):
        super().__init__(batch_size=batch_size)
        self.hidden, self.tokenizer = hidden, tokenizer


class GroupsCLI(SageMakerCLI):
    """Adds groups of every kind."""

    def add_arguments_to_parser(self, parser):
        """Add classes with and without required arguments."""
        parser.add_class_arguments(CSVLogger, "mylogger")
        parser.add_class_arguments(Tokenizer, "tokenizer")
        parser.add_subclass_arguments(OwnCallback, "chosen", required=False)
        parser.add_lightning_class_args(OwnCallback, "own_callback")
        parser.add_optimizer_args(torch.optim.AdamW)
        parser.add_lr_scheduler_args(torch.optim.lr_scheduler.ExponentialLR)
        parser.set_defaults({"own_callback.path": "there", "lr_scheduler.gamma": 0.5, "data.batch_size": 2})
        parser.link_arguments("data.num_classes", "own_callback.path", compute_fn=str, apply_on="instantiate")


class LinksCLI(SageMakerCLI):
    """Gives the DataModule its arguments at both times, and from several groups."""

    def add_arguments_to_parser(self, parser):
        """Add the links."""
        parser.add_class_arguments(Tokenizer, "tokenizer")
        parser.add_class_arguments(OwnCallback, "unused")
        parser.link_arguments("trainer.max_epochs", "tokenizer.size")
        parser.link_arguments("tokenizer", "data.tokenizer", apply_on="instantiate")
        parser.link_arguments("model.hidden", "data.hidden", apply_on=self.apply_on)
        parser.link_arguments("data.batch_size", "unused.path", compute_fn=str, apply_on="instantiate")

    apply_on = "instantiate"


class ParseLinksCLI(LinksCLI):
    """Links the model's argument when arguments are parsed."""

    apply_on = "parse"


def make_model(hidden: int) -> LightningModule:
    """Make the model by a function.

    Args:
        hidden: Any number.
    """
    return NeedyModel(hidden)


@pytest.fixture
def serve(host, monkeypatch):
    """Run a script on a data host, and return the DataModule that it would serve."""
    served = []
    monkeypatch.setattr(cli_module, "serve", lambda datamodule, *_: served.append(datamodule))
    built.clear()

    def run(*arguments, **kwargs):
        host.configure(*DATA_HOST)
        with pytest.raises(SystemExit) as ended:
            host.start(*arguments, **kwargs)
        assert ended.value.code == 0
        return served.pop()

    return partial(run, "fit")


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
            ["--mylogger.save_dir=x", "--tokenizer.size=1", f"--chosen={__name__}.OwnCallback", "--chosen.path=x"],
            {"cli": GroupsCLI},
        ),
        (
            ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=x", "--optimizer=SGD", "--optimizer.lr=0.1"],
            {},
        ),
    ],
    ids=["required", "function", "subclass", "any class", "groups", "optimizer"],
)
def test_only_the_data_module_is_built(serve, arguments, script):
    """Neither the model nor any other group is built, whatever arguments it requires."""
    datamodule = serve(*arguments, **script)
    assert type(datamodule) is SmallData
    assert built == []


def test_defaults_of_the_script_reach_the_data_module(serve):
    """A default that the script sets is the DataModule's argument on a data host as on a trainer."""
    assert serve("--mylogger.save_dir=x", "--tokenizer.size=1", cli=GroupsCLI).batch_size == 2


@pytest.mark.parametrize(("cli", "expected"), [(LinksCLI, ["NeedyModel", "Tokenizer"]), (ParseLinksCLI, ["Tokenizer"])])
def test_links_to_the_data_module(serve, cli, expected):
    """What links name is built with its own arguments, and gives the DataModule's argument; nothing else is built."""
    datamodule = serve(
        "--model.hidden=3", "--trainer.max_epochs=7", "--data.batch_size=5", model=NeedyModel, data=LinkedData, cli=cli
    )
    assert (datamodule.hidden, datamodule.tokenizer.size, datamodule.batch_size) == (3, 7, 5)
    assert sorted(built) == expected
