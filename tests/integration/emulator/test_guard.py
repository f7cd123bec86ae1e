"""The guard, which kills the processes of a job's hosts once the emulator is gone."""

import os
import subprocess
import sys

from lightning_sm.emulator import guard
from lightning_sm.job.variables import HOST_FOLDER

# A shell that executes itself endlessly: it has no environment about a quarter of the time.
ENDLESS = 'exec /bin/sh -c "$0" "$0"'


def test_a_process_that_executes_a_program_does_not_escape(tmp_path, monkeypatch):
    """The guard finds processes by their environment, which they lack while they execute a program."""
    monkeypatch.setattr(sys, "argv", ["guard", str(tmp_path)])
    env = {**os.environ, HOST_FOLDER.name: str(tmp_path / "algo-1")}
    for _ in range(10):
        with open(os.devnull) as closed, subprocess.Popen(["/bin/sh", "-c", ENDLESS, ENDLESS], env=env) as host:
            monkeypatch.setattr(sys, "stdin", closed)
            try:
                guard.main()
                assert host.poll() is not None
            finally:
                host.kill()
