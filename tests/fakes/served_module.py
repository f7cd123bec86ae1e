"""A data host's side of a DataModule that has arrived."""

from __future__ import annotations

from typing import Any

from lightning_sm.data.host.datamodule import ServedModule
from lightning_sm.data.host.pickler import pickle_object
from tests.fakes.requests import DIGEST


def served(datamodule: Any, digest: str = DIGEST, module: ServedModule | None = None) -> ServedModule:
    """Return what a data host has once rank 0 has sent a DataModule.

    Args:
        datamodule: The DataModule.
        digest: The name under which requests know it.
        module: What has other DataModules already.
    """
    module = module or ServedModule()
    pickled = pickle_object(datamodule, by_name=False)
    module.keep(digest, pickled.write(), [digest, *module.snapshots])
    return module
