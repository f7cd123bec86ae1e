"""The command that stops a job."""

from __future__ import annotations

from botocore.exceptions import ClientError

from lightning_sm.cloud.aws import Clients, error_code
from lightning_sm.cloud.find import Found, find

_GRACE_S = 120


def stop(clients: Clients, found: Found) -> str:
    """Ask the service to stop a job, unless it has ended.

    Args:
        clients: Clients of the AWS APIs.
        found: The job.

    Returns:
        What this call has done, for people.

    Raises:
        ClientError: AWS rejects the request.
    """
    if found.has_ended:
        return _ended(found)
    if found.status in {"Stopping", "Deleting"}:
        return f"{found.name} is {found.status} already."
    try:
        if found.kind == "tuning":
            clients.sagemaker.stop_hyper_parameter_tuning_job(HyperParameterTuningJobName=found.name)
            return f"Stopping {found.name} and all its training jobs."
        clients.sagemaker.stop_training_job(TrainingJobName=found.name)
    except ClientError as error:
        if error_code(error) != "ValidationException":
            raise
        again = find(clients, found.name)  # the job may have ended meanwhile
        if not again.has_ended:
            raise
        return _ended(again)
    return (
        f"Stopping {found.name}: its hosts have {_GRACE_S} s to save a checkpoint; output and checkpoints are kept.\n"
        f"Watch it end: lightning-sm jobs logs -f {found.name}"
    )


def _ended(found: Found) -> str:
    return f"{found.name} has ended: {found.status}."
