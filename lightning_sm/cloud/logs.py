"""The log of a job, merged from all hosts, with the reason for a failure first.

CloudWatch Logs keeps a stream for each host and attempt, ``<job>/algo-<n>-<seconds since the epoch>``.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from botocore.exceptions import ClientError

from lightning_sm.cloud.aws import error_code

_GROUP = "/aws/sagemaker/TrainingJobs"
# Events of one host may arrive later than newer events of another. Read again from this far back.
_LATE_MS = 60_000
# Matches host names in failure files, which the service passes on unchanged. The API has no field for the host.
_HOST = re.compile(r"algo-\d+")
# How many lines to show of each host that the failure reason does not name.
_OTHERS_TAIL = 50


class Log:
    """The log of one training job. Each line begins with its time (UTC) and the name of its host.

    Args:
        client: boto3's CloudWatch Logs client.
        job_name: Name of the training job.
    """

    def __init__(self, client: Any, job_name: str) -> None:
        self._client = client
        self._prefix = f"{job_name}/"  # the slash excludes the streams of job-10 from the log of job-1
        self._seen: dict[str, int] = {}
        self._latest_ms = 0

    def new_lines(self) -> Iterator[str]:
        """Read the lines added since the last call; the first call reads everything.

        Raises:
            ClientError: AWS rejects the request.
        """
        start_ms = max(0, self._latest_ms - _LATE_MS)
        self._seen = {event: time_ms for event, time_ms in self._seen.items() if time_ms >= start_ms}
        for page in self._pages("filter_log_events", startTime=start_ms, logStreamNamePrefix=self._prefix):
            new = [event for event in page.get("events", []) if event["eventId"] not in self._seen]
            for event in sorted(new, key=lambda event: event["timestamp"]):
                self._seen[event["eventId"]] = event["timestamp"]
                self._latest_ms = max(self._latest_ms, event["timestamp"])
                yield _line(event)

    def lines_of(self, streams: Sequence[str]) -> Iterator[str]:
        """Read the whole log of one host.

        Args:
            streams: The streams of the host.

        Raises:
            ClientError: AWS rejects the request.
        """
        for page in self._pages("filter_log_events", logStreamNames=list(streams)):
            yield from map(_line, page.get("events", []))

    def streams_by_host(self) -> dict[str, list[str]]:
        """Return the streams of each host, oldest first, with hosts in the order of their numbers.

        Raises:
            ClientError: AWS rejects the request.
        """
        pages = self._pages("describe_log_streams", logStreamNamePrefix=self._prefix)
        names = [stream["logStreamName"] for page in pages for stream in page["logStreams"]]
        streams: dict[str, list[str]] = {}
        for name in sorted(names):  # by time: names end with a ten-digit Unix timestamp
            streams.setdefault(_host(name), []).append(name)
        return dict(sorted(streams.items(), key=lambda item: (len(item[0]), item[0])))

    def _pages(self, operation: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        """Yield the pages of a request; none if there is no log yet."""
        try:
            yield from self._client.get_paginator(operation).paginate(logGroupName=_GROUP, **arguments)
        except ClientError as error:
            if error_code(error) != "ResourceNotFoundException":  # before an account's first job, there is no log group
                raise


def failure_first(log: Log, reason: str) -> Iterator[str]:
    """Yield the log of a failed job: the reason, the logs of the hosts that it names, and the last lines of the others.

    Args:
        log: The log.
        reason: The failure reason that the service gives.

    Raises:
        ClientError: AWS rejects a request.
    """
    yield f"failed: {reason}"
    streams = log.streams_by_host()
    named = set(_HOST.findall(reason))
    for host in sorted(streams, key=lambda name: name not in named):
        lines = deque(log.lines_of(streams[host]), maxlen=None if host in named else _OTHERS_TAIL)
        extent = "whole log" if host in named else f"last lines (up to {_OTHERS_TAIL})"
        yield f"--- {host}: {extent}"
        yield from lines


def _line(event: Mapping[str, Any]) -> str:
    time = datetime.fromtimestamp(event["timestamp"] / 1e3, timezone.utc)
    # Keep only the last state of a progress bar, which overwrites its line after each carriage return.
    text = str(event["message"]).rstrip("\r\n").rpartition("\r")[2]
    return f"{time:%Y-%m-%d %H:%M:%S} {_host(event['logStreamName'])} | {text}"


def _host(stream: str) -> str:
    return stream.rpartition("/")[2].rpartition("-")[0]
