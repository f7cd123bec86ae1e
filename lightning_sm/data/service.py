"""The data service on the data hosts of a SageMaker job."""

from __future__ import annotations

import logging
import os

from lightning_sm._linux import usable_cpus
from lightning_sm.data.host.main_process import MainProcess
from lightning_sm.data.settings import Credentials, DataServiceSettings, HostSettings, default_workers
from lightning_sm.data.trainer.connection import UNNAMED_JOB
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.reachability import own_address
from lightning_sm.job.topology import Topology
from lightning_sm.job.variables import JOB_SECRET, MAX_RESTARTS

logger = logging.getLogger(__name__)


def serve(job: SageMakerJob, topology: Topology, settings: DataServiceSettings) -> None:
    """Build batches on this data host until the trainers have finished.

    Raises:
        DataServiceError: The port is in use, or no trainer connected in time.
    """
    address = f"{own_address(job)}:{settings.port_in(topology)}"
    host_settings = HostSettings(
        address=address,
        workers=settings.workers or default_workers(usable_cpus()),
        max_batch_bytes=settings.max_batch_bytes,
        lease_s=settings.lease_s,
        startup_timeout_s=settings.startup_timeout_s,
        name=job.current_host,
        credentials=Credentials.of(settings, job.name or UNNAMED_JOB),
        may_restart=MAX_RESTARTS.read(os.environ) > 0,
        channels=list(job.channels),
        trusted=[*(job.addresses.get(host, host) for host in job.hosts), *(settings.trust or ())],
    )
    if JOB_SECRET.read(os.environ) is None and settings.tls_authority is None:
        logger.warning(
            "This job has no secret: anyone who knows its name and can run a process on one of its hosts can read the "
            "batches of data host %s and run code there. Start the job with lightning-sm submit, or set %s to random "
            "characters, the same on all hosts.",
            job.current_host,
            JOB_SECRET.name,
        )
    num_trainers = len(topology.trainer_hosts)
    logger.info(
        "Data host %s serves at %s (workers: %d), until %s finished.",
        job.current_host,
        address,
        host_settings.workers,
        "the trainer host has" if num_trainers == 1 else f"all {num_trainers} trainer hosts have",
    )
    MainProcess(host_settings, lambda _: None).serve()
