"""A DataModule whose loaders have their workers on data hosts; it works with any Trainer, or without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils._pytree import tree_map

from lightning_sm._lightning import CombinedLoader, LightningDataModule, check_same_distribution
from lightning_sm._unlisted import UnlistedDataModule
from lightning_sm.data.host.data_host import LOCAL_JOB
from lightning_sm.data.settings import DataServiceSettings
from lightning_sm.data.trainer.connection import ServiceConnection
from lightning_sm.data.trainer.host_hooks import OURS, loader_hooks, run_hooks_on_data_hosts, users_class
from lightning_sm.data.trainer.remote_loader import LoaderSource, remote_loader
from lightning_sm.data.trainer.remote_trainer import use_data_hosts
from lightning_sm.data.trainer.same_name import named_as


class RemoteDataModule(UnlistedDataModule):
    """The user's DataModule itself, with loaders whose workers are on data hosts.

    A data host is like a ``DataLoader`` worker on another machine: everything but ``dataset[i]``, ``collate_fn`` and
    ``worker_init_fn`` runs in the training process, unless ``settings.hooks`` says otherwise. Without data hosts, for
    example off SageMaker, the DataModule is returned unchanged.

    Example::

        with DataHost(workers=4) as host:
            trainer.fit(model, RemoteDataModule(MyDataModule("data"), [host.address]))

    Args:
        datamodule: The user's DataModule.
        addresses: Addresses of the data hosts, ``host:port``. Defaults to the job's data hosts.
        settings: Window, timeouts and credentials.
        job: Name of the job; the data hosts must use the same name.

    Raises:
        DataSettingsError: The list of addresses is empty.
        MixedLightningError: The DataModule derives from the other distribution of Lightning.
    """

    _own: type
    _connection: ServiceConnection

    def __new__(  # type: ignore[misc]  # it returns the user's object
        cls,
        datamodule: LightningDataModule,
        addresses: Sequence[str] | ServiceConnection | None = None,
        *,
        settings: DataServiceSettings | None = None,
        job: str = LOCAL_JOB,
    ) -> LightningDataModule:
        """Give the DataModule remote loaders, and return it."""
        check_same_distribution(type(datamodule))
        connection = ServiceConnection.of_addresses(addresses, settings or DataServiceSettings(), job)
        if connection is None:
            return datamodule
        if connection.runs_hooks(is_quiet=False):
            run_hooks_on_data_hosts(datamodule, connection)
        _give_remote_loaders(datamodule, connection)
        return datamodule

    def __init__(self, *_: Any, **__: Any) -> None:
        """Do nothing: the user's DataModule is already initialised."""

    def setup(self, stage: str) -> None:
        """Have the Trainer, if any, report on the data hosts, and run the user's ``setup``."""
        if self.trainer is not None:
            use_data_hosts(self.trainer, self._connection)
        super().setup(stage)

    def teardown(self, stage: str) -> None:
        """Run the user's ``teardown``, and disconnect from the data hosts unless they belong to a job."""
        super().teardown(stage)
        self._connection.end_run()

    def on_exception(self, exception: BaseException) -> None:
        """End the run, because Lightning does not call ``teardown`` after an exception."""
        try:
            super().on_exception(exception)
        finally:
            self._connection.end_run()

    def close(self) -> None:
        """Disconnect from the data hosts."""
        self._connection.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the user's DataModule and the connection, which reconnects in another process."""
        hooks = vars(self).get("_host_hooks")
        if hooks is not None and hooks.travels:
            return super().__reduce_ex__(protocol)
        state = {name: value for name, value in vars(self).items() if name not in OURS}
        return _rebuild, (users_class(self._own), self._connection), state


def _give_remote_loaders(datamodule: LightningDataModule, connection: ServiceConnection) -> None:
    vars(datamodule)["_connection"] = connection
    own = type(datamodule)
    if issubclass(own, RemoteDataModule):  # already remote, perhaps with other data hosts
        return
    datamodule.__class__ = named_as(own, RemoteDataModule, own, **loader_hooks(own, _hook), _own=own)


def _hook(name: str) -> Callable[[RemoteDataModule], Any]:
    def hook(self: RemoteDataModule) -> Any:
        loaders = getattr(self._own, name)(self)
        trainer = self.trainer
        ranks = (0, 1) if trainer is None else (trainer.global_rank, trainer.world_size)

        def remote(loader: Any) -> Any:
            return remote_loader(loader, LoaderSource(self._connection, f"{name}()", *ranks, trainer))

        if isinstance(loaders, CombinedLoader):
            loaders.flattened = list(map(remote, loaders.flattened))
            return loaders
        return tree_map(remote, loaders)

    hook.__name__ = name
    hook.__doc__ = f"Return the loaders of the user's ``{name}``, with their workers on data hosts."
    return hook


def _rebuild(own: type[LightningDataModule], connection: ServiceConnection) -> LightningDataModule:
    datamodule: LightningDataModule = object.__new__(own)
    return RemoteDataModule(datamodule, connection)
