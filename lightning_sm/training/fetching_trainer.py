"""A Trainer whose methods fetch their batches from data hosts, whatever the script hands them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, wraps
from typing import TYPE_CHECKING, Any

from lightning_sm._lightning import LightningDataModule, Trainer, check_same_distribution
from lightning_sm.data.trainer.bare_loaders import bare_loaders
from lightning_sm.data.trainer.connection import ServiceConnection
from lightning_sm.data.trainer.datamodule import RemoteDataModule
from lightning_sm.data.trainer.remote_loader import is_chosen
from lightning_sm.data.trainer.remote_trainer import use_data_hosts

# The stages of the arguments in which the methods of Trainer take loaders; None: that of the method.
_LOADERS = {"train_dataloaders": "train", "val_dataloaders": "val", "dataloaders": None}
_STAGES = {"validate": "val", "test": "test", "predict": "predict"}


def _fetching(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let a method of Trainer fetch its batches from the job's data hosts."""
    signature = inspect.signature(method)

    @wraps(method)
    def call(trainer: FetchingTrainer, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(trainer, *args, **kwargs).arguments
        for value in given.values():
            check_same_distribution(type(value))
        given.pop("self")
        return method(trainer, **trainer._remote_arguments(method.__name__, given))

    return call


class FetchingTrainer(Trainer):
    """A ``Trainer`` that fetches from data hosts once it has a connection to them."""

    _connection: ServiceConnection | None = None
    # By id: the user's DataModules and models, and what fetches their batches.
    _remote: dict[int, tuple[Any, RemoteDataModule]]

    if not TYPE_CHECKING:  # type checkers see Trainer's own methods
        fit = _fetching(Trainer.fit)
        validate = _fetching(Trainer.validate)
        test = _fetching(Trainer.test)
        predict = _fetching(Trainer.predict)

    def _remote_arguments(self, method: str, given: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments with which a method fetches its batches."""
        if self._connection is None:
            return given
        if is_chosen():
            own = [value for value in given.values() if isinstance(value, LightningDataModule)]
            use_data_hosts(self, self._connection, own)
            return given
        return remote_arguments(self, method, given, self._connection, self._remote)


def fetch_from(trainer: Trainer, connection: ServiceConnection) -> None:
    """Let a Trainer that the script's class or function has made fetch from data hosts.

    Args:
        trainer: The Trainer. Methods that its class overrides are called as before, and ``super().fit`` fetches.
        connection: The connection to the data hosts.
    """
    trainer.__class__ = _fetching_class(type(trainer))  # type: ignore[arg-type]  # mypy holds Trainer for unhashable
    trainer._connection = connection  # type: ignore[attr-defined]  # of its class from here on
    trainer._remote = {}  # type: ignore[attr-defined]


@cache
def _fetching_class(own: type[Trainer]) -> type[Trainer]:
    if issubclass(own, FetchingTrainer):
        return own
    if own is Trainer:
        return FetchingTrainer
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    # Pickle, as for ddp_spawn, finds classes by name, and under this name it finds the script's own.
    reduce = {"__reduce__": lambda trainer: (_new, (own,), vars(trainer))}
    return type(own.__name__, (own, FetchingTrainer), {**names, **reduce})


def _new(own: type[Trainer]) -> Trainer:
    trainer: Trainer = object.__new__(_fetching_class(own))  # type: ignore[arg-type]  # see fetch_from()
    return trainer


def remote_arguments(
    trainer: Trainer,
    method: str,
    given: dict[str, Any],
    connection: ServiceConnection,
    remote: dict[int, tuple[Any, RemoteDataModule]],
) -> dict[str, Any]:
    """Return the arguments with which a method of the Trainer fetches its batches from data hosts.

    Args:
        trainer: The Trainer.
        method: "fit", "validate", "test" or "predict".
        given: The arguments that the script gave, by name.
        connection: The connection to the data hosts.
        remote: What fetches the batches of this Trainer, by the id of the DataModule or model that makes them,
            together with that object. New entries are added.

    Returns:
        ``given`` itself where Lightning decides: there are no loaders, or too many.
    """
    names = {name: stage or _STAGES[method] for name, stage in _LOADERS.items() if given.get(name) is not None}
    datamodule = given.get("datamodule")
    # Lightning also accepts a DataModule in place of the loaders.
    for name in list(names):
        if isinstance(given[name], LightningDataModule) and datamodule is None:
            datamodule = given[name]
            del names[name]
    if isinstance(datamodule, RemoteDataModule) or (datamodule is not None and names):
        return given  # Lightning refuses a DataModule together with loaders
    if datamodule is None:
        owner = given.get("model")
        if owner is None:
            owner = trainer.lightning_module
        datamodule = bare_loaders(owner, {stage: given[name] for name, stage in names.items()})
        if datamodule is None:
            return given  # Lightning says what is missing
    else:
        owner = datamodule
    if names or id(owner) not in remote:  # the loaders may be others than in the last call
        fetched = RemoteDataModule(datamodule, connection)
        if not names:
            remote[id(owner)] = owner, fetched
    else:
        _, fetched = remote[id(owner)]
    if owner is not datamodule:
        fetched.keep_attached(trainer.datamodule)  # type: ignore[attr-defined]  # set by its connector
    rest = {name: value for name, value in given.items() if name not in _LOADERS}
    return {**rest, "datamodule": fetched}
