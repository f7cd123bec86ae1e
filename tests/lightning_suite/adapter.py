"""A pytest plugin that lets a data host serve whatever loaders a test gives to a Trainer."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from pytorch_lightning import LightningDataModule, Trainer
from torch.utils.data import BatchSampler, DataLoader

from lightning_sm import DataHost, DataServiceSettings, RemoteDataModule
from lightning_sm.data.host import data_host
from lightning_sm.data.trainer import feeder_client
from tests.lightning_suite.zygote import Zygote

_HOOKS = {"train_dataloaders": "train_dataloader", "val_dataloaders": "val_dataloader"}
_SETTINGS = DataServiceSettings(batch_timeout_s=40.0, startup_timeout_s=40.0)
# The longest test takes half a minute on an idle machine.
_TEST_TIMEOUT_S = 180
_COUNTS: Counter[str] = Counter()
_ZYGOTES: list[Zygote] = []
# Lightning replaces them while a hook runs, and leaves its own behind when the hook raises.
_ORIGINALS = {
    (cls, name): vars(cls).get(name)
    for cls in (DataLoader, BatchSampler)
    for name in ("__init__", "__setattr__", "__delattr__")
}


def pytest_sessionfinish() -> None:
    """Stop the zygote, and leave the numbers of what was served."""
    for zygote in _ZYGOTES:
        zygote.close()
    _ZYGOTES.clear()
    folder = os.environ.get("LIGHTNING_SUITE_COUNTS")
    if folder:
        Path(folder, f"{os.getpid()}.json").write_text(json.dumps(_COUNTS))


class _FromTest(LightningDataModule):
    """The loader hooks of a model, which is a copy here, and loaders that were given to a Trainer.

    Args:
        model: The model.
        loaders: By the names of hooks.
    """

    def __init__(self, model: Any, loaders: dict[str, Any]) -> None:
        super().__init__()
        self.model = model
        self.loaders = loaders

    def setup(self, stage: str) -> None:
        # Hooks of the model read its trainer.
        if self.model is not None:
            self.model._trainer = self.trainer


def _datamodule_of(model: Any, given: dict[str, Any], name: str) -> LightningDataModule | None:
    """The DataModule to serve for a method of the Trainer; None if there is no loader that a data host takes."""
    stages = {"fit": ("train", "val"), "validate": ("val",)}.get(name, (name,))
    names = [f"{stage}_dataloader" for stage in stages]
    own = [name for name in names if name not in given and _is_own(model, name)]
    if not own and not given:
        return None
    hooks: dict[str, Any] = {name: lambda self, name=name: self.loaders[name] for name in given}
    hooks |= {name: lambda self, name=name: getattr(self.model, name)() for name in own}
    return type("LoadersOfTest", (_FromTest,), hooks)(model if own else None, given)


def _is_own(model: Any, name: str) -> bool:
    hook = getattr(model, name, None)
    module = getattr(getattr(hook, "__func__", hook), "__module__", "")
    return hook is not None and module is not None and not module.startswith("pytorch_lightning.core")


def _are_loaders(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_are_loaders, value.values()))
    if isinstance(value, (list, tuple)):
        return bool(value) and all(map(_are_loaders, value))
    if hasattr(value, "iterables") and hasattr(value, "_mode"):
        return _are_loaders(value.iterables)
    return isinstance(value, DataLoader)


@contextlib.contextmanager
def _served(datamodule: LightningDataModule) -> Iterator[RemoteDataModule | None]:
    """Yield what replaces a DataModule; None if it cannot be sent to another process."""
    try:
        cloudpickle.dumps(data_host._without_trainer(datamodule))
    except (TypeError, AttributeError, pickle.PicklingError, RuntimeError, ValueError):
        _COUNTS["not pickled"] += 1
        yield None
        return
    with DataHost(workers=1, settings=_SETTINGS) as host:
        _COUNTS["served"] += 1
        yield RemoteDataModule(datamodule, [host.address], settings=_SETTINGS)


def _adapted(name: str) -> Any:
    stock = getattr(Trainer, name)
    loader_names = ("train_dataloaders", "val_dataloaders") if name == "fit" else ("dataloaders",)

    def call(self: Trainer, model: Any = None, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip((*loader_names, "datamodule"), args[: len(loader_names) + (name == "fit")], strict=False))
        rest = args[len(given) :]
        given |= {key: kwargs.pop(key) for key in (*loader_names, "datamodule") if key in kwargs}
        given = {key: value for key, value in given.items() if value is not None}
        first = given.get(loader_names[0])
        if isinstance(first, LightningDataModule):
            given = {"datamodule": first}
        datamodule = given.get("datamodule")
        if isinstance(datamodule, RemoteDataModule) or (len(given) > 1 and datamodule is not None):
            return stock(self, model, *rest, **given, **kwargs)
        if datamodule is None:
            hooks = _HOOKS if name == "fit" else {"dataloaders": f"{'val' if name == 'validate' else name}_dataloader"}
            if not all(map(_are_loaders, given.values())):
                _COUNTS["other types of loaders"] += 1
                return stock(self, model, *rest, **given, **kwargs)
            of_model = self.lightning_module if model is None else model  # after a fit, validate() takes its model
            datamodule = _datamodule_of(of_model, {hooks[key]: value for key, value in given.items()}, name)
        if datamodule is None or type(datamodule).__module__.startswith("unittest.mock"):
            _COUNTS["no loaders"] += 1
            return stock(self, model, *rest, **given, **kwargs)
        with _served(datamodule) as remote:
            if remote is None:
                return stock(self, model, *rest, **given, **kwargs)
            return stock(self, model, *rest, datamodule=remote, **kwargs)

    call.__name__ = name
    return call


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Fail a test that does not end: some replace the clock, by which the wait for a batch has its own limit."""

    def fail(*_: object) -> None:
        raise TimeoutError(f"The test has not ended after {_TEST_TIMEOUT_S} s.")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(_TEST_TIMEOUT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True)
def _on_data_hosts() -> Iterator[None]:
    if not _ZYGOTES:
        _ZYGOTES.append(Zygote())
    # Its own: the fixture of the same name would end after those of Lightning that look for leaks.
    with _limited(), pytest.MonkeyPatch.context() as monkeypatch:
        for module in (data_host, feeder_client):
            monkeypatch.setattr(module, "start_module", _ZYGOTES[0].start_module)
        for name in ("fit", "validate", "test", "predict"):
            monkeypatch.setattr(Trainer, name, _adapted(name))
        yield
    for (cls, name), original in _ORIGINALS.items():
        if original is not None:
            setattr(cls, name, original)
        elif name in vars(cls):
            delattr(cls, name)
