"""The requests that a dry run shows."""

import json
from dataclasses import replace

import boto3
import pytest

from lightning_sm.errors import SubmitError
from lightning_sm.submit import submit
from lightning_sm.submit.job_file import Group, Job, Range, Tune
from lightning_sm.submit.request_limits import request_problems

JOB = Job(
    image="111122223333.dkr.ecr.us-east-1.amazonaws.com/a:b",
    groups={"trainer": Group("ml.g5.xlarge", 2)},
    role="arn:aws:iam::111122223333:role/a",
    name="digits",
    output="s3://bucket/output",
    hyperparameters={"lr": 0.1, "text": "a b", "api_key": "hunter2"},
    environment={"HF_TOKEN": "hunter2"},
    not_secret=["api_key", "HF_TOKEN"],
)


@pytest.fixture(autouse=True)
def _session(monkeypatch):
    session = boto3.Session(region_name="us-east-1")
    monkeypatch.setattr(submit, "new_session", lambda *_, **__: session)


def test_each_target_gets_the_same_training_job(capsys):
    """A plain request and a tuning job's definition describe the same training job; secrets are hidden."""
    plain = submit.dry_run(JOB)
    assert plain["Environment"] == {"HF_TOKEN": "(hidden)", "LIGHTNING_SM_JOB_SECRET": "(hidden)"}
    assert plain["HyperParameters"] == {"lr": "0.1", "text": '"a b"', "api_key": "(hidden)"}
    tune = Tune("val_acc", {"lr": Range(0.01, 1)}, "maximize")
    tuning = submit.dry_run(replace(JOB, tune=tune))
    assert request_problems(tuning, "CreateHyperParameterTuningJob") == []
    definition = tuning["TrainingJobDefinition"]
    assert definition["StaticHyperParameters"] == {"text": '"a b"', "api_key": "(hidden)"}
    for name in ("Environment", "ResourceConfig", "OutputDataConfig", "RoleArn", "StoppingCondition"):
        assert definition[name] == plain[name]
    assert "hunter2" not in json.dumps([plain, tuning]) + capsys.readouterr().err


def test_a_secret_is_a_problem(capsys):
    """A secret is neither sent nor quoted, and the message says where to keep it."""
    with pytest.raises(SubmitError) as caught:
        submit.dry_run(replace(JOB, not_secret=["api_key"]))
    assert str(caught.value).startswith("1 problem; nothing was sent:\nenvironment.HF_TOKEN looks like a secret.")
    assert "AWS Secrets Manager" in str(caught.value)
    assert "hunter2" not in str(caught.value) + capsys.readouterr().err
