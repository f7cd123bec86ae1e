"""A pytest plugin that lets a data host serve all loaders that a test passes to a Trainer."""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pytorch_lightning import LightningDataModule, Trainer
from torch.utils.data import BatchSampler, DataLoader

from lightning_sm import DataHost, DataServiceSettings
from lightning_sm.data.host.data_host import LOCAL_JOB
from lightning_sm.data.trainer.connection import ServiceConnection
from lightning_sm.data.trainer.remote_trainer import use_data_hosts
from lightning_sm.job.host_keys import new_secret
from tests.lightning_suite.__main__ import PROPERTY

# Set the secret now: a data host would set it later, and Lightning's tests fail if environment variables leak.
os.environ.update(new_secret())
_SETTINGS = DataServiceSettings()
# The longest test takes half a minute on an idle machine.
_TEST_TIMEOUT_S = 180
_METHODS = {name: getattr(Trainer, name) for name in ("fit", "validate", "test", "predict")}
# Lightning replaces these methods while a hook runs, and does not restore them if the hook raises.
_ORIGINALS = {
    (cls, name): vars(cls).get(name)
    for cls in (DataLoader, BatchSampler)
    for name in ("__init__", "__setattr__", "__delattr__")
}


class _Connection(ServiceConnection):
    """A connection that counts the runs with loaders on the data host; each such run opens it."""

    num_runs = 0

    def open(self, rank: int, num_ranks: int, *, is_quiet: bool) -> None:
        """Start the feeder."""
        self.num_runs += self._feeder is None
        super().open(rank, num_ranks, is_quiet=is_quiet)

    def method(self, name: str) -> Callable[..., Any]:
        """Return a Trainer method such as "fit" that acts like ``SageMakerTrainer``'s in a job with data hosts."""
        stock = _METHODS[name]

        def call(trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
            given = inspect.signature(stock).bind(trainer, *args, **kwargs).arguments
            own = [value for value in given.values() if isinstance(value, LightningDataModule)]
            use_data_hosts(trainer, self, own)
            return stock(trainer, *args, **kwargs)

        return call


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Fail a test that hangs, instead of the whole run."""

    def fail(*_: object) -> None:
        raise TimeoutError(f"The test has not ended after {_TEST_TIMEOUT_S} s.")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(_TEST_TIMEOUT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="session")
def _data_host() -> Iterator[DataHost]:
    with DataHost(workers=1, settings=_SETTINGS) as host:
        yield host


@pytest.fixture(autouse=True)
def _on_data_host(_data_host: DataHost, record_property: Callable[[str, object], None]) -> Iterator[None]:
    connection = _Connection([_data_host.address], _SETTINGS, LOCAL_JOB)
    # Do not use pytest's fixture monkeypatch: it would be undone after Lightning's fixtures check for leaks.
    with _limited(), pytest.MonkeyPatch.context() as monkeypatch:
        for name in _METHODS:
            monkeypatch.setattr(Trainer, name, connection.method(name))
        yield
    connection.close()
    record_property(PROPERTY, connection.num_runs)
    for (cls, name), original in _ORIGINALS.items():
        if original is not None:
            setattr(cls, name, original)
        elif name in vars(cls):
            delattr(cls, name)
