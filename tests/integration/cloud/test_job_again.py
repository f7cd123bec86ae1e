"""``lightning-sm jobs again`` against a fake service on this machine. Nothing is ever sent to AWS."""

from __future__ import annotations

import json

import pytest

from lightning_sm.job.hyperparameters import to_argv
from lightning_sm.job.variables import JOB_SECRET
from tests.fakes.sagemaker_service import FakeService

ENDED = {
    "TrainingJobStatus": "Completed",
    "SecondaryStatus": "Completed",
    "CreationTime": 1.7e9,
    "ModelArtifacts": {"S3ModelArtifacts": "s3://bucket/out/model.tar.gz"},
    "FinalMetricDataList": [],
}
JOB = {
    "TrainingJobName": "digits-2026-11-25-10-20-30-0ab",
    "AlgorithmSpecification": {
        "TrainingInputMode": "File",
        "TrainingImage": "111122223333.dkr.ecr.us-east-1.amazonaws.com/lightning-sm:1",
        "MetricDefinitions": [{"Name": "val_acc", "Regex": "val_acc=(.*)"}],
    },
    "RoleArn": "arn:aws:iam::111122223333:role/training",
    "HyperParameters": {
        "sagemaker_program": '"train.py"',
        "sagemaker_submit_directory": '"s3://bucket/out/digits/source/sourcedir.tar.gz"',
        "text": '"ab"',
        "lr": "0.1",
    },
    "Environment": {"NAME": "value", JOB_SECRET.name: "old"},
    "InputDataConfig": [{"ChannelName": "training", "DataSource": {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": "s3://bucket/data"}}}],
    "OutputDataConfig": {"S3OutputPath": "s3://bucket/out", "CompressionType": "NONE"},
    "ResourceConfig": {
        "VolumeSizeInGB": 30,
        "InstanceGroups": [
            {"InstanceGroupName": "trainer", "InstanceType": "ml.g5.xlarge", "InstanceCount": 2},
            {"InstanceGroupName": "data", "InstanceType": "ml.c5.xlarge", "InstanceCount": 1},
        ],
    },
    "StoppingCondition": {"MaxRuntimeInSeconds": 3600},
    "CheckpointConfig": {"S3Uri": "s3://bucket/ck", "LocalPath": "/opt/ml/checkpoints"},
    "EnableNetworkIsolation": False,
}  # fmt: skip


@pytest.fixture
def service():
    """A service that has the job, with a tag of the user's and a tag of AWS's."""
    tags = [{"Key": "project", "Value": "digits"}, {"Key": "aws:x", "Value": "y"}]
    with FakeService(endings=[ENDED], requests=[JOB], tags=tags) as service:
        yield service


def test_the_request_is_sent_again_with_changes(service, jobs):
    """The new request has the changes, a new name and a new secret; keys that only responses have are dropped."""
    settings = ["hyperparameters.text=c d", "hyperparameters.n=3", "groups.trainer.count=4", "max_run_s=7200"]
    settings += ["environment.NAME=other", "spot={max_wait_s: 9000}", "max_restarts=2", "tags.who=me"]
    code, _, log = jobs(service, "again", JOB["TrainingJobName"], "--yes", *(f"--set={one}" for one in settings))
    assert code == 0, log
    _, request = service.requests
    name = request["TrainingJobName"]
    assert name.startswith("digits-20")
    assert name != JOB["TrainingJobName"]
    assert len(name) == len(JOB["TrainingJobName"])
    assert f"Submitted {name}. To follow it: lightning-sm jobs logs -f {name}" in log
    assert f"the new job resumes from {JOB['TrainingJobName']}'s checkpoints" in log
    assert request["Environment"].pop(JOB_SECRET.name) != "old"
    assert request == {
        **{key: value for key, value in JOB.items() if key != "EnableNetworkIsolation"},
        "TrainingJobName": name,
        "HyperParameters": {
            **{key: value for key, value in JOB["HyperParameters"].items() if "text" not in key},
            "text": '"c d"',
            "n": "3",
        },
        "Environment": {"NAME": "other", "LIGHTNING_SM_MAX_RESTARTS": "2"},
        "CheckpointConfig": {"S3Uri": "s3://bucket/ck"},
        "ProfilerConfig": {"DisableProfiler": True},
        "ResourceConfig": {
            "VolumeSizeInGB": 30,
            "InstanceGroups": [
                {"InstanceGroupName": "trainer", "InstanceType": "ml.g5.xlarge", "InstanceCount": 4},
                {"InstanceGroupName": "data", "InstanceType": "ml.c5.xlarge", "InstanceCount": 1},
            ],
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": 7200, "MaxWaitTimeInSeconds": 9000},
        "EnableManagedSpotTraining": True,
        "Tags": [{"Key": "project", "Value": "digits"}, {"Key": "who", "Value": "me"}],
    }


def test_a_key_without_a_value_is_removed_and_nothing_is_sent_by_a_dry_run(service, jobs):
    """A null value removes a key, as in a job file; a dry run shows the request without secrets."""
    name = JOB["TrainingJobName"]
    code, output, log = jobs(service, "again", name, "--set=checkpoints=null", "--dry-run")
    assert code == 0, log
    request = json.loads(output)
    assert "CheckpointConfig" not in request
    assert request["Environment"][JOB_SECRET.name] == "(hidden)"
    assert "resumes" not in log
    assert len(service.requests) == 1


def test_hyperparameters_of_an_sdk_stay_text(service, jobs):
    """Plain text from an SDK stays text, and JSON stays JSON: the script gets the intended values."""
    service.requests[0] = {
        **JOB,
        "HyperParameters": {"sagemaker_program": "train.py", "optimizer": "adam"},
        "ResourceConfig": {"VolumeSizeInGB": 30, "InstanceType": "ml.g5.xlarge", "InstanceCount": 1},
    }
    settings = (
        "--set=hyperparameters.optimizer=sgd",
        "--set=hyperparameters.lr=0.1",
        "--set=groups.homogeneousCluster.count=2",
    )
    code, _, log = jobs(service, "again", JOB["TrainingJobName"], "--yes", *settings)
    assert code == 0, log
    request = service.requests[1]
    assert set(to_argv(request["HyperParameters"])) >= {"--optimizer=sgd", "--lr=0.1"}
    assert request["ResourceConfig"] == {"VolumeSizeInGB": 30, "InstanceType": "ml.g5.xlarge", "InstanceCount": 2}


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("max_run", "--set max_run: expected KEY=VALUE"),
        ("max_run=3", "--set max_run: max_run is not a key of a job file. Did you mean max_run_s"),
        ("max_run_s=1h", "--set max_run_s: max_run_s is '1h'; expected a whole number of seconds"),
        ("source_dir=src", "--set source_dir: source_dir is"),
        ("groups.other.count=3", "groups.other"),
        ("groups.data.instance_type=ml.c5.huge", "ml.c5.huge"),
        ("hyperparameters.api_key=sk-0123456789abcdef0123456789abcdef", "looks like a secret"),
        ("output=s4://x", "output"),
    ],
)
def test_wrong_changes_are_named_and_nothing_is_sent(service, jobs, setting, words):
    """The message names the option, what was expected, and similar keys."""
    code, _, log = jobs(service, "again", JOB["TrainingJobName"], f"--set={setting}")
    assert code == 2
    assert words in log
    assert len(service.requests) == 1
