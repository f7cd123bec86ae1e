"""The requests that a dry run shows, by the SDK in this process."""

import json

import pytest

pytest.importorskip("sagemaker", reason="needs version 2 of the SageMaker SDK (extra launch)")

import boto3

from lightning_sm.submit import submit
from lightning_sm.submit.job_file import Group, Job, Range, Tune
from lightning_sm.submit.service_limits import request_problems

pytestmark = [pytest.mark.sdk2, pytest.mark.filterwarnings("ignore")]

JOB = Job(
    image="111122223333.dkr.ecr.us-east-1.amazonaws.com/a:b",
    groups={"trainer": Group("ml.g5.xlarge", 2)},
    role="arn:aws:iam::111122223333:role/a",
    name="digits",
    output="s3://bucket/output",
    hyperparameters={"lr": 0.1, "text": "a b", "api_key": "hunter2"},
    environment={"HF_TOKEN": "hunter2"},
)


@pytest.fixture(autouse=True)
def _session(monkeypatch):
    session = boto3.Session(aws_access_key_id="a", aws_secret_access_key="b", region_name="us-east-1")  # noqa: S106
    monkeypatch.setattr(submit, "new_session", lambda **_: session)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def test_each_target_gets_the_same_training_job(capsys):
    """As a request of its own, or as the definition of a tuning job; secrets are hidden."""
    plain = submit.dry_run(JOB)
    assert plain["Environment"] == {"HF_TOKEN": "(hidden)", "LIGHTNING_SM_JOB_SECRET": "(hidden)"}
    assert plain["HyperParameters"] == {"lr": "0.1", "text": '"a b"', "api_key": "(hidden)"}
    tune = Tune("val_acc", {"lr": Range(0.01, 1)}, "maximize")
    tuning = submit.dry_run(Job(**{**vars(JOB), "tune": tune}))
    assert request_problems(tuning, "CreateHyperParameterTuningJob") == []
    definition = tuning["TrainingJobDefinition"]
    assert definition["StaticHyperParameters"] == {"text": '"a b"', "api_key": "(hidden)"}
    for name in ("Environment", "ResourceConfig", "OutputDataConfig", "RoleArn", "StoppingCondition"):
        assert definition[name] == plain[name]
    assert "hunter2" not in json.dumps([plain, tuning]) + capsys.readouterr().err
