"""Jobs with ports that no other test on this machine uses."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping, Sequence

from lightning_sm.emulator.ports import reserve_ports
from lightning_sm.errors import PortInUseError
from lightning_sm.job.topology import Topology
from tests.fakes.job_folder import make_job


def reserve_job(groups: Mapping[str, Sequence[str]]) -> tuple[str, Topology, contextlib.ExitStack]:
    """Choose a job name, from which the job's ports are derived, so that all of them are free, and reserve the ports.

    Args:
        groups: Hosts by instance group.

    Returns:
        The job's name, its topology, and the stack that holds the ports until it is closed.
    """
    while True:
        name = f"test-{secrets.token_hex(4)}"
        topology = Topology.from_job(make_job(groups, name=name))
        with contextlib.suppress(PortInUseError):
            return name, topology, reserve_ports(topology)
