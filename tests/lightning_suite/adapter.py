"""A pytest plugin that lets a data host serve whatever loaders a test gives to a Trainer."""

from __future__ import annotations

import contextlib
import inspect
import secrets
import signal
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from pytorch_lightning import Trainer
from torch.utils.data import BatchSampler, DataLoader

from lightning_sm import DataHost, DataServiceSettings
from lightning_sm.data.host.data_host import LOCAL_JOB
from lightning_sm.data.trainer.connection import ServiceConnection
from lightning_sm.training.fetching_trainer import remote_arguments
from tests.lightning_suite.__main__ import PROPERTY

# A token: without one, a data host sets a variable of the environment, and Lightning's tests look for such leaks.
# One shard: iterable datasets of the tests do not split themselves, which is an error with more.
_SETTINGS = DataServiceSettings(virtual_shards=1, token=secrets.token_hex())
# The longest test takes half a minute on an idle machine.
_TEST_TIMEOUT_S = 180
_METHODS = {name: getattr(Trainer, name) for name in ("fit", "validate", "test", "predict")}
# Lightning replaces them while a hook runs, and leaves its own behind when the hook raises.
_ORIGINALS = {
    (cls, name): vars(cls).get(name)
    for cls in (DataLoader, BatchSampler)
    for name in ("__init__", "__setattr__", "__delattr__")
}


class _Connected:
    """The methods of Trainer as ``SageMakerTrainer`` has them in a job with data hosts.

    Args:
        connection: The connection to the data host.

    Attributes:
        num_runs: Calls whose loaders were on the data host.
    """

    def __init__(self, connection: ServiceConnection) -> None:
        self.num_runs = 0
        self._connection = connection
        self._remote: WeakKeyDictionary[Trainer, Any] = WeakKeyDictionary()

    def method(self, name: str) -> Callable[..., Any]:
        """Return "fit", "validate", "test" or "predict"."""
        stock = _METHODS[name]

        def call(trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
            given = inspect.signature(stock).bind(trainer, *args, **kwargs).arguments
            del given["self"]
            arguments = remote_arguments(trainer, name, given, self._connection, self._remote.setdefault(trainer, {}))
            self.num_runs += arguments is not given
            return stock(trainer, **arguments)

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


@pytest.fixture(scope="session")
def _data_host() -> Iterator[DataHost]:
    with DataHost(workers=1, settings=_SETTINGS) as host:
        yield host


@pytest.fixture(autouse=True)
def _on_data_host(_data_host: DataHost, record_property: Callable[[str, object], None]) -> Iterator[None]:
    connection = ServiceConnection([_data_host.address], _SETTINGS, LOCAL_JOB)
    connected = _Connected(connection)
    # Its own: the fixture of the same name would end after those of Lightning that look for leaks.
    with _limited(), pytest.MonkeyPatch.context() as monkeypatch:
        for name in _METHODS:
            monkeypatch.setattr(Trainer, name, connected.method(name))
        yield
    connection.close("the test has ended", is_success=True)
    record_property(PROPERTY, connected.num_runs)
    for (cls, name), original in _ORIGINALS.items():
        if original is not None:
            setattr(cls, name, original)
        elif name in vars(cls):
            delattr(cls, name)
