"""A DataModule whose loaders have their workers on data hosts; it works with any Trainer, or without one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_sm._lightning import LightningDataModule, check_same_distribution
from lightning_sm.data.host.data_host import LOCAL_JOB
from lightning_sm.data.settings import DataServiceSettings
from lightning_sm.data.trainer.connection import ServiceConnection
from lightning_sm.data.trainer.host_hooks import FetchingDataModule, fetch_with, run_hooks_on_data_hosts
from lightning_sm.data.trainer.remote_trainer import use_data_hosts


class RemoteDataModule(FetchingDataModule):
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
        fetch_with(RemoteDataModule, datamodule, connection, RemoteDataModule)
        return datamodule

    def __init__(self, *_: Any, **__: Any) -> None:
        """Do nothing: the user's DataModule is already initialised."""

    def setup(self, stage: str) -> None:
        """Have the Trainer, if any, report on the data hosts, and run the user's ``setup``."""
        if self.trainer is not None:
            use_data_hosts(self.trainer, self._service_connection)
        super().setup(stage)

    def teardown(self, stage: str) -> None:
        """Run the user's ``teardown``, and disconnect from the data hosts unless they belong to a job."""
        super().teardown(stage)
        self._service_connection.end_run()

    def close(self) -> None:
        """Disconnect from the data hosts."""
        self._service_connection.close()
