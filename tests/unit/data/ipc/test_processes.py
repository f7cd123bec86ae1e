"""How processes have ended, in words."""

import signal

from lightning_sm.data.ipc.processes import describe_exit


def test_exits_are_described():
    """A process that the kernel may have killed for its memory says so."""
    assert describe_exit(3) == "exited with code 3"
    assert describe_exit(-signal.SIGSEGV) == "was killed by SIGSEGV"
    assert describe_exit(-signal.SIGKILL) == "was killed by SIGKILL (out of memory?)"
