"""Submitting job files from Python."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from lightning_sm.cloud.installed import check_boto3
from lightning_sm.submit.job_file import read_job
from lightning_sm.submit.overrides import Override


def submit_job(
    path: str | os.PathLike[str], overrides: Mapping[str, Any] | None = None, *, wait: bool = True
) -> Mapping[str, Any]:
    """Check a job file, submit the job, retry while there is no capacity, and wait until the job ends.

    ``lightning-sm submit job.yaml --yes`` does the same, and shows the log. Both need boto3 (extra ``submit``), but
    not torch or the SageMaker SDK.

    Args:
        path: The job file.
        overrides: Values that override the file, by key: ``{"hyperparameters.model.learning_rate": 1e-3,
            "groups.trainer.count": 4}``.
        wait: If False, return as soon as the service has accepted the job.

    Returns:
        The last response from DescribeTrainingJob, or DescribeHyperParameterTuningJob with ``tune``. If ``wait`` is
        False, only the job's name, as ``TrainingJobName`` or ``HyperParameterTuningJobName``.

    Raises:
        AWSError: The region or credentials are missing.
        SDKError: boto3 is not installed.
        SubmitError: The file or the job has problems, which the message lists, or the service rejects the job.
    """
    check_boto3("submit_job")
    from lightning_sm.submit.submit import send  # noqa: PLC0415 - loads boto3, which may be missing

    changes = [
        Override(key, json.dumps(value, default=os.fspath), f"overrides[{key!r}]", is_json=True)
        for key, value in (overrides or {}).items()
    ]
    return send(read_job(path, changes), wait=wait)
