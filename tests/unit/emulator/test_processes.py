"""Which processes belong to the hosts of an emulated job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from lightning_sm.emulator.processes import processes_below
from lightning_sm.job.variables import HOST_FOLDER

_PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "input()"], env={}, stdin=sys.stdin, start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""


def _host(folder):
    env = {**os.environ, HOST_FOLDER.name: str(folder)}
    return subprocess.Popen([sys.executable, "-c", _PARENT], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_descendants_belong_to_a_host_whatever_their_environment(tmp_path):
    """All descendants of a host belong to it; processes of other jobs and zombies do not."""
    with _host(tmp_path / "job" / "algo-1") as host, _host(tmp_path / "job2" / "algo-1") as other:
        child = int(host.stdout.readline())
        other.stdout.readline()
        assert {process.pid for process in processes_below(tmp_path / "job")} == {host.pid, child}
        os.kill(child, signal.SIGKILL)
        os.kill(host.pid, signal.SIGKILL)  # Popen.kill would reap a host that exited when its child did
        os.waitid(os.P_PID, host.pid, os.WEXITED | os.WNOWAIT)
        assert processes_below(tmp_path / "job") == []
