"""Which process of a host failed first."""

import pytest

from lightning_sm.job.failure_file import ProcessFailure
from lightning_sm.launcher.first_failure import EndedProcess, first_failure

_SCRIPT = 10


def raised(at, *, is_consequence=False):
    """What a process says of its exception."""
    return ProcessFailure(0, at, ("E: x",), (), is_consequence=is_consequence)


def rank(pid, code=None, at=None, failure=None):
    """A rank that would say why it dies."""
    return EndedProcess(pid, pid - _SCRIPT, code, at, failure, has_reporter=True)


LOST = raised(2.0, is_consequence=True)


@pytest.mark.parametrize(
    ("processes", "first"),
    [
        ([rank(10, 1, 3.0, raised(2.0))], 10),
        ([rank(10, 9, 3.0)], 10),
        # Rank 1 was killed, or exited: rank 0 has only lost its connection, and may exit before rank 1 does.
        ([rank(10, 1, 3.0, LOST), rank(11, 137, 1.0)], 11),
        ([rank(10, 1, 3.0, LOST), rank(11, 9, 4.0)], 11),
        ([rank(10, 1, 3.0, LOST), rank(11, 143, 1.0)], 11),
        # Both raise; the earlier exception counts, unless it is a consequence.
        ([rank(10, 1, 5.0, raised(2.0)), rank(11, 1, 4.0, raised(1.0))], 11),
        ([rank(10, 1, 5.0, LOST), rank(11, 1, 4.0, raised(3.0))], 11),
        ([rank(10, 1, 5.0, LOST), rank(11, 1, 4.0, raised(1.0, is_consequence=True))], 11),
        # Rank 1 raises, and Lightning kills rank 0 for it; also if it has only lost a rank of another host.
        ([rank(10, 137, 3.0), rank(11, 1, 2.0, raised(1.0))], 11),
        ([rank(10, 137, 3.0), rank(11, 1, 2.0, raised(1.0, is_consequence=True))], 11),
        ([rank(10, 137, 3.0), rank(11, 139, 2.0)], 11),
        # Nobody but its parent knows how rank 1 exited.
        ([rank(10, 1, 3.0, LOST), rank(11, None, 1.0)], 11),
        # A local rank still runs.
        ([rank(10, 1, 3.0, LOST), rank(11)], 10),
        # torchrun, or a shell, which fails because a rank has failed.
        ([EndedProcess(10, -1, 1, 5.0), rank(11, 1, 3.0, LOST), rank(12, 137, 1.0)], 12),
        ([EndedProcess(10, -1, 1, 5.0), rank(11, 1, 3.0, LOST)], 11),
        ([EndedProcess(10, -1, 3, 5.0), rank(11, 0, 3.0)], 10),
        # The script has succeeded, and a rank has failed after it.
        ([rank(10, 0, 1.0), rank(11, 5, 3.0)], 11),
    ],
)
def test_the_first_that_did_not_fail_because_of_another(processes, first):
    """By an exception that is no consequence, or killed or exited without one, whichever came first."""
    assert first_failure(processes, _SCRIPT).pid == first
    assert first_failure(processes[::-1], _SCRIPT).pid == first


def test_a_script_that_is_told_to_end_ends_its_ranks():
    """Then only an exception of a rank counts beside the script's exit code."""
    killed = [rank(10, 143, 3.0), rank(11, 143, 1.0), rank(12, None, 1.0)]
    assert first_failure(killed, _SCRIPT, only_exceptions=True).pid == _SCRIPT
    failed = [rank(10, 143, 3.0), rank(11, 1, 2.0, raised(1.0))]
    assert first_failure(failed, _SCRIPT, only_exceptions=True).pid == 11
