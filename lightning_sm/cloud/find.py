"""Looking up a training job or tuning job by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from botocore.exceptions import ClientError

from lightning_sm.cloud.aws import Clients, error_code
from lightning_sm.errors import AWSError

Kind: TypeAlias = Literal["training", "tuning"]
# The final states of a job.
ENDED = frozenset({"Completed", "Failed", "Stopped"})
# DescribeTrainingJob raises ValidationException for an unknown name, although its model only lists ResourceNotFound.
_UNKNOWN = frozenset({"ValidationException", "ResourceNotFound", "ResourceNotFoundException"})


@dataclass(frozen=True)
class Found:
    """A job as the service describes it.

    Attributes:
        kind: The kind of job, which determines the API that describes it.
        name: Name of the job.
        description: The response from DescribeTrainingJob or DescribeHyperParameterTuningJob.
    """

    kind: Kind
    name: str
    description: Mapping[str, Any]

    @property
    def status(self) -> str:
        """The status that the service reports."""
        key = {"training": "TrainingJobStatus", "tuning": "HyperParameterTuningJobStatus"}[self.kind]
        return str(self.description[key])

    @property
    def has_ended(self) -> bool:
        """Whether the whole job has ended."""
        return self.status in ENDED


def describe(clients: Clients, kind: Kind, name: str) -> Found:
    """Return the service's description of a job.

    Raises:
        ClientError: AWS rejects the request, for example because there is no such job.
    """
    if kind == "training":
        description = clients.sagemaker.describe_training_job(TrainingJobName=name)
    else:
        description = clients.sagemaker.describe_hyper_parameter_tuning_job(HyperParameterTuningJobName=name)
    return Found(kind, name, description)


def find(clients: Clients, name: str) -> Found:
    """Look up a job.

    Args:
        clients: Clients for the AWS APIs.
        name: Name or ARN of a training job or of a tuning job.

    Raises:
        AWSError: There is no such job.
        ClientError: AWS rejects the request.
    """
    name = name.rpartition("/")[2]
    for kind in get_args(Kind):
        try:
            return describe(clients, kind, name)
        except ClientError as error:  # noqa: PERF203 - two calls at most
            if error_code(error) not in _UNKNOWN:
                raise
    region = clients.sagemaker.meta.region_name
    raise AWSError(f"There is no job {name} in {region}. 'lightning-sm jobs list' shows the newest ones.")


def find_training_job(clients: Clients, name: str) -> Found:
    """Look up a training job.

    Raises:
        AWSError: There is no such job, or it is a tuning job.
        ClientError: AWS rejects the request.
    """
    found = find(clients, name)
    if found.kind == "tuning":
        best = found.description.get("BestTrainingJob", {}).get("TrainingJobName", "one of its training jobs")
        raise AWSError(f"{found.name} is a tuning job; pass the name of a training job: {best}.")
    return found


def training_job_names(clients: Clients, found: Found) -> list[str]:
    """Return the names of a tuning job's training jobs, oldest first."""
    pages = clients.sagemaker.get_paginator("list_training_jobs_for_hyper_parameter_tuning_job").paginate(
        HyperParameterTuningJobName=found.name, SortBy="CreationTime", SortOrder="Ascending"
    )
    return [summary["TrainingJobName"] for page in pages for summary in page["TrainingJobSummaries"]]
