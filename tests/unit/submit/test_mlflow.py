"""SageMaker's managed MLflow, or another server, in the job file."""

import pytest

from lightning_sm.submit.job_file import Group, Job
from lightning_sm.submit.preflight import check
from lightning_sm.submit.request import make_request

SERVER = "arn:aws:sagemaker:eu-west-1:111122223333:mlflow-tracking-server/team-a"
APP = "arn:aws-us-gov:sagemaker:us-gov-west-1:111122223333:mlflow-app/app-ABC123"


def job(**keys):
    """A job that has no other problem."""
    image = "111122223333.dkr.ecr.eu-west-1.amazonaws.com/image:1"
    role = "arn:aws:iam::111122223333:role/training"
    return Job(image, {"trainer": Group("ml.g5.xlarge")}, role, **keys)


@pytest.mark.parametrize("uri", [SERVER, APP, "https://mlflow.example.com", "databricks"])
def test_the_script_gets_the_address(uri):
    """As the variable that MLFlowLogger reads where its tracking_uri is left out."""
    assert check(job(mlflow=uri), "cloud").problems == []
    assert make_request(job(mlflow=uri), {}).job.environment["MLFLOW_TRACKING_URI"] == uri
    assert "MLFLOW_TRACKING_URI" not in make_request(job(), {}).job.environment


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"mlflow": "team-a"}, "mlflow is 'team-a'; expected https://..., or the ARN of"),
        ({"mlflow": SERVER.replace("sagemaker", "s3")}, "mlflow-tracking-server/NAME or .../mlflow-app/ID"),
        (
            {"mlflow": SERVER, "environment": {"MLFLOW_TRACKING_URI": APP}},
            f"mlflow is {SERVER}, but environment sets MLFLOW_TRACKING_URI={APP}. Remove one of them.",
        ),
        ({"mlflow": SERVER, "network_isolation": True}, "hosts without a network do not reach MLflow"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_sent(keys, text):
    """Both kinds of ARN are known; values that contradict each other are both named."""
    (problem,) = check(job(**keys), "cloud").problems
    assert text in problem.text
