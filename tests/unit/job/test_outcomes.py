"""Outcomes and reasons that launchers exchange."""

from __future__ import annotations

import msgspec

from lightning_sm.job.outcomes import INTERRUPTED_EXIT_CODE, MAX_REASON_CHARS, JobOutcome, Outcome, OutcomeKind, Reason


def test_reasons_are_cut_at_what_sagemaker_shows():
    """A reason is truncated to SageMaker's limit, whether it comes from the script or from another launcher."""
    assert Outcome.of_exit_code(1, "x" * 5000).reason.text == "x" * MAX_REASON_CHARS
    sent = {"kind": "failure", "host": "algo-2", "exit_code": 1, "reason": {"text": "x" * 5000}}
    assert msgspec.convert(sent, JobOutcome) == JobOutcome(
        OutcomeKind.FAILURE, "algo-2", 1, Reason("x" * MAX_REASON_CHARS)
    )


def test_the_headline_of_a_reason_has_the_error_and_its_place():
    """The headline of a reason joins the error and its place in one line; a success has an empty headline."""
    reason = 'ValueError: bad shape\non trainer host algo-2, rank 1 (exit code 1)\nFile "train.py", line 3'
    assert Reason(reason).headline == "ValueError: bad shape on trainer host algo-2, rank 1 (exit code 1)"
    assert Outcome.of_exit_code(0).reason.headline == ""


def test_the_kind_follows_from_the_exit_code_unless_the_launcher_knows_more():
    """The exit code determines whether an outcome is a success, a failure or an interruption."""
    kinds = {code: Outcome.of_exit_code(code).kind for code in (0, 1, 2, 137, INTERRUPTED_EXIT_CODE)}
    failures = dict.fromkeys((1, 2, 137), OutcomeKind.FAILURE)
    assert kinds == {0: OutcomeKind.SUCCESS, **failures, INTERRUPTED_EXIT_CODE: OutcomeKind.INTERRUPTION}
