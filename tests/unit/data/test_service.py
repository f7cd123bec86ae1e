"""The data service in a job: what both ends must agree on."""

import pytest

from lightning_sm.data.settings import DataServiceSettings
from lightning_sm.data.trainer.connection import ServiceConnection
from lightning_sm.errors import DataSettingsError
from lightning_sm.job.topology import Topology
from tests.fakes.job_folder import make_job

GROUPS = {"gpu": ["algo-1", "algo-2"], "data": ["algo-3"]}
OF_MPI = {f"OMPI_COMM_WORLD_{name}": value for name, value in {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "0"}.items()}


def test_a_rank_of_mpirun_without_the_name_of_the_job_is_refused(monkeypatch):
    """It would look for the data hosts at another port than they listen on."""
    job = make_job(GROUPS, "algo-2")
    for name, value in {**OF_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DataSettingsError, match=r"algo-2 without TRAINING_JOB_NAME.*algo-3.*-x TRAINING_JOB_NAME"):
        ServiceConnection.of_job(job, Topology.from_job(job), DataServiceSettings())
