"""The plain MPI program under mpirun, and in a job without mpirun."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from app.mpi import average
from tests.integration.emulators import local
from tests.integration.hosts import REPOSITORY, TIMEOUT_S, Hosts
from tests.integration.rank_launchers import MPI_ON_LOOPBACK, NEEDS_MPIRUN, mpirun

PROGRAM = str(average.__file__)


def mpirun_here(processes, *arguments, python_path=()):
    """Run the program on this machine, and return its exit code and output."""
    command = [
        *("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"),
        *MPI_ON_LOOPBACK,
        *("-n", str(processes), sys.executable, PROGRAM, *arguments),
    ]
    # Open MPI creates sockets below TMPDIR, so its path must be short.
    with tempfile.TemporaryDirectory(prefix="mpi") as folder:
        env = {
            "PATH": os.environ["PATH"],
            "HOME": os.environ.get("HOME", "/"),
            "TMPDIR": folder,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *map(str, python_path)]),
        }
        ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    return ended.returncode, ended.stdout + ended.stderr


def check_ranks(output, size):
    """Check that rank 1 got rank 0's message, and that all ranks have the same numbers and both means."""
    assert output.count(f"rank 1 of {size}: received [0 1 2] from rank 0") == 1
    mean = (size - 1) / 2
    said = f"broadcast [0 1 2 3 4 5 6 7 8 9], mean {mean} by gather and broadcast, {mean} by all-reduce"
    ranks = re.findall(rf"rank (\d) of {size}: {re.escape(said)}", output)
    assert sorted(map(int, ranks)) == list(range(size)), output


@pytest.mark.mpi
@NEEDS_MPIRUN
def test_all_ranks_of_a_machine_have_the_mean(mpi4py):
    """With mpi4py, all ranks that mpirun starts on one machine compute the mean."""
    code, output = mpirun_here(4, python_path=(mpi4py,))
    assert code == 0, output
    check_ranks(output, 4)


@pytest.mark.mpi
@NEEDS_MPIRUN
def test_all_hosts_of_a_job_have_the_mean(mpi4py):
    """With mpi4py, all hosts of a job compute the mean.

    Each host has one rank: ranks with the same loopback address but different host names confuse MPI's TCP.
    """
    with tempfile.TemporaryDirectory(prefix="mpi") as folder:
        hosts = Hosts(Path(folder), {"homogeneousCluster": ["algo-1", "algo-2", "algo-3"]})
        ended = mpirun(hosts, hosts.names, [sys.executable, PROGRAM], python_path=[mpi4py])
    assert ended.code == 0, ended.output
    check_ranks(ended.output, 3)


@pytest.mark.mpi
@pytest.mark.processes
@NEEDS_MPIRUN
def test_torch_has_the_same_mean_on_the_ranks_of_mpirun():
    """With ``--torch``, ranks that mpirun starts compute the mean by torch.distributed, without mpi4py."""
    code, output = mpirun_here(2, "--torch")
    assert code == 0, output
    check_ranks(output, 2)


@pytest.mark.processes
def test_the_torch_variant_needs_no_mpirun_in_a_job(tmp_path):
    """Our launcher starts the ranks of each host, and logs nothing about a Trainer, since the program has none."""
    ended = local(tmp_path / "jobs", REPOSITORY, "--group", "trainer=2", "--devices", "2", "--", PROGRAM, "--torch")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    check_ranks(ended.stdout, 4)
    assert "Trainer" not in ended.stdout + ended.stderr


def test_one_process_is_told_what_starts_more(monkeypatch):
    """A single process exits with a hint instead of sending to a rank that does not exist."""
    monkeypatch.delenv("SAGEMAKER_BASE_DIR", raising=False)
    with pytest.raises(SystemExit, match=r"needs at least 2 processes, but there is 1\. Start it with mpirun, or in a"):
        average.main(["--torch"])


@pytest.mark.mpi
@NEEDS_MPIRUN
def test_one_process_of_mpi_is_told_so(mpi4py):
    """Under MPI, a single process exits with the hint to use mpirun."""
    code, output = mpirun_here(1, python_path=(mpi4py,))
    assert code == 1
    assert "needs at least 2 processes, but there is 1. Start it with mpirun." in output
