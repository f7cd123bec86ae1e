"""Tests of a data host's worker in a separate process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from lightning_sm.data.ipc.host_messages import Build, Ready
from lightning_sm.data.ipc.messages import MessageSocket
from lightning_sm.data.ipc.ring import Ring
from tests.integration.hosts import REPOSITORY
from tests.quick_processes import python_path

TIMEOUT_S = 60.0

# The worker hangs in native code, where no Python code runs.
HANGING = """
import socket, sys, threading
from lightning_sm.data.host import worker
from lightning_sm.data.host.worker_notes import WorkerNotes
from lightning_sm.data.ipc.messages import MessageSocket
from lightning_sm.data.ipc.ring import Ring

class Hanging:
    def __init__(self, notes):
        pass
    def build(self, encoded_spec, memory):
        wait_for_ever()

def wait_for_ever():
    held = threading.Lock()
    held.acquire()
    held.acquire()

worker._LONG_S = 0.1
requests, ring = map(int, sys.argv[1:])
worker.run_worker(MessageSocket(socket.socket(fileno=requests)), Ring(ring, 1, 4096), Hanging, WorkerNotes())
"""


def test_a_worker_that_hangs_writes_its_stacks():
    """A worker that hangs writes its stacks unasked, even while it waits in native code."""
    ring = Ring.create(1, 4096)
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", HANGING, str(theirs.fileno()), str(ring.fd)]
    env = {**os.environ, "PYTHONPATH": python_path(REPOSITORY)}
    fds = (theirs.fileno(), ring.fd)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, pass_fds=fds, env=env) as process:
        theirs.close()
        requests = MessageSocket(ours)
        try:
            assert requests.receive(TIMEOUT_S) == Ready()
            requests.send(Build(0, b""))
            lines = iter(process.stderr.readline, "")
            stacks = next(line for line in lines if line.startswith("Timeout (")), next(lines), next(lines)
            assert stacks[2].endswith("in wait_for_ever\n")
        finally:
            process.kill()
            requests.close()
    ring.close()
