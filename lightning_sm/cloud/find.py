"""The lookup of a name, which may be that of a training job or of a tuning job."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from botocore.exceptions import ClientError

from lightning_sm.cloud.aws import Clients, error_code
from lightning_sm.errors import AWSError

# The states in which no part of a job runs.
ENDED = frozenset({"Completed", "Failed", "Stopped"})
_MAX_TUNING_NAME_CHARS = 32
# For an unknown name, DescribeTrainingJob raises ValidationException, although its model names only ResourceNotFound.
_UNKNOWN = frozenset({"ValidationException", "ResourceNotFound", "ResourceNotFoundException"})


@dataclass(frozen=True)
class Found:
    """A job as the service describes it.

    Attributes:
        kind: The kind of job, and so the API that describes it.
        name: Its name.
        description: The answer of DescribeTrainingJob or DescribeHyperParameterTuningJob.
    """

    kind: Literal["training", "tuning"]
    name: str
    description: Mapping[str, Any]

    @property
    def status(self) -> str:
        """The service's word for its status."""
        key = {"training": "TrainingJobStatus", "tuning": "HyperParameterTuningJobStatus"}[self.kind]
        return str(self.description[key])

    @property
    def has_ended(self) -> bool:
        """Whether no part of it still runs."""
        return self.status in ENDED


def find(clients: Clients, name: str) -> Found:
    """Look up a job.

    Args:
        clients: Clients of the AWS APIs.
        name: Name or ARN of a training job or of a tuning job.

    Raises:
        AWSError: There is no such job; the message names similar ones.
        ClientError: AWS rejects the request.
    """
    name = name.rpartition("/")[2]
    sagemaker = clients.sagemaker
    description = _described(lambda: sagemaker.describe_training_job(TrainingJobName=name))
    if description is not None:
        return Found("training", name, description)
    if len(name) <= _MAX_TUNING_NAME_CHARS:
        description = _described(
            lambda: sagemaker.describe_hyper_parameter_tuning_job(HyperParameterTuningJobName=name)
        )
        if description is not None:
            return Found("tuning", name, description)
    newest = sagemaker.list_training_jobs(MaxResults=100, SortBy="CreationTime", SortOrder="Descending")
    names = [summary["TrainingJobName"] for summary in newest["TrainingJobSummaries"]]
    close = [one for one in names if one.startswith(name)] or difflib.get_close_matches(name, names)
    hint = f"Did you mean {' or '.join(close[:3])}?" if close else "'lightning-sm jobs list' shows the newest ones."
    raise AWSError(f"There is no job {name} in {sagemaker.meta.region_name}. {hint}")


def training_jobs(clients: Clients, found: Found) -> list[Mapping[str, Any]]:
    """Describe the training jobs that a job consists of, in the order of their start.

    Args:
        clients: Clients of the AWS APIs.
        found: A training job, which consists of itself, or a tuning job.

    Returns:
        Answers of DescribeTrainingJob.

    Raises:
        ClientError: AWS rejects a request.
    """
    if found.kind == "training":
        return [found.description]
    pages = clients.sagemaker.get_paginator("list_training_jobs_for_hyper_parameter_tuning_job").paginate(
        HyperParameterTuningJobName=found.name, SortBy="CreationTime", SortOrder="Ascending"
    )
    names = [summary["TrainingJobName"] for page in pages for summary in page["TrainingJobSummaries"]]
    return [clients.sagemaker.describe_training_job(TrainingJobName=name) for name in names]


def _described(describe: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any] | None:
    try:
        return describe()
    except ClientError as error:
        if error_code(error) not in _UNKNOWN:
            raise
        return None
