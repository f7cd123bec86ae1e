"""Tests of how the exits of processes are described."""

import signal

from lightning_sm.data.ipc.processes import describe_exit


def test_exits_are_described():
    """The description has the exit code or signal, and suspects a lack of memory after SIGKILL."""
    assert describe_exit(3) == "exited with code 3"
    assert describe_exit(-signal.SIGSEGV) == "was killed by SIGSEGV"
    assert describe_exit(-signal.SIGKILL) == "was killed by SIGKILL (out of memory?)"
