"""Remote debugging of a job that runs: a shell on its hosts through AWS Systems Manager.

Source: SageMaker developer guide, "Access a training container through AWS Systems Manager (SSM) for remote debugging";
API, UpdateTrainingJob.
"""

from __future__ import annotations

from lightning_sm.cloud.aws import Clients
from lightning_sm.cloud.find import Found
from lightning_sm.errors import AWSError

# API, UpdateTrainingJob, RemoteDebugConfig: the states in which the service accepts the change.
_CHANGEABLE = ("Downloading", "Training")


def set_remote_debug(clients: Clients, found: Found, *, enable: bool) -> str:
    """Allow or forbid a shell on the hosts of a training job.

    Args:
        clients: Clients of the AWS APIs.
        found: The job.
        enable: Whether to allow it.

    Returns:
        What this call has done, for people.

    Raises:
        AWSError: It is a tuning job, or the job is in a state in which the service does not accept the change.
        ClientError: AWS rejects the request.
    """
    if found.kind == "tuning":
        raise AWSError(f"{found.name} is a tuning job; pass the name of one of its training jobs.")
    state = found.description.get("SecondaryStatus", found.status)
    if state not in _CHANGEABLE:
        raise AWSError(
            f"{found.name} is {state}; remote debugging can be changed while a job is {' or '.join(_CHANGEABLE)}."
        )
    clients.sagemaker.update_training_job(TrainingJobName=found.name, RemoteDebugConfig={"EnableRemoteDebug": enable})
    if not enable:
        return f"Remote debugging of {found.name} is off."
    return (
        f"Remote debugging of {found.name} is on. With the AWS command line and its Session Manager plugin:\n"
        f"  lightning-sm jobs shell {found.name} algo-1"
    )
