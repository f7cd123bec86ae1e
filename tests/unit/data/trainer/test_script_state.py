"""What a script changes beside its DataModule: data hosts do not see it, so that it is an error."""

import argparse
import types

import numpy as np
import pytest
from pytorch_lightning import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from lightning_sm.data.trainer.bare_loaders import bare_loaders
from lightning_sm.data.trainer.script_state import ScriptState
from lightning_sm.errors import DataSettingsError
from tests import quick_processes

FOLD, INDICES, CONFIG, UNUSED, LAZY = 0, np.arange(3), {"fold": 0}, 0, None
ARGS = argparse.Namespace(fold=0, lr=0.1)


def lazily():
    """Make a value when it is first needed, as libraries load their tables."""
    global LAZY  # noqa: PLW0603  # what this test is about
    LAZY = LAZY or 7
    return LAZY


class Numbers(Dataset):
    """Reads what the script has, when it is made and when it is read."""

    size = 3

    def __init__(self):
        self.fold = FOLD

    def __getitem__(self, index):
        return INDICES[index] + ARGS.fold

    def __len__(self):
        return self.size


class Data(LightningDataModule):
    """Reads what the script has in hooks, helpers and the classes of its datasets."""

    limit = 3

    def __init__(self):
        super().__init__()
        self.unused = UNUSED

    def setup(self, stage):
        self.numbers = [Numbers(), CONFIG["fold"], lazily(), str(quick_processes.FOLDER)]

    def train_dataloader(self):
        return DataLoader(self.numbers[0])


CHANGES = {
    "a global of a class that setup() uses": (Numbers.__init__.__globals__, "FOLD", 1),
    "an array": (Numbers.__getitem__.__globals__, "INDICES", np.arange(3)),
    "an argument of the script": (vars(ARGS), "fold", 2),
    "a global dict": (Data.setup.__globals__, "CONFIG", {"fold": 1}),
    "a global of another module": (vars(quick_processes), "FOLDER", "elsewhere"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_value_that_the_code_reads_and_the_script_replaces_is_an_error(change, monkeypatch):
    """Each fold would train on the data of the first one; the error names the value, then and now."""
    holder, name, value = CHANGES[change]
    state = ScriptState()
    state.check(Data())
    monkeypatch.setitem(holder, name, value)
    with pytest.raises(
        DataSettingsError, match=rf"(?s)\.{name}, which the code of Data reads, was .* now\..*attribute"
    ):
        state.check(Data())
    monkeypatch.undo()
    state.check(Data())


@pytest.mark.parametrize(("cls", "name"), [(Data, "limit"), (Numbers, "size"), (Data, "added")])
def test_an_attribute_of_a_class_that_the_script_sets_is_an_error(cls, name, monkeypatch):
    """Data hosts have the class as it was."""
    state = ScriptState()
    monkeypatch.setattr(cls, name, 5, raising=False)
    with pytest.raises(DataSettingsError, match=rf"{cls.__name__}\.{name}, .* is 5 now"):
        state.check(Data())


def test_what_travels_or_is_not_read_may_change(monkeypatch):
    """What only ``__init__`` reads, other arguments, equal values, and what the code itself sets."""
    state = ScriptState()
    for holder, name, value in (
        (globals(), "UNUSED", 1),
        (vars(ARGS), "lr", 0.2),
        (globals(), "CONFIG", {"fold": 0}),
        (globals(), "LAZY", 7),
    ):
        monkeypatch.setitem(holder, name, value)
    state.check(Data())


def test_a_dataset_that_the_script_has_made_needs_no_globals_for_that(monkeypatch):
    """As loaders without a DataModule have it: it travels with what it has read."""
    state = ScriptState()
    monkeypatch.setitem(globals(), "FOLD", 1)
    own = bare_loaders(None, {"train": DataLoader(Numbers())})
    assert own is not None
    state.check(own)
    monkeypatch.setitem(vars(ARGS), "fold", 1)
    with pytest.raises(DataSettingsError, match=r"ARGS\.fold"):
        state.check(own)


def test_a_container_that_gets_other_items_is_warned_of_once(monkeypatch, caplog):
    """It may be a cache, which data hosts fill, too."""
    state = ScriptState()
    monkeypatch.setitem(CONFIG, "fold", 1)
    for _ in range(2):
        state.check(Data())
    assert caplog.text.count("CONFIG, which the code of Data reads, was {'fold': 0} when") == 1


def test_a_class_that_is_new_travels_by_value():
    """What it has is what data hosts get."""
    state = ScriptState()
    state.check(types.new_class("New", (Data,), {}, lambda body: body.update(level=3))())
