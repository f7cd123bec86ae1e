"""A DataModule between rank 0 and a data host: what travels, what comes back, and what a later run sees."""

import pytest
from msgspec.structs import replace
from pytorch_lightning import LightningDataModule
from torch.utils.data import DataLoader

from lightning_sm.data.host.datamodule import ServedModule
from lightning_sm.data.protocol.calls import Loaders, OpenRequest, SetUp
from lightning_sm.data.trainer.travel import TravellingModule
from tests.fakes.requests import open_request

CALLS = []


class Data(LightningDataModule):
    """Notes its hooks, and sets attributes in ``setup``."""

    def __init__(self, length=4):
        super().__init__()
        self.length = length
        self.names = ["a"]
        self.train_set = None

    def prepare_data(self):
        CALLS.append("prepare_data")

    def setup(self, stage):
        CALLS.append(f"setup {stage}")
        self.level = 1
        self.num_classes = {0: 10}
        self.train_set = list(range(self.length))

    def teardown(self, stage):
        CALLS.append(f"teardown {stage}")

    def load_state_dict(self, state_dict):
        CALLS.append(f"load {state_dict}")

    def train_dataloader(self):
        CALLS.append(f"{self.length} {self.level} {self.names} {len(self.train_set)}")
        return DataLoader(self.train_set)


class Custom(Data):
    """Pickles itself in its own way."""

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "train_set"}

    def __setstate__(self, state):
        vars(self).update(state, train_set=None)


class Pair:
    """Rank 0 and a data host, without a network."""

    def __init__(self, datamodule):
        self.datamodule = datamodule
        self.module = TravellingModule.of(datamodule)
        self.host = ServedModule()
        self.sent = []
        self.run = 0

    def request(self, loaders, stage="fit"):
        """Send what a request needs, and return the request."""
        pickled = self.module.pickled(by_name=False)
        for one in [pickled] if pickled.digest not in self.host.snapshots else []:
            self.sent.append(one.digest)
            self.host.keep(one.digest, one.write(), [one.digest])
        own = {**open_request(loaders), "trainer_run": self.run, "stage": stage, "datamodule": pickled.digest}
        own |= {"values": self.module.values(), "kept": self.module.kept(), "earlier": list(self.module.earlier)}
        return OpenRequest(**{**own, "opening": f"{self.run}/{stage}/{loaders}/{len(CALLS)}"})

    def set_up(self, stage="fit"):
        """Begin a run of the Trainer."""
        self.run += 1
        self.module.begin_run(stage)
        reply = self.host.open(self.request("", stage))
        assert isinstance(reply, SetUp), reply
        self.module.take(reply)

    def open(self, stage="fit"):
        """Open the loaders for training; return what the hook noted."""
        reply = self.host.open(self.request("train", stage))
        assert isinstance(reply, Loaders), reply
        return CALLS[-1]


@pytest.fixture(autouse=True)
def calls():
    """Begin without calls."""
    CALLS.clear()
    return CALLS


@pytest.mark.parametrize("cls", [Data, Custom])
def test_nothing_is_sent_twice(cls):
    """What setup() has set on the data host comes back as plain values, and makes no other DataModule of it."""
    pair = Pair(cls())
    pair.set_up()
    assert (pair.datamodule.level, pair.datamodule.num_classes) == (1, {0: 10})
    if cls is Data:
        assert pair.open() == "4 1 ['a'] 4"
        pair.set_up()
        assert pair.open() == "4 1 ['a'] 4"
        assert len(pair.sent) == 1
        assert CALLS.count("prepare_data") == 1
    else:
        pair.open()
    assert [call for call in CALLS if call.startswith("teardown")] == ["teardown fit"] * (cls is Data)


def test_a_value_that_is_set_between_setup_and_loaders_is_there_without_another_setup():
    """As locally: setup() has run, and its own objects stay."""
    pair = Pair(Data())
    pair.set_up()
    pair.datamodule.level = 7
    pair.datamodule.length = 9
    assert pair.open() == "9 7 ['a'] 4"
    assert CALLS.count("setup fit") == 1


def test_an_object_that_is_changed_makes_the_data_host_begin_anew():
    """Other objects of setup() may refer to it; what was set since setup() stays so, although setup() runs again."""
    pair = Pair(Data())
    pair.set_up()
    pair.datamodule.level = 7
    pair.datamodule.names.append("b")
    assert pair.open() == "4 7 ['a', 'b'] 4"
    assert len(pair.sent) == 2


def test_the_next_run_begins_with_what_the_user_has_set():
    """A level that the model has raised is set by setup() again, as locally; an argument that was changed stays."""
    pair = Pair(Data())
    pair.set_up()
    pair.datamodule.level = 7
    pair.datamodule.length = 5
    pair.set_up()
    assert pair.open() == "5 1 ['a'] 5"


def test_a_deleted_attribute_is_gone():
    """Then the hook fails as it would locally."""
    pair = Pair(Data())
    pair.set_up()
    del pair.datamodule.length
    reply = pair.host.open(pair.request("train"))
    assert "no attribute 'length'" in reply.text


def test_a_data_host_that_starts_again_runs_the_setups_of_earlier_stages():
    """A test may use what setup("fit") has made."""
    pair = Pair(Data())
    pair.set_up("fit")
    pair.set_up("test")
    pair.host = ServedModule()
    CALLS.clear()
    pair.open("test")
    assert CALLS[:4] == ["prepare_data", "setup fit", "teardown fit", "setup test"]


def test_a_state_is_loaded_once_after_setup():
    """Before the loaders are made, and again only if setup() has run again."""
    pair = Pair(Data())
    pair.set_up()
    request = pair.request("train")
    pair.host._snapshots["s"] = pair.host._snapshots[request.datamodule]
    pair.host._load = lambda digest: {"stage": digest}
    for epoch in range(2):
        pair.host.open(replace(request, state="s", opening=f"1/fit/train/{epoch}"))
    assert [call for call in CALLS if call.startswith("load")] == ["load {'stage': 's'}"]


def test_a_datamodule_is_known_to_all_its_trainers():
    """What one Trainer has copied into it does not travel with the next one."""
    datamodule = Data()
    first = Pair(datamodule)
    first.set_up()
    second = Pair(datamodule)
    second.run = 1
    second.set_up()
    assert first.sent == second.sent
    assert second.module is first.module
