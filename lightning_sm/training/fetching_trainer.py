"""A Trainer whose methods fetch their batches from data hosts, whatever loaders the script passes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import cache, wraps
from typing import TYPE_CHECKING, Any

from lightning_sm._lightning import LightningDataModule, Trainer, check_same_distribution
from lightning_sm.data.trainer.connection import ServiceConnection
from lightning_sm.data.trainer.remote_trainer import use_data_hosts
from lightning_sm.data.trainer.same_name import named_as


def _fetching(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a Trainer method so that it fetches its batches from the job's data hosts."""
    signature = inspect.signature(method)

    @wraps(method)
    def call(trainer: FetchingTrainer, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(trainer, *args, **kwargs).arguments
        for value in given.values():
            check_same_distribution(type(value))
        given.pop("self")
        trainer._fetch(given.values())
        return method(trainer, **given)

    return call


class FetchingTrainer(Trainer):
    """A ``Trainer`` that fetches batches from data hosts if it has a connection to them."""

    _connection: ServiceConnection | None = None

    if not TYPE_CHECKING:  # type checkers see Trainer's own methods
        fit = _fetching(Trainer.fit)
        validate = _fetching(Trainer.validate)
        test = _fetching(Trainer.test)
        predict = _fetching(Trainer.predict)

    def _fetch(self, given: Iterable[Any]) -> None:
        """Set up fetching from the data hosts for a method that is called with the given arguments."""
        if self._connection is not None:
            datamodules = [value for value in given if isinstance(value, LightningDataModule)]
            use_data_hosts(self, self._connection, datamodules)


def fetch_from(trainer: Trainer, connection: ServiceConnection) -> None:
    """Make a Trainer of any class fetch batches from data hosts.

    Args:
        trainer: The Trainer. Its class's overrides still run, and fetch when they call, for example, ``super().fit``.
        connection: The connection to the data hosts.
    """
    trainer.__class__ = _fetching_class(type(trainer))  # type: ignore[arg-type]  # mypy thinks Trainer is unhashable
    trainer._connection = connection  # type: ignore[attr-defined]  # an attribute of the new class


@cache
def _fetching_class(own: type[Trainer]) -> type[Trainer]:
    if issubclass(own, FetchingTrainer):
        return own
    if own is Trainer:
        return FetchingTrainer
    # Recreate this class in __reduce__: pickle (ddp_spawn) looks up classes by name, and would find the script's class.
    return named_as(own, own, FetchingTrainer, __reduce__=lambda trainer: (_new, (own,), vars(trainer)))


def _new(own: type[Trainer]) -> Trainer:
    trainer: Trainer = object.__new__(_fetching_class(own))  # type: ignore[arg-type]  # see fetch_from()
    return trainer
