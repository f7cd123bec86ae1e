"""Finding the job that a name refers to."""

import pytest

from lightning_sm.cloud.find import find, find_training_job, training_job_names
from lightning_sm.errors import AWSError
from tests.fakes.aws import NOW, training_job

ARN = "arn:aws:sagemaker:us-east-1:111122223333:training-job/"


def tuning_job(name="tune-1", status="InProgress"):
    """Return an answer of DescribeHyperParameterTuningJob."""
    return {
        "HyperParameterTuningJobName": name,
        "HyperParameterTuningJobArn": f"arn:aws:sagemaker:us-east-1:111122223333:hyper-parameter-tuning-job/{name}",
        "HyperParameterTuningJobConfig": {
            "Strategy": "Random",
            "ResourceLimits": {"MaxNumberOfTrainingJobs": 2, "MaxParallelTrainingJobs": 1},
        },
        "HyperParameterTuningJobStatus": status,
        "CreationTime": NOW,
        "TrainingJobStatusCounters": {"Completed": 1, "InProgress": 1},
        "ObjectiveStatusCounters": {},
    }


@pytest.mark.parametrize("name", ["job-1", ARN + "job-1"])
def test_a_training_job_is_found_by_name_or_arn(clients, name):
    """A training job is found by name or ARN with a single request."""
    clients.answers("sagemaker", "describe_training_job", training_job(), TrainingJobName="job-1")
    found = find(clients, name)
    assert (found.kind, found.name, found.status, found.has_ended) == ("training", "job-1", "Completed", True)


def test_a_name_that_no_training_job_has_may_be_a_tuning_job(clients):
    """If no training job has the name, a tuning job is looked up; its training jobs are listed in start order."""
    clients.refuses("sagemaker", "describe_training_job", "ValidationException", "Requested resource not found.")
    clients.answers("sagemaker", "describe_hyper_parameter_tuning_job", tuning_job())
    found = find(clients, "tune-1")
    assert (found.kind, found.has_ended) == ("tuning", False)
    summaries = [
        {
            "TrainingJobName": name,
            "TrainingJobArn": ARN + name,
            "CreationTime": NOW,
            "TrainingJobStatus": "Completed",
            "TunedHyperParameters": {},
        }
        for name in ("tune-1-001", "tune-1-002")
    ]
    for page in summaries:
        more = {"NextToken": "more"} if page is summaries[0] else {}
        clients.answers(
            "sagemaker", "list_training_jobs_for_hyper_parameter_tuning_job", {"TrainingJobSummaries": [page], **more}
        )
    assert training_job_names(clients, found) == ["tune-1-001", "tune-1-002"]


def test_a_tuning_job_is_not_taken_for_a_training_job(clients):
    """Where a training job is required, the name of a tuning job raises an error."""
    clients.refuses("sagemaker", "describe_training_job", "ValidationException", "Requested resource not found.")
    clients.answers("sagemaker", "describe_hyper_parameter_tuning_job", tuning_job())
    with pytest.raises(AWSError, match="tune-1 is a tuning job; pass the name of a training job"):
        find_training_job(clients, "tune-1")


def test_an_unknown_name_is_an_error(clients):
    """An unknown name raises an error that states the region."""
    clients.refuses("sagemaker", "describe_training_job", "ValidationException", "Requested resource not found.")
    clients.refuses("sagemaker", "describe_hyper_parameter_tuning_job", "ResourceNotFound")
    with pytest.raises(AWSError, match="There is no job cifar in us-east-1"):
        find(clients, "cifar")
