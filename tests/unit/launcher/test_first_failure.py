"""Which of a host's processes failed first."""

import pytest

from lightning_sm.job.failure_file import ProcessFailure
from lightning_sm.launcher.first_failure import EndedProcess, first_failure

_SCRIPT = 10


def raised(at, *, is_consequence=False):
    """The failure report of a process that raised an exception."""
    return ProcessFailure(0, at, ("E: x",), (), is_consequence=is_consequence)


def rank(pid, code=None, at=None, failure=None):
    """A rank with a failure reporter."""
    return EndedProcess(pid, pid - _SCRIPT, code, at, failure, has_reporter=True)


LOST = raised(2.0, is_consequence=True)


@pytest.mark.parametrize(
    ("processes", "first"),
    [
        ([rank(10, 1, 3.0, raised(2.0))], 10),
        ([rank(10, 9, 3.0)], 10),
        # Rank 1 was killed or exited; rank 0 only lost its connection, and may exit before rank 1.
        ([rank(10, 1, 3.0, LOST), rank(11, 137, 1.0)], 11),
        ([rank(10, 1, 3.0, LOST), rank(11, 9, 4.0)], 11),
        ([rank(10, 1, 3.0, LOST), rank(11, 143, 1.0)], 11),
        # Both ranks raise: the earlier exception counts unless it is a consequence.
        ([rank(10, 1, 5.0, raised(2.0)), rank(11, 1, 4.0, raised(1.0))], 11),
        ([rank(10, 1, 5.0, LOST), rank(11, 1, 4.0, raised(3.0))], 11),
        ([rank(10, 1, 5.0, LOST), rank(11, 1, 4.0, raised(1.0, is_consequence=True))], 11),
        # Rank 1 raises, even if only because it lost a rank of another host, and Lightning then kills rank 0.
        ([rank(10, 137, 3.0), rank(11, 1, 2.0, raised(1.0))], 11),
        ([rank(10, 137, 3.0), rank(11, 1, 2.0, raised(1.0, is_consequence=True))], 11),
        ([rank(10, 137, 3.0), rank(11, 139, 2.0)], 11),
        # Only its parent knows rank 1's exit code.
        ([rank(10, 1, 3.0, LOST), rank(11, None, 1.0)], 11),
        # Rank 1 is still running.
        ([rank(10, 1, 3.0, LOST), rank(11)], 10),
        # The script is torchrun or a shell, which fails because a rank failed.
        ([EndedProcess(10, -1, 1, 5.0), rank(11, 1, 3.0, LOST), rank(12, 137, 1.0)], 12),
        ([EndedProcess(10, -1, 1, 5.0), rank(11, 1, 3.0, LOST)], 11),
        ([EndedProcess(10, -1, 3, 5.0), rank(11, 0, 3.0)], 10),
        # A rank fails after the script has succeeded.
        ([rank(10, 0, 1.0), rank(11, 5, 3.0)], 11),
    ],
)
def test_the_first_that_did_not_fail_because_of_another(processes, first):
    """The first process that was killed, exited or raised its own exception failed first; consequences do not count."""
    assert first_failure(processes, _SCRIPT).pid == first
    assert first_failure(processes[::-1], _SCRIPT).pid == first


def test_a_script_that_is_told_to_end_ends_its_ranks():
    """After a stop, only a rank's exception takes precedence over the script's exit code."""
    killed = [rank(10, 143, 3.0), rank(11, 143, 1.0), rank(12, None, 1.0)]
    assert first_failure(killed, _SCRIPT, only_exceptions=True).pid == _SCRIPT
    failed = [rank(10, 143, 3.0), rank(11, 1, 2.0, raised(1.0))]
    assert first_failure(failed, _SCRIPT, only_exceptions=True).pid == 11
