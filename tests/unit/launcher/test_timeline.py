"""The seconds of a host's end fit into the service's 120 s, whatever stop schedule is accepted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sm.errors import JobConfigError
from lightning_sm.job.stopping import StopSchedule
from lightning_sm.job.variables import LATEST_KILL_S, SERVICE_GRACE_S
from lightning_sm.launcher import timeline

_SECONDS = st.floats(0, 1e6).map(lambda seconds: f"{seconds:.6f}")


@given(_SECONDS, _SECONDS)
def test_every_accepted_schedule_ends_in_time(term, kill):
    """A launcher has exited before SageMaker kills its container; other schedules are refused."""
    try:
        schedule = StopSchedule.from_environment({"LIGHTNING_SM_STOP_SCHEDULE": f"{term},{kill}"})
    except JobConfigError:
        assert float(kill) > LATEST_KILL_S or float(term) > float(kill)
    else:
        assert timeline.last_exit_s(schedule) < SERVICE_GRACE_S


def test_the_latest_schedule_is_accepted_and_a_later_one_says_why():
    """The message names both limits."""
    latest = StopSchedule.from_environment({"LIGHTNING_SM_STOP_SCHEDULE": f"95,{LATEST_KILL_S}"})
    assert timeline.last_exit_s(latest) < SERVICE_GRACE_S
    with pytest.raises(JobConfigError, match=r"at most 112 s to SIGKILL: SageMaker kills the container 120 s after"):
        StopSchedule.from_environment({"LIGHTNING_SM_STOP_SCHEDULE": "95,300"})


def test_stacks_are_complete_before_the_processes_are_killed():
    """Processes get the time to write them."""
    assert timeline.STACKS_S < timeline.STACKS_BEFORE_KILL_S
