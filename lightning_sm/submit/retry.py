"""Retrying a submission while there is no capacity for the job."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from botocore.exceptions import ClientError

from lightning_sm._log import command_logger
from lightning_sm.submit.job_file import Retries

_LOG = command_logger(__name__)

# Temporary errors: throttling, a quota that other jobs currently use up, or no capacity.
_THROTTLED = frozenset({"ThrottlingException", "Throttling"})
_NO_CAPACITY_NOW = frozenset({"ResourceLimitExceeded", "InsufficientCapacity", "InsufficientInstanceCapacity"})
# "... is 0 Instances, with current utilization of 0 Instances and a request delta of 1 Instances."
_QUOTA = re.compile(r"is (\d+) Instances.* delta of (\d+) Instances", re.DOTALL)
# The FailureReason of a job that got no hosts: "CapacityError: Unable to provision requested ML compute capacity".
_NO_CAPACITY = "CapacityError"


def submit_until_capacity(
    submit: Callable[[], str],
    watch: Callable[[str], Mapping[str, Any]] | None,
    retries: Retries,
    sleep: Callable[[float], object] = time.sleep,
) -> Mapping[str, Any]:
    """Submit a job, retry while there is no capacity for it, and return its final description.

    Args:
        submit: Starts the job under a new name, and returns the name.
        watch: Waits until the job with the given name ends, and returns its description. If None, do not wait.
        retries: Maximum number of submissions, and the pauses between them.
        sleep: Sleeps for the given number of seconds.

    Returns:
        The description of the last job; without ``watch``, only its ``TrainingJobName``.

    Raises:
        ClientError: The service rejected the job on the last try, or for a reason that will not pass, such as a
            quota smaller than the job.
    """
    attempt = 0
    while True:
        attempt += 1
        try:
            name = submit()
        except ClientError as error:
            if attempt >= retries.max_tries or not _may_pass(error):
                raise
            reason = str(error)
        else:
            if watch is None:
                return {"TrainingJobName": name}
            description = watch(name)
            reason = description.get("FailureReason", "")
            if attempt >= retries.max_tries or _NO_CAPACITY not in reason:
                return description
        pause_s = pause_after(attempt, retries)
        _LOG.warning("Try %d of %d got no hosts (%s). Retrying in %.0f s.", attempt, retries.max_tries, reason, pause_s)
        sleep(pause_s)


def _may_pass(error: ClientError) -> bool:
    """Return whether the service might accept the same job later."""
    if error.response["Error"]["Code"] not in _THROTTLED | _NO_CAPACITY_NOW:
        return False
    quota = _QUOTA.search(str(error))
    return quota is None or int(quota[2]) <= int(quota[1])  # a job larger than the quota never fits


def pause_after(attempt: int, retries: Retries) -> float:
    """Return how many seconds to wait after a try; tries are numbered from 1.

    The pause doubles each time; half of it is random, so that clients that failed together do not retry together.
    """
    longest_s: float = min(retries.max_pause_s, retries.first_pause_s * 2 ** (attempt - 1))
    return longest_s * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
