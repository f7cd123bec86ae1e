"""How the hooks of a DataModule on a data host are called, and what trainers get to know of it."""

import json

from torch.utils.data import DataLoader

from lightning_sm.data.host.datamodule import ServedModule
from lightning_sm.data.protocol.plain_values import plain_value
from tests.fakes.requests import open_request


class Module:
    """A DataModule whose hooks do what a test wants.

    Args:
        hooks: By their names: functions of the Trainer.
    """

    def __init__(self, **hooks):
        self.trainer = None
        self._hooks = hooks

    def prepare_data(self):
        self._run("prepare_data")

    def setup(self, stage):
        self._run("setup")

    def train_dataloader(self):
        return self._run("train_dataloader") or DataLoader(range(8))

    def _run(self, hook):
        return self._hooks.get(hook, lambda _: None)(self.trainer)


class Labelled(Module):
    """Sets and changes attributes in ``setup``."""

    def __init__(self):
        super().__init__()
        self.counts = {}
        self.train_set = None
        self.width = 7
        self.samples = ["x"]

    def setup(self, stage):
        self.counts["neg"] = 3
        self.id2label = {0: "neg", 1: "pos"}
        self.shape = (3, 32)
        self.train_set = DataLoader(range(8))
        self.words = ["word"] * 100_000


def test_plain_values_that_setup_sets_or_changes_are_copied_and_the_others_named():
    """Dicts with any keys, tuples, and what setup() only adds to; what it left alone is neither."""
    reply = ServedModule(Labelled()).open(open_request(""))
    copied = {name: plain_value(value) for name, value in json.loads(json.dumps(reply["attributes"])).items()}
    assert copied == {"counts": {"neg": 3}, "id2label": {0: "neg", 1: "pos"}, "shape": (3, 32)}
    assert reply["missing"] == ["train_set", "words"]


def test_hooks_get_the_stage_by_its_name():
    """As Lightning calls them."""
    stages = []

    class Named(Module):
        def setup(self, *, stage):
            stages.append(stage)

        def teardown(self, *, stage):
            stages.append(stage)

    module = ServedModule(Named())
    assert "error" not in module.open(open_request(""))
    module.leave()
    assert stages == ["fit", "fit"]
