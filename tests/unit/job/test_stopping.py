"""How a host exits, and what ends its script: the rules as tables, without a process."""

from __future__ import annotations

import json

import pytest

from lightning_sm.job.stopping import (
    INTERRUPTED_EXIT_CODE,
    MAX_REASON_CHARS,
    FinalOutcome,
    JobOutcome,
    Outcome,
    OutcomeKind,
    Reason,
    Stop,
    ends_script,
    final_outcome,
)
from lightning_sm.job.topology import Role

_HOST = "algo-1"
_UNKNOWN = None
_FINISHED = JobOutcome(OutcomeKind.SUCCESS)
_FAILED_HERE = JobOutcome(OutcomeKind.FAILURE, _HOST, 7, Reason("ValueError: broken"))
_FAILED_ELSEWHERE = JobOutcome(OutcomeKind.FAILURE, "algo-2", 7, Reason("ValueError: broken"))
_STOPPED_ELSEWHERE = JobOutcome(OutcomeKind.INTERRUPTION, "algo-2", INTERRUPTED_EXIT_CODE, Reason("killed by SIGTERM"))
_LOST_ELSEWHERE = JobOutcome.lost("algo-2", "it closed the connection")
_ALL = (_UNKNOWN, _FINISHED, _FAILED_HERE, _FAILED_ELSEWHERE, _STOPPED_ELSEWHERE, _LOST_ELSEWHERE)
_ELSEWHERE = (_FAILED_ELSEWHERE, _STOPPED_ELSEWHERE, _LOST_ELSEWHERE)


@pytest.mark.parametrize("stop", Stop)
@pytest.mark.parametrize("exit_code", [0, 1, INTERRUPTED_EXIT_CODE])
@pytest.mark.parametrize("job", _ALL)
def test_a_data_host_exits_as_its_script_unless_training_succeeded_without_it(stop, exit_code, job):
    """Neither a stop nor a failure elsewhere changes its exit code."""
    expected = FinalOutcome.NOT_NEEDED if job is _FINISHED and exit_code != 0 else FinalOutcome.OWN
    assert final_outcome(Role.DATA, stop, exit_code, job, _HOST) is expected


@pytest.mark.parametrize(
    ("stop", "exit_code", "jobs", "expected"),
    [
        *((stop, code, (_UNKNOWN, _FINISHED, _FAILED_HERE), FinalOutcome.OWN) for stop in Stop for code in (0, 1)),
        (Stop.NONE, 0, _ELSEWHERE, FinalOutcome.FAILED_ELSEWHERE),
        (Stop.NONE, 1, _ELSEWHERE, FinalOutcome.FAILED_ELSEWHERE),
        (Stop.AFTER_FAILURE, 0, _ELSEWHERE, FinalOutcome.FAILED_ELSEWHERE),
        (Stop.AFTER_FAILURE, 143, _ELSEWHERE, FinalOutcome.FAILED_ELSEWHERE),
        (Stop.FIRST, 143, _ELSEWHERE, FinalOutcome.OWN),
        (Stop.FIRST, 0, _ELSEWHERE, FinalOutcome.FAILED_ELSEWHERE),
    ],
)
def test_a_trainer_host_never_looks_successful_when_another_failed(stop, exit_code, jobs, expected):
    """Of a job that was stopped first, each host that did not succeed gives its own reason."""
    for job in jobs:
        assert final_outcome(Role.TRAINER, stop, exit_code, job, _HOST) is expected


@pytest.mark.parametrize(
    ("role", "is_stopped", "ending"),
    [
        (Role.TRAINER, False, _ELSEWHERE),
        (Role.TRAINER, True, (_FAILED_ELSEWHERE,)),
        (Role.DATA, False, (_FINISHED, *_ELSEWHERE)),
        (Role.DATA, True, (_FINISHED, *_ELSEWHERE)),
    ],
)
def test_which_outcomes_of_the_job_end_a_script(role, is_stopped, ending):
    """A data host has nothing to do after the training. A stopped trainer keeps its time to save a checkpoint."""
    for job in (_FINISHED, _FAILED_HERE, *_ELSEWHERE):
        assert ends_script(role, job, _HOST, is_stopped=is_stopped) is (job in ending), job


def test_reasons_are_cut_at_what_sagemaker_shows():
    """Whether a reason comes from the script or from another launcher."""
    assert Outcome.of_exit_code(1, "x" * 5000).reason.text == "x" * MAX_REASON_CHARS
    message = {"kind": "failure", "host": "algo-2", "exit_code": 1, "reason": "x" * 5000, "headline": "x" * 5000}
    assert JobOutcome.from_message(message) == JobOutcome(
        OutcomeKind.FAILURE, "algo-2", 1, Reason("x" * MAX_REASON_CHARS)
    )


def test_unknown_kind_of_outcome_is_refused():
    """A launcher of another version may send one."""
    with pytest.raises(ValueError, match="'won' is not a valid OutcomeKind"):
        JobOutcome.from_message({"kind": "won", "host": "", "exit_code": 0, "reason": "", "headline": ""})


def test_the_headline_of_a_reason_has_the_error_and_its_place():
    """One line for the log; nothing after a success."""
    reason = 'ValueError: bad shape\non trainer host algo-2, rank 1 (exit code 1)\nFile "train.py", line 3'
    assert Reason(reason).headline == "ValueError: bad shape on trainer host algo-2, rank 1 (exit code 1)"
    assert Outcome.of_exit_code(0).reason.headline == ""


def test_the_kind_follows_from_the_exit_code_unless_the_launcher_knows_more():
    """A hang ends with the exit code of a failure."""
    kinds = {code: Outcome.of_exit_code(code).kind for code in (0, 1, 2, 137, INTERRUPTED_EXIT_CODE)}
    failures = dict.fromkeys((1, 2, 137), OutcomeKind.FAILURE)
    assert kinds == {0: OutcomeKind.SUCCESS, **failures, INTERRUPTED_EXIT_CODE: OutcomeKind.INTERRUPTION}
    hang = JobOutcome(OutcomeKind.HANG, "algo-2", 1, Reason("no progress\non algo-2\nstacks", "no progress"))
    assert JobOutcome.from_message(json.loads(json.dumps(hang.to_message()))) == hang
