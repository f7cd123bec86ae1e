"""Keys derived from the job's secret, one per purpose and job."""

from __future__ import annotations

import pytest

from lightning_sm.errors import JobConfigError
from lightning_sm.job.host_keys import job_key, new_secret
from lightning_sm.job.variables import JOB_SECRET


def test_hosts_of_a_job_have_the_same_key_and_nobody_else():
    """The key depends on the secret, the purpose and the job, and on nothing else."""
    env = new_secret()
    keys = [
        job_key("data", "job", env),
        job_key("launchers", "job", env),
        job_key("data", "other", env),
        job_key("data", "job", new_secret()),
        job_key("data", "job", {}),
        job_key("dat", "ajob", env),
    ]
    assert len(set(keys)) == len(keys)
    assert job_key("data", "job", dict(env)) == keys[0]
    assert job_key("data", "job", {JOB_SECRET.name: ""}) == job_key("data", "job", {})


def test_a_secret_that_is_too_short_is_refused_unseen():
    """A secret that is too short raises an error that states the required length and hides the secret."""
    with pytest.raises(JobConfigError, match=r"^LIGHTNING_SM_JOB_SECRET='\(hidden\)': expected at least 32 ") as raised:
        job_key("data", "job", {JOB_SECRET.name: "hunter2"})
    assert "hunter2" not in str(raised.value)
