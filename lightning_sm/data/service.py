"""Start the data service in a SageMaker job: serve on data hosts, connect on trainers."""

from __future__ import annotations

import logging
import os

from lightning_sm._lightning import LightningDataModule
from lightning_sm._linux import usable_cpus
from lightning_sm.data.host.main_process import MainProcess
from lightning_sm.data.settings import (
    Credentials,
    DataServiceSettings,
    HostSettings,
    default_network_processes,
    default_workers,
)
from lightning_sm.data.trainer.datamodule import RemoteDataModule
from lightning_sm.errors import DataSettingsError
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.rank_starter import RankStart, RankStarter
from lightning_sm.job.rendezvous import own_address
from lightning_sm.job.topology import Topology
from lightning_sm.job.variables import DATA_GROUPS, MAX_RESTARTS

logger = logging.getLogger(__name__)


def serve(
    datamodule: LightningDataModule, job: SageMakerJob, topology: Topology, settings: DataServiceSettings
) -> None:
    """Serve a DataModule from this data host until the trainers have finished.

    Raises:
        DataServiceError: The port is in use, or no trainer connected in time.
    """
    address = f"{own_address(job)}:{_port(topology, settings)}"
    host_settings = HostSettings(
        address=address,
        workers=settings.workers or default_workers(usable_cpus()),
        network_processes=settings.network_processes or default_network_processes(usable_cpus()),
        max_batch_bytes=settings.max_batch_bytes,
        lease_s=settings.lease_s,
        startup_timeout_s=settings.startup_timeout_s,
        name=job.current_host,
        credentials=Credentials.of(settings, _identity(job)),
        may_restart=MAX_RESTARTS.read(os.environ) > 0,
    )
    num_trainers = len(topology.trainer_hosts)
    logger.info(
        "Data host %s serves at %s (workers: %d), until %s finished.",
        job.current_host,
        address,
        host_settings.workers,
        "the trainer host has" if num_trainers == 1 else f"all {num_trainers} trainer hosts have",
    )
    MainProcess(datamodule, host_settings, lambda _: None).serve()


def remote(
    datamodule: LightningDataModule, job: SageMakerJob, topology: Topology, settings: DataServiceSettings
) -> RemoteDataModule:
    """Wrap a DataModule on a trainer of a job that has data hosts.

    Raises:
        DataSettingsError: mpirun started this rank without the name of the job.
    """
    if job.name is None and RankStart.detect(os.environ, os.getppid()).launcher is RankStarter.MPI:
        raise DataSettingsError(
            f"mpirun started this rank on {job.current_host} without TRAINING_JOB_NAME, from which the data hosts "
            f"({', '.join(topology.data_hosts)}) derive their port and token. Add -x TRAINING_JOB_NAME to mpirun."
        )
    port = _port(topology, settings)
    addresses = [f"{job.addresses.get(host, host)}:{port}" for host in topology.data_hosts]
    module = RemoteDataModule(datamodule, addresses, settings=settings, job=_identity(job))
    # A script may fit and then test: training has finished only when the process exits.
    module.closes_on_teardown = False
    return module


def no_datamodule(topology: Topology, what: str, advice: str) -> DataSettingsError:
    """Return the error of a job with data hosts whose script gives them nothing to serve.

    Args:
        topology: The hosts of the job.
        what: Subject and verb: who has no DataModule.
        advice: What to write instead, without the alternative of a job without data groups.
    """
    return DataSettingsError(
        f"The job has data hosts ({', '.join(topology.data_hosts)}), but {what} no LightningDataModule for them to "
        f"serve. {advice}, or remove the data groups from the job (with {DATA_GROUPS.name}= in the environment, all "
        "groups train)."
    )


def _port(topology: Topology, settings: DataServiceSettings) -> int:
    return settings.port or topology.data_port


def _identity(job: SageMakerJob) -> str:
    return job.name or "unnamed"
