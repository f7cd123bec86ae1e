"""Jobs whose ports no other test of this machine has."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping, Sequence

from lightning_sm.emulator.ports import reserve_ports
from lightning_sm.errors import PortInUseError
from lightning_sm.job.topology import Topology
from tests.fakes.job_folder import make_job


def reserve_job(groups: Mapping[str, Sequence[str]]) -> tuple[str, Topology, contextlib.ExitStack]:
    """Choose a job; returns its name, from which its ports follow, its layout, and what keeps the ports.

    Args:
        groups: Hosts by instance group.
    """
    while True:
        name = f"test-{secrets.token_hex(4)}"
        topology = Topology.from_job(make_job(groups, name=name))
        with contextlib.suppress(PortInUseError):
            return name, topology, reserve_ports(topology)
