"""Arguments of a training job that tests/integration/submit/test_sdk_parity.py does not cover."""

import re
from dataclasses import replace

import pytest

from lightning_sm.submit.job_file import Group
from lightning_sm.submit.request_limits import request_problems
from lightning_sm.submit.training_job import MAX_NAME_CHARS, new_job_name, training_job
from tests.unit.submit.test_preflight import JOB


def test_names_differ_and_fit_the_service():
    """Names generated within one second differ, and the longest allowed name is not truncated."""
    names = {new_job_name("a") for _ in range(20)}
    assert len(names) > 15
    assert all(re.fullmatch(r"a-\d{4}(-\d\d){5}-[0-9a-f]{3}", name) for name in names)
    longest = new_job_name("a" * MAX_NAME_CHARS)
    assert len(longest) == 63
    request = training_job(JOB, longest, "s3://bucket")
    assert [problem for problem in request_problems(request) if "TrainingJobName" in problem.text] == []


ARN = "arn:aws:sagemaker:eu-west-1:111122223333:mlflow-tracking-server/team-a"
PREFERENCES = [{"InstanceType": f"ml.g5.{size}xlarge", "InstanceCount": 1} for size in ("", 2, 4, 8, 16, 12)]
REQUESTED = [
    {"InfraCheckConfig": {"EnableInfraCheck": True}},
    {"MlflowConfig": {"MlflowResourceArn": ARN, "MlflowExperimentName": "digits"}},
    {"RemoteDebugConfig": {"EnableRemoteDebug": True}},
    {"VpcConfig": {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1"]}},
]


@pytest.mark.parametrize("requested", REQUESTED)
def test_what_no_key_has_is_sent_as_it_is(requested):
    """Settings without a key are passed through under their API names."""
    request = training_job(replace(JOB, request=requested), "job-1", "s3://bucket")
    assert request.items() >= requested.items()
    assert request_problems(request) == []


def test_structures_are_joined_and_lists_are_longer():
    """Mappings are merged with the job file's keys, lists are extended, and other defaults are replaced."""
    access = {"FileSystemId": "fs-01234567", "FileSystemType": "EFS", "DirectoryPath": "/a"}
    shared = {"ChannelName": "shared", "DataSource": {"FileSystemDataSource": {**access, "FileSystemAccessMode": "rw"}}}
    requested = {
        "StoppingCondition": {"MaxPendingTimeInSeconds": 7200},
        "InputDataConfig": [shared],
        "ProfilerConfig": {"DisableProfiler": False},
    }
    request = training_job(replace(JOB, request=requested), "job-1", "s3://bucket")
    assert request["StoppingCondition"] == {"MaxRuntimeInSeconds": 86400, "MaxPendingTimeInSeconds": 7200}
    assert [channel["ChannelName"] for channel in request["InputDataConfig"]] == ["training", "shared"]
    assert request["ProfilerConfig"] == {"DisableProfiler": False}
    assert request_problems(request) == []


def test_the_service_chooses_among_preferences():
    """With preferences, the request has no instance type, because the service does not accept both."""
    requested = {"ResourceConfig": {"InstancePreferences": PREFERENCES[1:]}}
    job = replace(JOB, groups={"a": Group("ml.g5.2xlarge")}, channels={}, request=requested)
    request = training_job(job, "job-1", "s3://bucket")
    assert request["ResourceConfig"] == {"InstancePreferences": PREFERENCES[1:], "VolumeSizeInGB": 30}
    assert request_problems(request) == []


@pytest.mark.parametrize(
    ("requested", "line"),
    [
        (
            {"StoppingCondition": {"MaxPendingTimeInSeconds": 2419201}},
            "request: StoppingCondition.MaxPendingTimeInSeconds is 2419201; the service allows 2419200.",
        ),
        (
            {"StoppingCondition": {"MaxPendingTimeInSeconds": 60}},
            "request: StoppingCondition.MaxPendingTimeInSeconds is 60; the service needs at least 1800.",
        ),
        (
            {"MlflowConfig": {"MlflowResourceArn": ARN, "MlflowRunName": "x" * 257}},
            "request: MlflowConfig.MlflowRunName has 257 characters; the service allows 256.",
        ),
        (
            {"ResourceConfig": {"InstancePreferences": PREFERENCES}},
            "request: ResourceConfig.InstancePreferences has 6 entries; the service allows 5.",
        ),
        (
            {"RemoteDebugConfig": {"EnableRemoteDebug": "yes"}},
            "request: RemoteDebugConfig.EnableRemoteDebug is not true or false.",
        ),
        ({"VpcConfig": {"Subnets": ["subnet-1"]}}, "request: VpcConfig lacks SecurityGroupIds."),
        ({"VpcConfg": {}}, "request: VpcConfg is not known to the service's model. Did you mean VpcConfig?"),
    ],
)
def test_the_limits_are_those_of_the_service(requested, line):
    """Limits come from botocore's model, and the problem names the place in the job file."""
    job = replace(JOB, groups={"a": Group("ml.g5.xlarge")}, channels={}, request=requested)
    (problem,) = request_problems(training_job(job, "job-1", "s3://bucket"))
    assert problem.text.startswith(line)
    assert problem.key.startswith(f"request.{line.split()[1]}")
