"""The settings that are environment variables: their names, and those in seconds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lightning_sm.errors import JobConfigError
from lightning_sm.job.stopping import StopSchedule
from lightning_sm.job.variables import NAMES, farewell_s, prepare_s

_README = Path(__file__).parents[3] / "README.md"
_NO_TIMES = ["nan", "inf", "-inf", "-5", "1e10", "1e400", "10s", "x", "1,2", " "]


def test_names_are_those_of_the_readme():
    """Users find every setting in the README, and nothing in it that is none."""
    table = re.findall(r"^\| `(LIGHTNING_SM_\w+)` \|", _README.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(table) == sorted(NAMES)


@pytest.mark.parametrize(
    ("read", "name", "default"),
    [(farewell_s, "LIGHTNING_SM_FAREWELL_S", 10.0), (prepare_s, "LIGHTNING_SM_PREPARE_S", 1800.0)],
)
def test_seconds_and_their_defaults(read, name, default):
    """A number of seconds is taken as it is; nothing, and an empty text, mean the default."""
    assert read({}) == read({name: ""}) == default
    assert read({name: "2.5"}) == 2.5


@pytest.mark.parametrize(
    ("read", "name", "text"),
    [
        *((farewell_s, "LIGHTNING_SM_FAREWELL_S", text) for text in _NO_TIMES),
        *((prepare_s, "LIGHTNING_SM_PREPARE_S", text) for text in [*_NO_TIMES, "0"]),
    ],
)
def test_what_is_no_time_is_an_error_that_quotes_it(read, name, text):
    """What no wait or timer of Python takes is refused with the variable and its value."""
    with pytest.raises(JobConfigError, match=re.escape(f"{name}={text!r}: expected ")):
        read({name: text})


def test_a_host_need_not_wait_for_others():
    """Without a farewell a host leaves at once."""
    assert farewell_s({"LIGHTNING_SM_FAREWELL_S": "0"}) == 0


def test_stop_schedule_is_two_times():
    """The seconds until SIGTERM and SIGKILL, the defaults if nothing is said."""
    assert StopSchedule.from_environment({"LIGHTNING_SM_STOP_SCHEDULE": ""}) == StopSchedule(95, 110)
    assert StopSchedule.from_environment({"LIGHTNING_SM_STOP_SCHEDULE": "0, 2.5"}) == StopSchedule(0, 2.5)


@pytest.mark.parametrize("text", ["abc", "95", "1,2,3", "2,1", "-1,1", "nan,1", "1,nan", "1,inf", "95,1e10"])
def test_another_stop_schedule_is_an_error(text):
    """What is not two times in order, for which the kernel's timer could be set, is refused."""
    with pytest.raises(JobConfigError, match=re.escape(f"LIGHTNING_SM_STOP_SCHEDULE={text!r}: expected ")):
        StopSchedule.from_environment({"LIGHTNING_SM_STOP_SCHEDULE": text})
