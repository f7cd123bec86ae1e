"""Tests of the data service in a job: the ports, hosts and secret that both ends must agree on."""

import dataclasses

import pytest

from lightning_sm.data import service
from lightning_sm.data.settings import DataServiceSettings
from lightning_sm.data.trainer.connection import ServiceConnection
from lightning_sm.errors import DataSettingsError
from lightning_sm.job.topology import Topology
from lightning_sm.job.variables import JOB_SECRET
from tests.fakes.job_folder import make_job

GROUPS = {"gpu": ["algo-1", "algo-2"], "data": ["algo-3"]}
OF_MPI = {f"OMPI_COMM_WORLD_{name}": value for name, value in {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "0"}.items()}


def test_a_rank_of_mpirun_without_the_name_of_the_job_is_refused(monkeypatch):
    """A rank that does not know the job's name would look for the data hosts on the wrong port."""
    job = make_job(GROUPS, "algo-2")
    for name, value in {**OF_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DataSettingsError, match=r"algo-2 without TRAINING_JOB_NAME.*algo-3.*-x TRAINING_JOB_NAME"):
        ServiceConnection.of_job(job, Topology.from_job(job), DataServiceSettings())


@pytest.mark.parametrize("secret", [None, "of this job " * 4])
def test_a_data_host_trusts_the_hosts_of_its_job_and_warns_without_a_secret(monkeypatch, caplog, secret):
    """A data host trusts the job's hosts, by address or name, and the user's entries in ``trust``."""
    served = []

    class Main:
        def __init__(self, settings, _):
            served.append(settings)

        def serve(self):
            pass

    monkeypatch.setattr(service, "MainProcess", Main)
    monkeypatch.delenv(JOB_SECRET.name, raising=False)
    if secret is not None:
        monkeypatch.setenv(JOB_SECRET.name, secret)
    job = dataclasses.replace(make_job(GROUPS, "algo-3"), addresses={"algo-3": "127.0.0.4", "algo-2": "127.0.0.3"})
    service.serve(job, Topology.from_job(job), DataServiceSettings(trust=["10.0.0.0/16"]))
    assert sorted(served[0].trusted) == ["10.0.0.0/16", "127.0.0.3", "127.0.0.4", "algo-1"]
    assert ("This job has no secret" in caplog.text) is (secret is None)
