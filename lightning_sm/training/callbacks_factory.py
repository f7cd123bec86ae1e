"""The callbacks that each ``Trainer`` and ``Fabric`` gets where this package is installed.

Lightning asks installed packages for them (the entry points ``*.callbacks_factory`` in pyproject.toml), so that scripts
are checked, too, which do not import this package. This file is read wherever a Trainer is made, on laptops as well: it
imports nothing that takes time.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.topology import Role, Topology
from lightning_sm.job.variables import SEPARATE_HOSTS


def callbacks() -> Sequence[Any]:
    """Return a check of the number of hosts; nothing where a host cannot train apart by mistake.

    Raises:
        JobConfigError: This is a host of a job, but the job's files are malformed.
    """
    job = SageMakerJob.from_environment()
    if job is None or SEPARATE_HOSTS.read(os.environ):
        return []
    topology = Topology.from_job(job)
    if topology.role is not Role.TRAINER or topology.num_nodes == 1:
        return []
    from lightning_sm.training.callbacks.every_host import EveryHost  # noqa: PLC0415 - loads Lightning's command line

    return [EveryHost(topology)]
