"""SageMakerEnvironment under a real mpirun."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.integration.hosts import Hosts, check_rank_variables, script
from tests.integration.rank_launchers import NEEDS_MPIRUN, mpirun

pytestmark = [pytest.mark.proof, pytest.mark.processes, pytest.mark.mpi, NEEDS_MPIRUN]


@pytest.fixture
def hosts():
    """Two hosts of one job, in a folder whose path is short enough for Open MPI's sockets."""
    with tempfile.TemporaryDirectory(prefix="mpi") as folder:
        yield Hosts(Path(folder))


def _mpirun(hosts, order, *, python_options=(), trainer=None, processes=1, **settings):
    """Run the script in which the ranks of both hosts meet."""
    interpreter, *meet = script("meet.py", {"devices": processes, **(trainer or {})}, "fit")
    return mpirun(
        hosts, order, [interpreter, *python_options, *meet], processes=processes, derives_port=True, **settings
    )


def _places(hosts):
    return [(seen["host"], seen["node_rank"], seen["local_rank"], seen["rank"]) for seen in hosts.seen()]


def _check_met(hosts, main_host, world_size):
    for seen in hosts.seen():
        assert seen["met"] == list(range(world_size))
        assert seen["address"] == hosts.address(main_host)
    check_rank_variables(hosts.seen(), world_size // 2)
    assert len({seen["port"] for seen in hosts.seen()}) == 1


def test_ranks_are_those_of_mpirun_where_all_see_the_first_hosts_variables(hosts):
    """Ranks follow mpirun if all get rank 0's SM_CURRENT_HOST, as under the toolkit, even if hosts are unsorted."""
    end = _mpirun(hosts, ("algo-2", "algo-1"), processes=2, options=("-x", "SM_CURRENT_HOST=algo-2"))
    assert end.code == 0, end.output
    assert _places(hosts) == [("algo-2", 0, 0, 0), ("algo-2", 0, 1, 1), ("algo-1", 1, 0, 2), ("algo-1", 1, 1, 3)]
    _check_met(hosts, "algo-2", 4)
    assert not any(seen["mpi4py"] for seen in hosts.seen())


def test_sorted_hosts_need_neither_variables_nor_mpi4py(hosts):
    """If mpirun numbers the hosts in sorted order, the main host follows from the job alone."""
    end = _mpirun(hosts, ("algo-1", "algo-2"))
    assert end.code == 0, end.output
    assert _places(hosts) == [("algo-1", 0, 0, 0), ("algo-2", 1, 0, 1)]
    _check_met(hosts, "algo-1", 2)


def test_mpi4py_tells_the_host_of_rank_zero(hosts, mpi4py):
    """Started with ``python -m mpi4py``, as by the toolkit, rank 0 tells the others its host."""
    end = _mpirun(hosts, ("algo-2", "algo-1"), python_options=("-m", "mpi4py"), python_path=[mpi4py])
    assert end.code == 0, end.output
    assert _places(hosts) == [("algo-2", 0, 0, 0), ("algo-1", 1, 0, 1)]
    _check_met(hosts, "algo-2", 2)
    assert all(seen["mpi4py"] for seen in hosts.seen())


def test_unknown_host_of_rank_zero_ends_the_job(hosts, mpi4py):
    """Without a hint the job fails with advice; mpi4py is not loaded, because its Finalize would wait for rank 0."""
    end = _mpirun(hosts, ("algo-2", "algo-1"), python_path=[mpi4py])
    assert end.code == 1
    assert "TopologyError: mpirun gave host 'algo-1' node rank 1, which is not its position in the table" in end.output
    assert "add -x SM_CURRENT_HOST, or start the script with python -m mpi4py" in end.output
    assert hosts.seen() == []


def test_num_nodes_of_the_trainer_must_fit_mpirun(hosts):
    """A Trainer that asks for more processes than mpirun started fails the job with the table of hosts."""
    end = _mpirun(hosts, ("algo-1", "algo-2"), trainer={"num_nodes": 3})
    assert end.code == 1
    assert "contradicts the job (trainer hosts: 2, processes on each: 1;" in end.output
