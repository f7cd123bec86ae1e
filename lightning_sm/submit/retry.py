"""Send a job, again if there is no capacity, and watch it to its end."""

from __future__ import annotations

import logging
import random
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from lightning_sm.submit.job_file import Retries

_LOG = logging.getLogger(__name__)

# At submission: quotas of instances that other jobs may give back, and requests that came too fast.
_TRANSIENT_CODES = frozenset(
    {
        "ResourceLimitExceeded",
        "ThrottlingException",
        "Throttling",
        "InsufficientCapacity",
        "InsufficientInstanceCapacity",
    }
)
# "... is 0 Instances, with current utilization of 0 Instances and a request delta of 1 Instances."
_QUOTA = re.compile(r"is (\d+) Instances.* delta of (\d+) Instances", re.DOTALL)
# In the FailureReason of a job that got no hosts: "CapacityError: Unable to provision requested ML compute capacity".
_CAPACITY = "CapacityError"
_FINAL = frozenset({"Completed", "Failed", "Stopped"})
_POLL_S = 20.0

Wait = Callable[[float], object]
_NEVER = threading.Event()


def run_until_capacity(
    submit: Callable[[], str],
    watch: Callable[[str], Mapping[str, Any]] | None,
    retries: Retries,
    wait: Wait = _NEVER.wait,
) -> Mapping[str, Any]:
    """Submit a job until there is capacity for it, and return how it ended.

    Args:
        submit: Starts the job under a new name, and returns the name.
        watch: Waits for the end of a job, and returns its description; None not to wait.
        retries: How often, and how long to pause.
        wait: Sleeps for some seconds.

    Returns:
        The description of the last job; with no ``watch``, only its ``TrainingJobName``.

    Raises:
        ClientError: The service refused the job for another reason, or for a quota that is smaller than the job, or the
            last try for lack of capacity.
    """
    attempt = 0
    while True:
        attempt += 1
        try:
            name = submit()
        except ClientError as error:
            if attempt == retries.max_tries or not _may_pass(error):
                raise
            reason = str(error)
        else:
            _LOG.info("Job %s was submitted.", name)
            description = {"TrainingJobName": name} if watch is None else watch(name)
            reason = description.get("FailureReason", "")
            if attempt == retries.max_tries or _CAPACITY not in reason:
                return description
        pause_s = pause_after(attempt, retries)
        _LOG.warning("No hosts at try %d of %d (%s); again in %.0f s.", *(attempt, retries.max_tries, reason, pause_s))
        wait(pause_s)


def _may_pass(error: ClientError) -> bool:
    """Whether the service may take the same job later."""
    if error.response["Error"]["Code"] not in _TRANSIENT_CODES:
        return False
    quota = _QUOTA.search(str(error))
    return quota is None or int(quota[2]) <= int(quota[1])  # else the account may not have that many at any time


def pause_after(attempt: int, retries: Retries) -> float:
    """Seconds to wait after a try: doubled each time, half of it at random, so that submitters do not meet again.

    Args:
        attempt: The number of the try, from 1.
        retries: The first and the longest pause.
    """
    longest_s: float = min(retries.max_pause_s, retries.first_pause_s * 2 ** (attempt - 1))
    return longest_s * random.uniform(0.5, 1.0)  # noqa: S311 - no secret


def watch(client: Any, name: str, region: str, wait: Wait = _NEVER.wait) -> Mapping[str, Any]:
    """Wait for the end of a job, with a line for every change of its state.

    Ctrl-C stops the waiting, not the job, and says how to look at it and how to stop it; so does an error.

    Args:
        client: A boto3 client of SageMaker.
        name: Name of the job.
        region: Its region.
        wait: Sleeps for some seconds.

    Returns:
        What DescribeTrainingJob says at the end.

    Raises:
        ClientError: The service does not tell, perhaps because the credentials have expired.
        BotoCoreError: It cannot be asked.
    """
    _LOG.info(
        "Its log: aws logs tail /aws/sagemaker/TrainingJobs --log-stream-name-prefix %s --follow --region %s",
        *(name, region),
    )
    seen = ""
    try:
        while True:
            description: Mapping[str, Any] = client.describe_training_job(TrainingJobName=name)
            transitions = description.get("SecondaryStatusTransitions") or [{}]
            message = transitions[-1].get("StatusMessage", "")
            state = f"{description['TrainingJobStatus']}: {description.get('SecondaryStatus', '')} {message}".rstrip()
            if state != seen:
                _LOG.info("Job %s is %s", name, state)
            if description["TrainingJobStatus"] in _FINAL:
                return description
            seen = state
            wait(_POLL_S)
    except (KeyboardInterrupt, ClientError, BotoCoreError):  # of the latter: credentials that expired meanwhile
        of_job = f"--training-job-name {name} --region {region}"
        _LOG.warning(
            "Not waiting any more; the job goes on, and costs money.\n  How it is: aws sagemaker describe-training-job "
            "%s\n  Stop it:   aws sagemaker stop-training-job %s",
            *(of_job, of_job),
        )
        raise
