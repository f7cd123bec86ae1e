"""The log of a job, merged over its hosts, with the reason for a failure first.

CloudWatch Logs keeps a stream for each host and attempt, ``<job>/algo-<n>-<seconds since the epoch>``.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from botocore.exceptions import ClientError

from lightning_sm.cloud.aws import error_code
from lightning_sm.cloud.hosts import groups_of

_GROUP = "/aws/sagemaker/TrainingJobs"
# Events of one host may arrive later than newer ones of another: read this far back again.
_LATE_MS = 60_000
# The names of hosts in failure files, which the service passes on unchanged; it has no field for the host.
_HOST = re.compile(r"algo-\d+")
# The launcher's first log line. Nothing else says in which group the service has put a host.
_BANNER = re.compile(r"\| host (?P<host>\S+), group (?P<group>[^,]+), role \w+")
# How many lines of each host that did not fail are shown.
_OTHERS_TAIL = 50


@dataclass(frozen=True)
class LogLine:
    """One line of a log.

    Attributes:
        time_ms: Milliseconds since the Unix epoch.
        host: Name of the host, such as algo-1.
        text: The line, without the parts that a progress bar has overwritten.
    """

    time_ms: int
    host: str
    text: str


class Log:
    """The log of one training job.

    Args:
        client: boto3's client of CloudWatch Logs.
        description: An answer of DescribeTrainingJob.
    """

    def __init__(self, client: Any, description: Mapping[str, Any]) -> None:
        self._client = client
        # With the slash, because the streams of job-10 begin with job-1, too.
        self._prefix = f"{description['TrainingJobName']}/"
        groups = groups_of(description)
        self._is_heterogeneous = len(groups) > 1
        self._group_by_host: dict[str, str] = {}
        self._seen: dict[str, int] = {}
        self._latest_ms = 0

    def new_lines(self) -> Iterator[LogLine]:
        """Read the lines added since the last call; the first call reads everything.

        Raises:
            ClientError: AWS rejects the request.
        """
        start_ms = max(0, self._latest_ms - _LATE_MS)
        self._seen = {event: time_ms for event, time_ms in self._seen.items() if time_ms >= start_ms}
        for page in self._pages(startTime=start_ms):
            new = [event for event in page if event["eventId"] not in self._seen]
            for event in sorted(new, key=lambda event: event["timestamp"]):
                self._seen[event["eventId"]] = event["timestamp"]
                self._latest_ms = max(self._latest_ms, event["timestamp"])
                line = _line(event, event["logStreamName"])
                self._learn_group(line)
                yield line

    def lines_of(self, streams: Sequence[str]) -> Iterator[LogLine]:
        """Read the whole log of one host.

        Args:
            streams: Its streams.

        Raises:
            ClientError: AWS rejects the request.
        """
        for page in self._pages(logStreamNames=list(streams)):
            for event in page:
                line = _line(event, event["logStreamName"])
                self._learn_group(line)
                yield line

    def streams_by_host(self) -> dict[str, list[str]]:
        """Return the streams of each host, the oldest first; hosts in the order of their numbers.

        Raises:
            ClientError: AWS rejects the request.
        """
        names: list[str] = []
        try:
            pages = self._client.get_paginator("describe_log_streams").paginate(
                logGroupName=_GROUP, logStreamNamePrefix=self._prefix
            )
            names = [stream["logStreamName"] for page in pages for stream in page["logStreams"]]
        except ClientError as error:
            _ignore_missing_log(error)
        streams: dict[str, list[str]] = {}
        for name in sorted(names, key=_started):
            streams.setdefault(_host(name), []).append(name)
        return dict(sorted(streams.items(), key=lambda item: (len(item[0]), item[0])))

    def shown(self, line: LogLine) -> str:
        """Return a line with its time (UTC), the name of its host, and that of its group if the job has several."""
        time = datetime.fromtimestamp(line.time_ms / 1e3, timezone.utc)
        return f"{time:%Y-%m-%d %H:%M:%S} {self.shown_host(line.host)} | {line.text}"

    def shown_host(self, host: str) -> str:
        """Return the name of a host, and of its group if the job has several and the group is known."""
        group = self._group_by_host.get(host) if self._is_heterogeneous else None
        return host if group is None else f"{host} {group}"

    def _learn_group(self, line: LogLine) -> None:
        banner = _BANNER.search(line.text)
        if banner is not None and banner["host"] == line.host:
            self._group_by_host[line.host] = banner["group"]

    def _pages(self, **arguments: Any) -> Iterator[list[dict[str, Any]]]:
        """Yield events page by page; pages before the last one may be empty."""
        if "logStreamNames" not in arguments:
            arguments["logStreamNamePrefix"] = self._prefix
        arguments["logGroupName"] = _GROUP
        try:
            while True:
                page = self._client.filter_log_events(**arguments)
                yield page.get("events", [])
                if not page.get("nextToken"):
                    return
                arguments["nextToken"] = page["nextToken"]
        except ClientError as error:
            _ignore_missing_log(error)


def failure_first(log: Log, reason: str) -> Iterator[str]:
    """Yield the log of a failed job: the reason, the logs of hosts that it names, and the end of each other host's log.

    Args:
        log: The log.
        reason: The service's reason.

    Raises:
        ClientError: AWS rejects a request.
    """
    yield f"failed: {reason}"
    streams = log.streams_by_host()
    named = set(_HOST.findall(reason))
    for host in sorted(streams, key=lambda one: one not in named):
        lines = deque(log.lines_of(streams[host]), maxlen=None if host in named else _OTHERS_TAIL)
        extent = "whole log" if host in named else f"last lines (up to {_OTHERS_TAIL})"
        yield f"--- {log.shown_host(host)}: {extent}"
        yield from map(log.shown, lines)


def _line(event: Mapping[str, Any], stream: str) -> LogLine:
    # A progress bar overwrites its line after each carriage return.
    text = str(event["message"]).rstrip("\r\n").rpartition("\r")[2]
    return LogLine(event["timestamp"], _host(stream), text)


def _host(stream: str) -> str:
    return stream.rpartition("/")[2].rpartition("-")[0]


def _started(stream: str) -> int:
    seconds = stream.rpartition("-")[2]
    return int(seconds) if seconds.isdecimal() else 0


def _ignore_missing_log(error: ClientError) -> None:
    """Raise the error, unless there is no log yet: an account's first job does not even have the group of streams."""
    if error_code(error) != "ResourceNotFoundException":
        raise error
