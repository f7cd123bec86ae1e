"""The follower of a job until it ends, which shows its states, and its log on request."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from lightning_sm._log import command_logger
from lightning_sm._text import for_terminal, plain
from lightning_sm.cloud.aws import Clients, error_code
from lightning_sm.cloud.find import ENDED, Found
from lightning_sm.cloud.logs import Log

_LOG = command_logger(__name__)

_STATE_EVERY_S = 20.0
_LOG_EVERY_S = 4.0
# The last lines of a job arrive after its end. Give up after this many consecutive reads of the log without a new line.
_LAST_LOOKS = 2
# The service has no field for the exit code, but ends the reason with it: "AlgorithmError: <failure file>, exit code:
# 137".
_EXIT_CODE = re.compile(r"exit code:? (\d+)\s*\.?\s*$")

Sleep = Callable[[float], object]
# A sleep, because Ctrl-C interrupts it, and nothing else ends a wait for the service.
_sleep = time.sleep


def follow(clients: Clients, found: Found, *, shows_log: bool, sleep: Sleep = _sleep) -> Mapping[str, Any]:
    """Wait until a job ends; log every change of its state, and write its log to stdout.

    Ctrl-C or an error ends the wait, not the job; a warning then says how to stop the job.

    Args:
        clients: Clients of the AWS APIs.
        found: A training job or a tuning job.
        shows_log: Whether to write the log, if it may be read. A tuning job has no log of its own; its counts are
            shown instead.
        sleep: Sleeps for some seconds.

    Returns:
        The last description of the job.

    Raises:
        ClientError: AWS rejects a request, for example because the credentials have expired.
        BotoCoreError: AWS cannot be reached.
    """
    with _how_to_stop(found.name):
        if found.kind == "tuning":
            return _tuning_job(clients, found.name, sleep)
        return _training_job(clients, found.name, sleep, shows_log=shows_log)


def exit_code(description: Mapping[str, Any]) -> int:
    """Return the exit code of a job that has ended: 0 for success, else that of its hosts if known, else 1.

    Args:
        description: The description of a training job or a tuning job.
    """
    status = description.get("TrainingJobStatus") or description.get("HyperParameterTuningJobStatus")
    if status == "Completed":
        return 0
    match = _EXIT_CODE.search(reason_of(description))
    return int(match[1]) or 1 if match else 1


def reason_of(description: Mapping[str, Any]) -> str:
    """Return why a job failed, in the service's words; empty if it gives no reason."""
    return plain(str(description.get("FailureReason", "")))  # it is also logged


def _training_job(clients: Clients, name: str, sleep: Sleep, *, shows_log: bool) -> Mapping[str, Any]:
    states = _States(f"Job {name}")
    log = None
    pause_s = _LOG_EVERY_S if shows_log else _STATE_EVERY_S
    since_state_s = _STATE_EVERY_S
    while True:
        if since_state_s >= _STATE_EVERY_S:
            since_state_s = 0.0
            description: Mapping[str, Any] = clients.sagemaker.describe_training_job(TrainingJobName=name)
            status = description["TrainingJobStatus"]
            transitions = description.get("SecondaryStatusTransitions") or [{}]
            message = transitions[-1].get("StatusMessage", "")
            states.show(f"{status}: {description.get('SecondaryStatus', '')} {message}".rstrip())
        if shows_log:
            log = log or Log(clients.logs, description)
            shows_log = _can_write_new(log)
        if status in ENDED:
            break
        sleep(pause_s)
        since_state_s += pause_s
    looks = 0
    while log is not None and shows_log and looks < _LAST_LOOKS:
        sleep(_LOG_EVERY_S)
        looks = 0 if _write_new(log) else looks + 1
    return description


def _tuning_job(clients: Clients, name: str, sleep: Sleep) -> Mapping[str, Any]:
    states = _States(f"Tuning job {name}")
    while True:
        description: Mapping[str, Any] = clients.sagemaker.describe_hyper_parameter_tuning_job(
            HyperParameterTuningJobName=name
        )
        states.show(f"{description['HyperParameterTuningJobStatus']}: {tuning_progress(description)}")
        if description["HyperParameterTuningJobStatus"] in ENDED:
            return description
        sleep(_STATE_EVERY_S)


def tuning_progress(description: Mapping[str, Any]) -> str:
    """Say how many training jobs of a tuning job have ended or run, and which is the best.

    Args:
        description: An answer of DescribeHyperParameterTuningJob.
    """
    counters = description["TrainingJobStatusCounters"]
    failed = counters.get("RetryableError", 0) + counters.get("NonRetryableError", 0)
    counts = {
        "completed": counters.get("Completed", 0),
        "running": counters.get("InProgress", 0),
        "stopped early": counters.get("Stopped", 0),
        "failed": failed,
    }
    words = ", ".join(f"{count} {word}" for word, count in counts.items() if count) or "no training job yet"
    best = description.get("BestTrainingJob")
    metric = (best or {}).get("FinalHyperParameterTuningJobObjectiveMetric")
    if best is None or metric is None:
        return words
    values = " ".join(f"{key}={value}" for key, value in sorted(best["TunedHyperParameters"].items()))
    return f"{words}; best {metric['MetricName']}={metric['Value']:.6g} by {best['TrainingJobName']} with {values}"


class _States:
    """A log of states, in which each new one appears once."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._last = ""

    def show(self, state: str) -> None:
        if state != self._last:
            self._last = state
            _LOG.info("%s is %s", self._job, state)


def _can_write_new(log: Log) -> bool:
    """Write a log's new lines; if access to it is denied, warn and return False, as waiting for the job still works."""
    try:
        _write_new(log)
    except ClientError as error:
        if error_code(error) != "AccessDeniedException":
            raise
        _LOG.warning("Waiting without the job's log, which cannot be read: %s", error)
        return False
    return True


def _write_new(log: Log) -> bool:
    found = False
    for line in log.new_lines():
        found = True
        sys.stdout.write(for_terminal(f"{log.shown(line)}\n", sys.stdout))
    sys.stdout.flush()
    return found


@contextmanager
def _how_to_stop(name: str) -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, ClientError, BotoCoreError):
        _LOG.warning(
            "Stopped waiting. The job may still be running, and is billed.\n"
            "  Follow it: lightning-sm jobs logs -f %s\n"
            "  Stop it:   lightning-sm jobs stop %s",
            name,
            name,
        )
        raise
