"""Jobs in a queue of AWS Batch, which starts them when there is room: the same request, in an envelope.

Source:
    AWS Batch user guide, "Service jobs"; sagemaker 2.257.7, ``aws_batch/batch_api_helper.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_sm.submit.job_file import Batch, Job

# AWS Batch API, SubmitServiceJob; the API model that comes with botocore has none of them.
_MAX_PRIORITY = 9999
_MAX_ATTEMPTS = 10
_MIN_TIMEOUT_S = 60


def batch_problems(job: Job) -> Iterator[str]:
    """Find what the queue would refuse, which the service says only after the job was sent."""
    batch = job.batch
    if batch is None:
        return
    if not batch.queue:
        yield "batch.queue is empty; set it to the name or the ARN of a queue of the type SAGEMAKER_TRAINING."
    if batch.priority is not None and not 0 <= batch.priority <= _MAX_PRIORITY:
        yield f"batch.priority is {batch.priority}; AWS Batch allows 0 to {_MAX_PRIORITY}."
    if not 1 <= batch.attempts <= _MAX_ATTEMPTS:
        yield f"batch.attempts is {batch.attempts}; AWS Batch allows 1 to {_MAX_ATTEMPTS}."
    if batch.timeout_s is not None and batch.timeout_s < _MIN_TIMEOUT_S:
        yield f"batch.timeout_s is {batch.timeout_s}; AWS Batch allows {_MIN_TIMEOUT_S} or more."
    if job.tune is not None:
        yield "batch and tune are set; AWS Batch queues training jobs, not tuning jobs. Remove one."


def service_job(batch: Batch, request: Mapping[str, Any]) -> dict[str, Any]:
    """Build the arguments of SubmitServiceJob.

    Args:
        batch: The queue.
        request: Arguments of CreateTrainingJob.
    """
    # As the SDK does it, the tags are those of the job in the queue.
    payload = {name: value for name, value in request.items() if name != "Tags"}
    tags = {tag["Key"]: tag["Value"] for tag in request.get("Tags", [])}
    timeout = None if batch.timeout_s is None else {"attemptDurationSeconds": batch.timeout_s}
    arguments = {
        "jobName": request["TrainingJobName"],
        "jobQueue": batch.queue,
        "serviceJobType": "SAGEMAKER_TRAINING",
        "serviceRequestPayload": json.dumps(payload),
        "retryStrategy": {"attempts": batch.attempts},
        "schedulingPriority": batch.priority,
        "shareIdentifier": batch.share,
        "quotaShareName": batch.quota_share,
        "timeoutConfig": timeout,
        "tags": tags or None,
    }
    return {name: value for name, value in arguments.items() if value is not None}
