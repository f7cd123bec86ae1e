"""How the hooks of a DataModule on a data host are called, and what trainers get to know of it."""

from torch.utils.data import DataLoader

from lightning_sm.data.protocol.calls import OpenRequest, SetUp
from lightning_sm.data.protocol.plain_values import plain_value
from tests.fakes.hook_module import HookModule
from tests.fakes.requests import open_request
from tests.fakes.served_module import served

STAGES = []


class Labelled(HookModule):
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
    reply = served(Labelled()).open(OpenRequest(**open_request("")))
    copied = {name: plain_value(value) for name, value in reply.attributes.items()}
    assert copied == {"counts": {"neg": 3}, "id2label": {0: "neg", 1: "pos"}, "shape": (3, 32)}
    assert reply.missing == ["train_set", "words"]


class Named(HookModule):
    """Notes the stages of its hooks."""

    def setup(self, *, stage):
        STAGES.append(stage)

    def teardown(self, *, stage):
        STAGES.append(stage)


def test_hooks_get_the_stage_by_its_name():
    """As Lightning calls them."""
    STAGES.clear()

    module = served(Named())
    assert isinstance(module.open(OpenRequest(**open_request(""))), SetUp)
    module.leave()
    assert STAGES == ["fit", "fit"]
