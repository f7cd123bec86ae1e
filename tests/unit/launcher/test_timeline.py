"""A host exits within the service's 120 s with every accepted stop schedule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sm.errors import JobConfigError
from lightning_sm.job.variables import LATEST_KILL_S, SERVICE_GRACE_S, STOP_SCHEDULE
from lightning_sm.launcher import timeline

_SECONDS = st.floats(0, 1e6).map(lambda seconds: f"{seconds:.6f}")


def _last_exit_s(schedule):
    """Return the longest time between a stop signal and the launcher's exit.

    At ``kill_s`` the launcher stops waiting for ranks, for the upload of a checkpoint, for other hosts, and for the
    report. Each later step has its own limit, and takes no time if no process of the script is left.
    """
    return schedule.kill_s + 2 * timeline.KILL_GRACE_S + timeline.DRAIN_WHEN_STOPPED_S + timeline.LAST_REPORT_S


@given(_SECONDS, _SECONDS)
def test_every_accepted_schedule_ends_in_time(term, kill):
    """With every accepted schedule, the launcher exits before SageMaker kills its container; others are refused."""
    try:
        schedule = STOP_SCHEDULE.read({"LIGHTNING_SM_STOP_SCHEDULE": f"{term},{kill}"})
    except JobConfigError:
        assert float(kill) > LATEST_KILL_S or float(term) > float(kill)
    else:
        assert _last_exit_s(schedule) < SERVICE_GRACE_S


def test_the_latest_schedule_is_accepted_and_a_later_one_says_why():
    """The latest possible schedule is accepted, and the error for a later one states both limits."""
    latest = STOP_SCHEDULE.read({"LIGHTNING_SM_STOP_SCHEDULE": f"95,{LATEST_KILL_S}"})
    assert _last_exit_s(latest) < SERVICE_GRACE_S
    with pytest.raises(JobConfigError, match=r"at most 112 s to SIGKILL: SageMaker kills the container 120 s after"):
        STOP_SCHEDULE.read({"LIGHTNING_SM_STOP_SCHEDULE": "95,300"})


def test_stacks_are_complete_before_the_processes_are_killed():
    """Processes have enough time to write their stacks before they are killed."""
    assert timeline.STACKS_S < timeline.STACKS_BEFORE_KILL_S
