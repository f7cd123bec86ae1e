"""The warnings about Lightning's own code."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_sm._lightning import CombinedLoader
from lightning_sm.training.known_warnings import hide_known_warnings

_TEXT = "`isinstance(treespec, LeafSpec)` is deprecated, use something else."


def _warn(text=_TEXT, category=FutureWarning, module="pytorch_lightning.utilities._pytree"):
    """The warnings that are shown of one."""
    with warnings.catch_warnings(record=True) as shown:
        warnings.warn_explicit(text, category, "x.py", 21, module)
    return shown


@pytest.fixture(autouse=True)
def _all_shown():
    """As with python -W always."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        yield


def test_a_set_of_loaders_makes_no_warning():
    """Lightning flattens each with torch's LeafSpec; with what is installed here, torch warns of it."""
    with warnings.catch_warnings(record=True) as before:
        CombinedLoader(DataLoader(torch.ones(1)))
    assert "LeafSpec" in str(before[0].message)
    hide_known_warnings()
    with warnings.catch_warnings(record=True) as shown:
        CombinedLoader(DataLoader(torch.ones(1)))
    assert shown == []


def test_nothing_else_is_hidden():
    """Neither the user's own use of LeafSpec, nor other warnings of the same file, nor others of the same text."""
    show_again = hide_known_warnings()
    assert _warn() == _warn(module="lightning.pytorch.utilities._pytree") == []
    assert _warn(module="train")
    assert _warn(module="pytorch_lightning.utilities._pytree_of_mine")
    assert _warn("LeafSpec is gone")
    assert _warn(category=UserWarning)
    show_again()
    assert _warn()
