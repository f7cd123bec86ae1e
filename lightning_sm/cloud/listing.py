"""Tables of jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from tabulate import tabulate

from lightning_sm._text import clock_time
from lightning_sm.cloud.aws import Clients
from lightning_sm.cloud.hosts import shown_hosts

_MS = 1000
_UNFINISHED = ("SUBMITTED", "PENDING", "RUNNABLE", "SCHEDULED", "STARTING", "RUNNING")


def training_jobs_table(clients: Clients, text: str | None, status: str | None, limit: int, now: datetime) -> str:
    """Show the newest training jobs.

    Args:
        clients: Clients of the AWS APIs.
        text: Part of their names; None for any.
        status: Their status, such as InProgress; None for any.
        limit: Maximum number of rows. A request for each finds out its hosts.
        now: The current time.

    Raises:
        ClientError: AWS rejects a request.
    """
    filters = {"NameContains": text, "StatusEquals": status}
    pages = clients.sagemaker.get_paginator("list_training_jobs").paginate(
        SortBy="CreationTime",
        SortOrder="Descending",
        PaginationConfig={"MaxItems": limit, "PageSize": min(limit, 100)},
        **{name: value for name, value in filters.items() if value is not None},
    )
    names = [summary["TrainingJobName"] for page in pages for summary in page["TrainingJobSummaries"]]
    rows = [_row(clients.sagemaker.describe_training_job(TrainingJobName=name), now) for name in names]
    headers = ["job", "status", "created (UTC)", "ran", "hosts"]
    return _table(rows, headers, f"training jobs in {clients.sagemaker.meta.region_name}")


def queue_table(clients: Clients, queue: str, limit: int) -> str:
    """Show the jobs of an AWS Batch queue that have not ended.

    Args:
        clients: Clients of the AWS APIs.
        queue: Its name or ARN.
        limit: Maximum number of rows.

    Raises:
        ClientError: AWS rejects a request.
    """
    rows: list[list[str]] = []
    for status in reversed(_UNFINISHED):  # the API takes one status at a time, and RUNNING if none is named
        pages = clients.batch.get_paginator("list_service_jobs").paginate(jobQueue=queue, jobStatus=status)
        rows += [
            [one["jobName"], one["jobId"], one["status"], _utc(one["createdAt"] / _MS)]
            for page in pages
            for one in page["jobSummaryList"]
        ]
    return _table(rows[:limit], ["job", "id", "status", "created (UTC)"], f"unfinished jobs in the queue {queue}")


def _row(description: Mapping[str, Any], now: datetime) -> list[str]:
    started = description.get("TrainingStartTime")
    ended = description.get("TrainingEndTime") or now
    ran = "" if started is None else clock_time(max(0.0, (ended - started).total_seconds()))
    status = description["TrainingJobStatus"]
    if status == "InProgress":
        status = description["SecondaryStatus"]
    if description.get("EnableManagedSpotTraining"):
        status = f"{status}, spot"
    created = _utc(description["CreationTime"].timestamp())
    return [description["TrainingJobName"], status, created, ran, shown_hosts(description)]


def _table(rows: Sequence[Sequence[str]], headers: Sequence[str], what: str) -> str:
    return tabulate(rows, headers, disable_numparse=True) if rows else f"There are no {what}."


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M")
