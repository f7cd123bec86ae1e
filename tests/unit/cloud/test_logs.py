"""The log of a job: merged across hosts, without repeated lines, and with failures first."""

import re

import pytest

from lightning_sm.cloud.logs import Log, failure_first
from tests.fakes.aws import event

# The time of a line; the fake's events have times a few seconds after the epoch.
TIME = re.compile(r"^1970-01-01 00:0\d:\d\d ")


def untimed(lines):
    """Return the lines without their time."""
    return [TIME.sub("", line, count=1) for line in lines]


def shown(log):
    """Return the new lines as printed, without their time."""
    return untimed(log.new_lines())


def page(*events, more=None):
    """Return an answer of FilterLogEvents."""
    return {"events": list(events), **({"nextToken": more} if more else {})}


def streams(*names):
    """Return an answer of DescribeLogStreams."""
    return {"logStreams": [{"logStreamName": f"job-1/{name}"} for name in names]}


def test_lines_of_all_hosts_are_merged_by_time_over_empty_pages(clients):
    """Each line names its host. The prefix ends with a slash, so that job-1 does not match job-10."""
    clients.answers(
        "logs",
        "filter_log_events",
        page(event(2, "algo-2", "b"), event(1, "algo-1", "a\n"), more="1"),
        logGroupName="/aws/sagemaker/TrainingJobs",
        logStreamNamePrefix="job-1/",
        startTime=0,
    )
    clients.answers("logs", "filter_log_events", page(more="2"))
    clients.answers("logs", "filter_log_events", page(event(3, "algo-1", "c")))
    assert shown(Log(clients.logs, "job-1")) == ["algo-1 | a", "algo-2 | b", "algo-1 | c"]


def test_late_lines_are_read_and_known_ones_are_not_repeated(clients):
    """The next request starts 60 s before the newest line, since lines from slower hosts may still arrive."""
    log = Log(clients.logs, "job-1")
    clients.answers("logs", "filter_log_events", page(event(100, "algo-1", "a"), event(101, "algo-1", "b")))
    assert shown(log) == ["algo-1 | a", "algo-1 | b"]
    clients.answers(
        "logs",
        "filter_log_events",
        page(event(100, "algo-1", "a"), event(7, "algo-2", "late", 100_500), event(101, "algo-1", "b")),
        logGroupName="/aws/sagemaker/TrainingJobs",
        logStreamNamePrefix="job-1/",
        startTime=41_000,
    )
    assert shown(log) == ["algo-2 | late"]
    clients.answers("logs", "filter_log_events", page(event(102, "algo-2", "c"), event(101, "algo-1", "b")))
    assert shown(log) == ["algo-2 | c"]


def test_only_the_end_of_an_overwritten_line_is_shown(clients):
    """Only the text after the last carriage return is kept, because a progress bar overwrites its line."""
    log = Log(clients.logs, "job-1")
    clients.answers("logs", "filter_log_events", page(event(1, "algo-1", "10%\r 50%\r100%\r\n")))
    assert shown(log) == ["algo-1 | 100%"]


def test_each_line_has_its_time(clients):
    """Times are in UTC, as on the service's pages, whatever the hosts' time zones."""
    clients.answers("logs", "filter_log_events", page(event(1, "algo-1", "a", time_ms=1_795_664_840_832)))
    log = Log(clients.logs, "job-1")
    assert list(log.new_lines()) == ["2026-11-26 03:47:20 algo-1 | a"]


def test_a_failure_begins_with_its_reason_and_the_host_that_it_names(clients):
    """The reason and the whole log of the host it names precede the last lines (up to 50) of other hosts."""
    log = Log(clients.logs, "job-1")
    clients.answers("logs", "describe_log_streams", streams("algo-10-5", "algo-2-5", "algo-1-5"))
    lines = {
        "algo-2": [event(1, "algo-2", "begins"), event(2, "algo-2", "ValueError: nan")],
        "algo-1": [event(number, "algo-1", f"{number}") for number in range(52)],
        "algo-10": [event(1, "algo-10", "a")],
    }
    for host, found in lines.items():
        clients.answers(
            "logs",
            "filter_log_events",
            page(*found),
            logGroupName="/aws/sagemaker/TrainingJobs",
            logStreamNames=[f"job-1/{host}-5"],
        )
    said = failure_first(log, "AlgorithmError: ValueError: nan on data host algo-2, exit code: 1")
    assert untimed(said) == [
        "failed: AlgorithmError: ValueError: nan on data host algo-2, exit code: 1",
        "--- algo-2: whole log",
        "algo-2 | begins",
        "algo-2 | ValueError: nan",
        "--- algo-1: last lines (up to 50)",
        *(f"algo-1 | {number}" for number in range(2, 52)),
        "--- algo-10: last lines (up to 50)",
        "algo-10 | a",
    ]


@pytest.mark.parametrize("operation", ["filter_log_events", "describe_log_streams"])
def test_a_job_without_a_log_has_no_lines(clients, operation):
    """The log group does not exist before an account's first job."""
    clients.refuses("logs", operation, "ResourceNotFoundException")
    log = Log(clients.logs, "job-1")
    assert (shown(log) if operation == "filter_log_events" else list(log.streams_by_host())) == []
