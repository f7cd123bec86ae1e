"""What a name stands for: a training job, a tuning job, or a job in an AWS Batch queue."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from botocore.exceptions import ClientError

from lightning_sm.cloud.aws import Clients, error_code
from lightning_sm.errors import AWSError

_MAX_TUNING_NAME_CHARS = 32
# Batch's own id of a job, or its ARN.
_SERVICE_JOB = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|arn:\S+:service-job/\S+")
# DescribeTrainingJob says ValidationException of an unknown name, though its model names only ResourceNotFound.
_UNKNOWN = frozenset({"ValidationException", "ResourceNotFound", "ResourceNotFoundException"})
# Batch's, of a job id.
_UNKNOWN_TO_BATCH = frozenset({"ClientException"})


@dataclass(frozen=True)
class Found:
    """A job as the service describes it.

    Attributes:
        kind: Which API describes it.
        name: Its name; of a job in a queue, its id.
        description: The answer of DescribeTrainingJob, DescribeHyperParameterTuningJob or DescribeServiceJob.
    """

    kind: Literal["training", "tuning", "queued"]
    name: str
    description: Mapping[str, Any]

    @property
    def status(self) -> str:
        """The service's word for where it stands."""
        key = {"training": "TrainingJobStatus", "tuning": "HyperParameterTuningJobStatus", "queued": "status"}[
            self.kind
        ]
        return str(self.description[key])

    @property
    def has_ended(self) -> bool:
        """Whether nothing of it runs any longer."""
        return self.status in {"Completed", "Failed", "Stopped", "SUCCEEDED", "FAILED"}


def find(clients: Clients, name: str) -> Found:
    """Look a job up.

    Args:
        clients: Clients of the AWS APIs.
        name: Name or ARN of a training job or of a tuning job; id or ARN of a job in a Batch queue.

    Raises:
        AWSError: There is no such job; the message names similar ones.
        ClientError: AWS rejects the request.
    """
    if _SERVICE_JOB.fullmatch(name):
        description = _described(lambda: clients.batch.describe_service_job(jobId=name), _UNKNOWN_TO_BATCH)
        if description is None:
            raise AWSError(f"AWS Batch has no job {name} in {clients.batch.meta.region_name}.")
        return Found("queued", description["jobId"], description)
    name = name.rpartition("/")[2]
    sagemaker = clients.sagemaker
    description = _described(lambda: sagemaker.describe_training_job(TrainingJobName=name), _UNKNOWN)
    if description is not None:
        return Found("training", name, description)
    if len(name) <= _MAX_TUNING_NAME_CHARS:
        description = _described(
            lambda: sagemaker.describe_hyper_parameter_tuning_job(HyperParameterTuningJobName=name), _UNKNOWN
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
        found: One training job is itself; a job in a queue has one for each attempt, a tuning job as many as ran.

    Returns:
        Answers of DescribeTrainingJob.

    Raises:
        ClientError: AWS rejects a request.
    """
    if found.kind == "training":
        return [found.description]
    names = _of_tuning_job(clients, found.name) if found.kind == "tuning" else attempts(found.description)
    return [clients.sagemaker.describe_training_job(TrainingJobName=name) for name in names]


def attempts(service_job: Mapping[str, Any]) -> list[str]:
    """Names of the training jobs of a job in a queue, which AWS Batch has started so far."""
    resources = [
        attempt.get("serviceResourceId", {})
        for attempt in [*service_job.get("attempts", []), service_job.get("latestAttempt", {})]
    ]
    # The resource is the ARN of the training job.
    return list(dict.fromkeys(one["value"].rpartition("/")[2] for one in resources if one.get("value")))


def _of_tuning_job(clients: Clients, name: str) -> list[str]:
    pages = clients.sagemaker.get_paginator("list_training_jobs_for_hyper_parameter_tuning_job").paginate(
        HyperParameterTuningJobName=name, SortBy="CreationTime", SortOrder="Ascending"
    )
    return [summary["TrainingJobName"] for page in pages for summary in page["TrainingJobSummaries"]]


def _described(describe: Callable[[], Mapping[str, Any]], unknown: frozenset[str]) -> Mapping[str, Any] | None:
    try:
        return describe()
    except ClientError as error:
        if error_code(error) not in unknown:
            raise
        return None
