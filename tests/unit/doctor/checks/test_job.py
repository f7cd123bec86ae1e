"""The doctor's checks of the job: files, channels, arguments."""

from __future__ import annotations

import pytest

from lightning_sm.doctor.checks import job
from lightning_sm.doctor.context import Context
from lightning_sm.doctor.report import Status
from tests.fakes.job_folder import resource_config, write_job

_GROUPS = {"trainer": ["algo-2", "algo-1"], "data": ["algo-3"]}
_TYPES = dict.fromkeys(_GROUPS, "ml.m5.large")


def _context(base, **env):
    return Context.of({"SAGEMAKER_BASE_DIR": str(base), **env}, 20)


def _found(check, context):
    return {result.name: result for result in check(context)}


def test_facts_of_a_job(tmp_path):
    """Job, host, hosts, rendezvous and checkpoint folder are shown with where they are from."""
    base = write_job(
        tmp_path,
        resource_config(_GROUPS, "algo-2", instance_types=_TYPES),
        checkpoint={"LocalPath": "/opt/ml/checkpoints", "S3Uri": "s3://bucket/x"},
    )
    found = _found(job.facts, _context(base, TRAINING_JOB_NAME="my-job", LIGHTNING_SM_MAIN_PORT="23456"))
    assert {result.status for result in found.values()} == {Status.OK}
    assert found["job"].found == f"my-job; hosts from {base}/input/config/resourceconfig.json"
    assert found["this host"].found == "algo-2, group trainer (ml.m5.large), role trainer, node rank 1 of 2"
    assert found["hosts"].found == "trainers: algo-1, algo-2; data: algo-3"
    expected = "algo-1, port 23456 (LIGHTNING_SM_MAIN_PORT), interface eth0; data hosts listen on 13456"
    assert found["rendezvous"].found == expected
    assert found["checkpoints"].found == "/opt/ml/checkpoints, copied to s3://bucket/x"


def test_off_sagemaker_is_fine(tmp_path):
    """Without a job there is one row, which says so."""
    (result,) = job.facts(_context(tmp_path))
    assert result.status is Status.OK
    assert result.found.startswith("Not a SageMaker host")


def test_malformed_file_is_a_problem_that_quotes_the_error(tmp_path):
    """A broken resourceconfig.json is named with what it begins with."""
    (result,) = job.facts(_context(write_job(tmp_path, resources="{not json")))
    assert result.status is Status.PROBLEM
    assert "resourceconfig.json" in result.found
    assert "{not json" in result.found


def test_contradicting_groups_are_a_problem(tmp_path):
    """Where no group trains, the facts are shown and the contradiction is a problem."""
    base = write_job(tmp_path, resource_config({"data": ["algo-1"]}, "algo-1"))
    results = list(job.facts(_context(base)))
    assert [result.status for result in results] == [Status.PROBLEM, Status.OK, Status.OK]
    assert "No group trains" in results[0].found


def test_channels_are_listed_and_missing_folders_found(tmp_path):
    """A File channel without its folder is a problem; a Pipe channel has none."""
    channels = {
        "training": {"TrainingInputMode": "File"},
        "stream": {"TrainingInputMode": "Pipe", "S3DistributionType": "ShardedByS3Key"},
    }
    base = write_job(tmp_path, resource_config(_GROUPS, "algo-1"), channels=channels)
    missing, listed = job.channels(_context(base))
    assert missing.status is Status.PROBLEM
    assert f"{base}/input/data/training" in missing.found
    assert listed.found == "training (File), stream (Pipe, ShardedByS3Key)"
    (base / "input" / "data" / "training").mkdir(parents=True)
    assert [result.status for result in job.channels(_context(base))] == [Status.OK]


def test_hyperparameters_are_counted_and_not_shown(tmp_path):
    """The report has no values of hyperparameters: people paste it elsewhere."""
    values = {"subcommand": "fit", "token": "secret"}
    (result,) = job.hyperparameters(
        _context(write_job(tmp_path, resource_config(_GROUPS, "algo-1"), hyperparameters=values))
    )
    assert result.found == "2; arguments of the script: 2"


def test_hyperparameter_that_becomes_no_argument_is_a_problem(tmp_path):
    """What the launcher would refuse is found before the job runs."""
    values = {"x__0": "a", "x__2": "c"}
    (result,) = job.hyperparameters(
        _context(write_job(tmp_path, resource_config(_GROUPS, "algo-1"), hyperparameters=values))
    )
    assert result.status is Status.PROBLEM
    assert "x__1" in result.found


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("mp_parameters", '{"partitions": 2, "horovod": true}', "strategy=pipeline"),
        ("sagemaker_mpi_num_of_processes_per_host", "none", "expected a positive whole number"),
        ("sagemaker_distribution_instance_groups", '["data"]', "training groups are ['trainer']"),
    ],
)
def test_distribution_that_the_launcher_refuses_is_a_problem(tmp_path, name, value, said):
    """What distribution={...} asks for in vain is found before the job runs."""
    resources = resource_config(_GROUPS, "algo-1", instance_types=_TYPES)
    (result,) = job.hyperparameters(_context(write_job(tmp_path, resources, hyperparameters={name: value})))
    assert result.status is Status.PROBLEM
    assert name in result.found
    assert said in result.found
