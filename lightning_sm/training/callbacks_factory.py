"""The callbacks that every ``Trainer`` and ``Fabric`` gets if this package is installed.

Lightning finds them through the entry points ``*.callbacks_factory`` in pyproject.toml, so they also check scripts that
do not import this package. Every process that makes a Trainer imports this module, even on a laptop, so it must not
import anything slow.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.topology import Role, Topology
from lightning_sm.job.variables import SEPARATE_HOSTS


def callbacks() -> Sequence[Any]:
    """Return a callback that checks the number of hosts, or none if this host cannot train separately by mistake.

    On the trainer hosts of a job, also have the process groups destroyed at exit; see ``leave_at_exit``.

    Raises:
        JobConfigError: This is a host of a job, but the job's files are malformed.
    """
    job = SageMakerJob.from_environment()
    topology = None if job is None or SEPARATE_HOSTS.read(os.environ) else Topology.from_job(job)
    if topology is None or topology.role is not Role.TRAINER:
        return []
    from lightning_sm.training.callbacks.every_host import EveryHost  # noqa: PLC0415 - loads Lightning's command line
    from lightning_sm.training.group_exit import leave_at_exit  # noqa: PLC0415 - as above

    leave_at_exit()
    return [EveryHost(topology)] if topology.num_nodes > 1 else []
