"""The program that started this process, and the ranks that it assigned.

Pure logic over environment variables. Variables such as ``NODE_RANK`` or ``MASTER_ADDR`` linger in base images, shells
and other launchers, so they are ignored unless the launcher that sets them has demonstrably started this process
(Lightning issues 5651 and 13639: stray values make every host "node 0", or hang the job).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from lightning_sm.errors import TopologyError
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.topology import Topology
from lightning_sm.job.variables import RANK_ZERO_PID

# Set by torchrun and Lightning, but perhaps also by base images and shells.
RANK_VARIABLES = (
    "GROUP_RANK",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NODE_RANK",
    "RANK",
    "WORLD_SIZE",
)
# Marks ranks that ``lightning-sm train`` started. A torchrun that the script starts replaces it with its own id.
_RUN_ID = "lightning-sm"


class RankStarter(Enum):
    """The program that starts a host's processes."""

    PLAIN = "one process per host"
    LIGHTNING = "a local rank that Lightning started"
    LAUNCHER = "lightning-sm train"
    TORCHRUN = "torchrun"
    MPI = "mpirun"


@dataclass(frozen=True)
class RankStart:
    """How one process was started, and the ranks that it was assigned.

    Attributes:
        launcher: The program that started the process.
        local_rank: Position of the process on its host.
        node_rank: Position of the host according to the launcher; None if only the topology determines it.
        devices: Number of processes on each host; None if Lightning decides.
        world_size: Total number of processes; None if Lightning decides.
        main_address: Address of rank 0, if the launcher chose it.
        main_port: Port of rank 0, if the launcher chose it.
    """

    launcher: RankStarter
    local_rank: int = 0
    node_rank: int | None = None
    devices: int | None = None
    world_size: int | None = None
    main_address: str | None = None
    main_port: int | None = None

    @classmethod
    def detect(cls, env: Mapping[str, str], parent_pid: int) -> RankStart:
        """Detect which program started this process.

        Args:
            env: Environment variables.
            parent_pid: Process id of this process's parent.

        Raises:
            TopologyError: A launcher started this process, but a variable that it always sets is missing or not a
                number, or mpirun did not number each host's ranks consecutively.

        Source:
            torchrun: PyTorch documentation, "torchrun (Elastic Launch)", environment variables. Open MPI 4:
            FAQ "What environmental variables does Open MPI set?".
        """
        # Check for torchrun first: if mpirun starts one torchrun on each host, both set their variables.
        if "TORCHELASTIC_RUN_ID" in env:
            return cls._from_torchrun(env)
        if "OMPI_COMM_WORLD_RANK" in env:
            return cls._from_mpi(env)
        if RANK_ZERO_PID.read(env) == parent_pid and "LOCAL_RANK" in env:
            return cls(RankStarter.LIGHTNING, local_rank=_number(env, "LOCAL_RANK", "Lightning"))
        return cls(RankStarter.PLAIN)

    @classmethod
    def _from_torchrun(cls, env: Mapping[str, str]) -> RankStart:
        is_ours = env["TORCHELASTIC_RUN_ID"] == _RUN_ID
        starter = RankStarter.LAUNCHER if is_ours else RankStarter.TORCHRUN
        return cls(
            launcher=starter,
            local_rank=_number(env, "LOCAL_RANK", starter.value),
            node_rank=_number(env, "GROUP_RANK", starter.value),
            devices=_number(env, "LOCAL_WORLD_SIZE", starter.value),
            world_size=_number(env, "WORLD_SIZE", starter.value),
            # torchrun chooses the address and port, where its agent already listens. Our launcher uses the job's.
            main_address=None if is_ours else env.get("MASTER_ADDR"),
            main_port=None if is_ours else _number(env, "MASTER_PORT", starter.value),
        )

    @classmethod
    def _from_mpi(cls, env: Mapping[str, str]) -> RankStart:
        rank = _number(env, "OMPI_COMM_WORLD_RANK", "mpirun")
        world_size = _number(env, "OMPI_COMM_WORLD_SIZE", "mpirun")
        local_rank = _number(env, "OMPI_COMM_WORLD_LOCAL_RANK", "mpirun")
        devices = _number(env, "OMPI_COMM_WORLD_LOCAL_SIZE", "mpirun")
        node_rank, position = divmod(rank, devices)
        if position != local_rank:
            raise TopologyError(
                f"mpirun assigned local rank {local_rank} of {devices} to rank {rank}, but Lightning numbers the "
                "ranks of each host consecutively. Start mpirun with --map-by slot, and give each host the same number "
                "of slots."
            )
        return cls(RankStarter.MPI, local_rank, node_rank, devices, world_size)


def host_variables(job: SageMakerJob, topology: Topology) -> dict[str, str]:
    """Return a trainer host's variables, for scripts that create their process group themselves.

    ``LightningEnvironment`` detects a cluster by the same variables. If the number of processes per host is unknown, no
    other rank variables may be set: with ``LOCAL_RANK``, Lightning would start no local ranks, and with ``RANK``, all
    local ranks would have the same rank.

    Args:
        job: The facts of the job.
        topology: Roles and ranks of all hosts.
    """
    return {
        "MASTER_ADDR": job.addresses.get(topology.main_host, topology.main_host),
        "MASTER_PORT": str(topology.main_port),
        "NODE_RANK": str(topology.node_rank),
    }


def rank_variables(topology: Topology, devices: int, local_rank: int) -> dict[str, str]:
    """Return the additional variables of a rank that ``lightning-sm train`` starts; torchrun sets the same ones.

    Args:
        topology: Roles and ranks of all hosts.
        devices: Number of processes on each trainer host.
        local_rank: Position of the rank on its host.

    Source:
        PyTorch documentation, "torchrun (Elastic Launch)", environment variables.
    """
    return {
        "RANK": str(topology.node_rank * devices + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(topology.num_nodes * devices),
        "LOCAL_WORLD_SIZE": str(devices),
        "GROUP_RANK": str(topology.node_rank),
        "GROUP_WORLD_SIZE": str(topology.num_nodes),
        "TORCHELASTIC_RUN_ID": _RUN_ID,
    }


def stray_variables(
    env: Mapping[str, str], launch: RankStart, of_host: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Return the names of the rank variables in ``env`` that the launcher of this process did not set.

    Args:
        env: Environment variables.
        launch: How this process was started.
        of_host: The result of ``host_variables`` for this host; variables with these values are not stray.
    """
    if launch.launcher in (RankStarter.TORCHRUN, RankStarter.LIGHTNING, RankStarter.LAUNCHER):
        return ()
    return tuple(name for name in RANK_VARIABLES if name in env and env[name] != (of_host or {}).get(name))


def _number(env: Mapping[str, str], variable: str, launcher: str) -> int:
    text = env.get(variable, "")
    if not text.isdecimal():
        raise TopologyError(
            f"{launcher} started this process and always sets {variable} to a number, but it is "
            f"{env.get(variable)!r}. Find out what changes the variable between {launcher} and the script."
        )
    return int(text)
