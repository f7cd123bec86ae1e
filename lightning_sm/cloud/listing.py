"""Tables of jobs."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from lightning_sm._table import draw_table
from lightning_sm._text import clock_time
from lightning_sm.cloud.aws import Clients
from lightning_sm.cloud.hosts import shown_hosts


def training_jobs_table(clients: Clients, text: str | None, status: str | None, limit: int, now: datetime) -> str:
    """Show the newest training jobs.

    Args:
        clients: Clients of the AWS APIs.
        text: Part of their names; None for any.
        status: Their status, such as InProgress; None for any.
        limit: Maximum number of rows, each of which takes a request for the job's hosts.
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
    if not rows:
        return f"There are no training jobs in {clients.sagemaker.meta.region_name}."
    return draw_table(rows, ["job", "status", "created (UTC)", "ran", "hosts"])


def _row(description: Mapping[str, Any], now: datetime) -> list[str]:
    started = description.get("TrainingStartTime")
    ended = description.get("TrainingEndTime") or now
    ran = "" if started is None else clock_time(max(0.0, (ended - started).total_seconds()))
    status = description["TrainingJobStatus"]
    if status == "InProgress":
        status = description["SecondaryStatus"]
    if description.get("EnableManagedSpotTraining"):
        status = f"{status}, spot"
    created = f"{description['CreationTime'].astimezone(timezone.utc):%Y-%m-%d %H:%M}"
    return [description["TrainingJobName"], status, created, ran, shown_hosts(description)]
