"""The arguments of a training job that no SDK compared with (tests/integration/submit/test_sdk_parity.py) has."""

import re
from dataclasses import replace

import pytest

from lightning_sm.submit.job_file import Group
from lightning_sm.submit.service_limits import request_problems
from lightning_sm.submit.training_job import NAME_ENDING_CHARS, new_job_name, training_job
from tests.unit.submit.test_preflight import JOB
from tests.unit.submit.test_request import make_request


def test_names_differ_and_fit_the_service():
    """Those of one second, too; the longest name that a job file may give is not cut."""
    names = {new_job_name("a") for _ in range(20)}
    assert len(names) > 15
    assert all(re.fullmatch(r"a-\d{4}(-\d\d){5}-[0-9a-f]{3}", name) for name in names)
    longest = new_job_name("a" * (63 - NAME_ENDING_CHARS))
    assert len(longest) == 63
    request = training_job(make_request(JOB, {}), longest, "s3://bucket")
    assert [problem for problem in request_problems(request) if "TrainingJobName" in problem.text] == []


ARN = "arn:aws:sagemaker:eu-west-1:111122223333:mlflow-tracking-server/team-a"
ONE = {"trainer": Group("ml.g5.xlarge", 4, {"ml.g6.xlarge": 4, "ml.g5.12xlarge": 1})}


@pytest.mark.parametrize(
    ("keys", "member", "expected"),
    [
        ({"infra_check": True}, "InfraCheckConfig", {"EnableInfraCheck": True}),
        ({"infra_check": False}, "InfraCheckConfig", None),
        (
            {"max_pending_s": 1800},
            "StoppingCondition",
            {"MaxRuntimeInSeconds": 86400, "MaxPendingTimeInSeconds": 1800},
        ),
        ({"mlflow": ARN}, "MlflowConfig", None),
        (
            {"mlflow": ARN, "mlflow_experiment": "digits"},
            "MlflowConfig",
            {"MlflowResourceArn": ARN, "MlflowExperimentName": "digits"},
        ),
        (
            {"mlflow": ARN, "mlflow_run": "first"},
            "MlflowConfig",
            {"MlflowResourceArn": ARN, "MlflowRunName": "first"},
        ),
        (
            {"groups": ONE, "channels": {}},
            "ResourceConfig",
            {
                "InstancePreferences": [
                    {"InstanceType": "ml.g5.xlarge", "InstanceCount": 4},
                    {"InstanceType": "ml.g6.xlarge", "InstanceCount": 4},
                    {"InstanceType": "ml.g5.12xlarge", "InstanceCount": 1},
                ],
                "VolumeSizeInGB": 30,
            },
        ),
    ],
)
def test_newer_settings_of_the_service_are_sent_as_it_knows_them(keys, member, expected):
    """In its model's form, and only if the job file has them."""
    request = training_job(make_request(replace(JOB, **keys), {}), "job-1", "s3://bucket")
    assert request.get(member) == expected
    assert request_problems(request) == []


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (
            {"max_pending_s": 2419201},
            "max_pending_s: StoppingCondition.MaxPendingTimeInSeconds is 2419201; the service",
        ),
        (
            {"mlflow": ARN, "mlflow_experiment": "x" * 257},
            "mlflow_experiment: MlflowConfig.MlflowExperimentName has 257",
        ),
        ({"mlflow": ARN, "mlflow_run": "x" * 257}, "mlflow_run: MlflowConfig.MlflowRunName has 257 characters"),
        (
            {"groups": {"a": Group("ml.g5.xlarge", 1, {f"ml.g5.{size}xlarge": 1 for size in (2, 4, 8, 16, 12)})}},
            "groups: ResourceConfig.InstancePreferences has 6 entries; the service allows 5.",
        ),
        (
            {"groups": {"a": Group("ml.g5.xlarge", 1, {"ml.g5.3xlarge": 1})}},
            "groups: ResourceConfig.InstancePreferences[1].InstanceType is 'ml.g5.3xlarge'",
        ),
    ],
)
def test_their_limits_are_those_of_the_service(keys, line):
    """By botocore's model, with the key of the job file."""
    request = training_job(make_request(replace(JOB, channels={}, **keys), {}), "job-1", "s3://bucket")
    (problem,) = request_problems(request)
    assert problem.text.startswith(line)
    assert problem.key == line.partition(":")[0]
