"""Forks return a result, an error, or how they died."""

import os
import signal
import time

import pytest

from lightning_sm.data.ipc.processes import describe_exit, in_fork


def test_the_result_of_a_fork_is_returned():
    """The function runs in another process, and changes nothing in this one."""
    calls = []
    assert in_fork(lambda: (calls.append(1), os.getpid())[1]) != os.getpid()
    assert calls == []


def test_the_error_of_a_fork_is_raised():
    """An exception arrives with its type and arguments."""
    with pytest.raises(KeyError, match="missing"):
        in_fork(lambda: {}["missing"])


@pytest.mark.parametrize(
    ("function", "how"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"),
        (lambda: lambda: None, "exited with code 1"),
    ],
    ids=["killed", "result that cannot be pickled"],
)
def test_a_fork_without_a_result_is_an_error(function, how):
    """The error says how the fork exited."""
    with pytest.raises(ChildProcessError, match=f"a fork of this process {how}.* before it returned a result"):
        in_fork(function)


def test_exits_are_described():
    """A process that the kernel may have killed for its memory says so."""
    assert describe_exit(3) == "exited with code 3"
    assert describe_exit(-signal.SIGKILL) == "was killed by SIGKILL (out of memory?)"


def test_a_fork_that_takes_too_long_says_where_it_stood():
    """It is ended, also if it ignores signals to end, and the error has its stack: it has had time to start."""

    def hang():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(1)

    before = signal.signal(signal.SIGABRT, signal.SIG_DFL)  # as a Trainer does that has ended
    try:
        with pytest.raises(TimeoutError, match=r"(?s)It stood at:\n.*in hang"):
            in_fork(hang, timeout_s=5.0)
    finally:
        signal.signal(signal.SIGABRT, before)
