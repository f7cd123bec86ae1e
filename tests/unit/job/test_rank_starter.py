"""Launchers are recognised by variables that only they set, never by rank variables alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_sm.errors import TopologyError
from lightning_sm.job.rank_starter import (
    RANK_VARIABLES,
    RankStart,
    RankStarter,
    host_variables,
    rank_variables,
    stray_variables,
)
from lightning_sm.job.topology import Topology
from lightning_sm.job.variables import RANK_ZERO_PID
from tests.fakes.job_folder import make_job

PARENT = 4242
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "GROUP_RANK": "1",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "algo-2",
    "MASTER_PORT": "7777",
    "RANK": "3",
    "WORLD_SIZE": "4",
}
MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
STRAYS = dict.fromkeys(RANK_VARIABLES, "1")
OF_TORCHRUN = RankStart(
    RankStarter.TORCHRUN, local_rank=1, node_rank=1, devices=2, world_size=4, main_address="algo-2", main_port=7777
)
OF_MPI = RankStart(RankStarter.MPI, local_rank=1, node_rank=1, devices=2, world_size=4)
OF_LAUNCHER = RankStart(RankStarter.LAUNCHER, local_rank=1, node_rank=1, devices=2, world_size=4)
OF_LIGHTNING = RankStart(RankStarter.LIGHTNING, local_rank=1)


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        pytest.param({}, RankStart(RankStarter.PLAIN), id="nothing set"),
        pytest.param(STRAYS, RankStart(RankStarter.PLAIN), id="ranks without a launcher"),
        pytest.param(TORCHRUN, OF_TORCHRUN, id="torchrun"),
        pytest.param({**TORCHRUN, "NODE_RANK": "7"}, OF_TORCHRUN, id="torchrun and a stray variable"),
        pytest.param(MPI, OF_MPI, id="mpirun"),
        pytest.param({**STRAYS, **MPI}, OF_MPI, id="mpirun and stray variables"),
        pytest.param({**TORCHRUN, "TORCHELASTIC_RUN_ID": "lightning-sm"}, OF_LAUNCHER, id="our launcher"),
        pytest.param({**MPI, **TORCHRUN}, OF_TORCHRUN, id="torchrun started by mpirun"),
        pytest.param({RANK_ZERO_PID.name: str(PARENT), "LOCAL_RANK": "1"}, OF_LIGHTNING, id="Lightning"),
        pytest.param({RANK_ZERO_PID.name: str(PARENT)}, RankStart(RankStarter.PLAIN), id="child without a rank"),
        pytest.param(
            {RANK_ZERO_PID.name: "17", "LOCAL_RANK": "1"}, RankStart(RankStarter.PLAIN), id="child of a grandparent"
        ),
    ],
)
def test_launcher_is_detected(env, expected):
    """Each launcher is recognised by variables that only it sets, and ranks are read from those variables alone."""
    assert RankStart.detect(env, PARENT) == expected


@pytest.mark.parametrize(
    ("rank", "local_rank", "node_rank"), [("0", "0", 0), ("1", "1", 0), ("2", "0", 1), ("3", "1", 1)]
)
def test_node_rank_under_mpirun_follows_from_the_rank(rank, local_rank, node_rank):
    """The ranks of a host are consecutive, so the node rank follows from rank and local rank."""
    env = {**MPI, "OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": local_rank}
    assert RankStart.detect(env, PARENT).node_rank == node_rank


def test_ranks_dealt_out_over_hosts_in_turn_are_refused():
    """Lightning cannot number ranks as ``mpirun --map-by node`` does; the error names the option to change."""
    env = {**MPI, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    with pytest.raises(TopologyError, match=r"local rank 0 of 2 to rank 1.*--map-by slot"):
        RankStart.detect(env, PARENT)


@pytest.mark.parametrize("value", [None, "", "one", "-1", "1.0", " 1"])
@pytest.mark.parametrize(
    ("launcher", "env", "variable"),
    [
        *(("torchrun", TORCHRUN, name) for name in TORCHRUN if name in ("GROUP_RANK", "LOCAL_RANK", "WORLD_SIZE")),
        *(("torchrun", TORCHRUN, name) for name in ("LOCAL_WORLD_SIZE", "MASTER_PORT")),
        *(("mpirun", MPI, name) for name in MPI if name != "OMPI_COMM_WORLD_RANK"),
    ],
)
def test_variable_that_a_launcher_always_sets_must_be_a_number(launcher, env, variable, value):
    """A missing or malformed variable raises an error that names the variable and the launcher."""
    broken = {**env, variable: value}
    if value is None:
        del broken[variable]
    with pytest.raises(
        TopologyError, match=f"^{launcher} started this process and always sets {variable} to a number, "
    ):
        RankStart.detect(broken, PARENT)


@pytest.mark.parametrize("launcher", [RankStarter.PLAIN, RankStarter.MPI])
def test_ranks_that_nobody_set_are_strays(launcher):
    """Torch's rank variables are strays in a plain process, and under mpirun, which sets different ones."""
    assert stray_variables({**STRAYS, "OTHER": "1"}, RankStart(launcher)) == RANK_VARIABLES
    assert stray_variables({"RANK": "1"}, RankStart(launcher)) == ("RANK",)
    assert stray_variables({"OTHER": "1"}, RankStart(launcher)) == ()


@pytest.mark.parametrize("launcher", [RankStarter.PLAIN, RankStarter.MPI])
def test_what_our_launcher_says_of_the_host_is_no_stray(launcher):
    """The launcher's host variables are not strays while they have the values that the launcher set."""
    job = make_job({"gpu": ["algo-1", "algo-2"]}, "algo-2", addresses={"algo-1": "10.0.0.1"}, main_port=29000)
    of_host = host_variables(job, Topology.from_job(job))
    assert of_host == {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29000", "NODE_RANK": "1"}
    assert stray_variables({**of_host, "RANK": "1"}, RankStart(launcher), of_host) == ("RANK",)
    assert stray_variables({**of_host, "NODE_RANK": "0"}, RankStart(launcher), of_host) == ("NODE_RANK",)


@pytest.mark.parametrize("local_rank", [0, 1])
def test_the_variables_of_a_rank_say_what_torchrun_would(local_rank):
    """Ranks are numbered by host, and a process detects from the variables that our launcher started it."""
    job = make_job({"gpu": ["algo-1", "algo-2"]}, "algo-2")
    variables = rank_variables(Topology.from_job(job), 2, local_rank)
    assert RankStart.detect(variables, PARENT) == replace(OF_LAUNCHER, local_rank=local_rank)
    assert (variables["RANK"], variables["GROUP_WORLD_SIZE"]) == (str(2 + local_rank), "2")


@pytest.mark.parametrize("launcher", [RankStarter.TORCHRUN, RankStarter.LIGHTNING, RankStarter.LAUNCHER])
def test_ranks_of_torchrun_and_lightning_are_theirs(launcher):
    """Variables that torchrun, Lightning or our launcher set for their processes are not strays."""
    assert stray_variables(STRAYS, RankStart(launcher)) == ()
