"""Run ``lightning-sm train`` in the foreground or background."""

from __future__ import annotations

import atexit
import functools
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.fakes.reserved_job import reserve_job

TIMEOUT_S = 180
_NO_REPORT = {"LIGHTNING_SM_REPORT_S": "0"}  # a report takes seconds
_FOREIGN = ("SM_", "SAGEMAKER_", "LIGHTNING_SM_", "TRAINING_JOB_", "AWS_", "PIP_")


def variables_of(base: Path, **variables: str) -> dict[str, str]:
    """Build a host's environment without this shell's settings for jobs, clouds and package indexes.

    The host does not wait for other hosts.

    Args:
        base: The folder that the host sees as ``/opt/ml``.
        variables: Additional variables.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    return {
        **inherited,
        "SAGEMAKER_BASE_DIR": str(base),
        "LIGHTNING_SM_PEERS_TIMEOUT_S": "0",
        "LIGHTNING_SM_MAIN_PORT": str(_main_port()),
        # As in the image: a buffered print() in a signal handler fails if another signal interrupts it.
        "PYTHONUNBUFFERED": "1",
        **_NO_REPORT,
        **variables,
    }


@functools.cache
def _main_port() -> int:
    """Return the port of rank 0, reserved for this process, whose jobs use it one after the other."""
    _, topology, ports = reserve_job({"trainer": ["algo-1", "algo-2"], "data": ["algo-3"]})
    atexit.register(ports.close)
    return topology.main_port


def local_addresses(*hosts: str) -> dict[str, str]:
    """Build the variables that give a job's hosts loopback addresses.

    Args:
        hosts: The names of the hosts.
    """
    addresses = {host: f"127.0.0.{number}" for number, host in enumerate(hosts, 2)}
    return {"LIGHTNING_SM_HOST_ADDRESSES": json.dumps(addresses)}


def train(
    base: Path, work: Path, *args: str, python: str = sys.executable, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a host's launcher and wait for it to exit.

    Args:
        base: The folder that the host sees as ``/opt/ml``.
        work: The working directory.
        args: Arguments after ``train``.
        python: The interpreter.
        variables: Environment variables.
    """
    return subprocess.run(
        [python, "-m", "lightning_sm", "train", *args],
        cwd=work,
        env=variables_of(base, **variables),
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=TIMEOUT_S,
    )


def failure(base: Path) -> str:
    """Read a host's failure file.

    Args:
        base: The folder that the host sees as ``/opt/ml``.
    """
    return (base / "output" / "failure").read_text()


class Running:
    """A launcher in the background, whose output lines can be awaited."""

    def __init__(self, base: Path, work: Path, *args: str, python: str = sys.executable, **variables: str) -> None:
        self.process = subprocess.Popen(
            [python, "-m", "lightning_sm", "train", *args],
            cwd=work,
            env=variables_of(base, **variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: queue.Queue[str] = queue.Queue()
        self.seen: list[str] = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as pipe:
            for line in pipe:
                self.seen.append(line.strip())
                self.lines.put(line.strip())

    def wait_for(self, wanted: str) -> str:
        """Wait for a line that contains this text, and return the line."""
        deadline = time.monotonic() + TIMEOUT_S
        try:
            while wanted not in (line := self.lines.get(timeout=max(0.01, deadline - time.monotonic()))):
                pass
        except queue.Empty:
            raise AssertionError(f"{wanted!r} was not printed in {TIMEOUT_S} s, but: {self.seen}") from None
        return line

    def exit_code(self) -> int:
        """Wait until the launcher has exited and its last line has been read, and return its exit code."""
        try:
            code = self.process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the launcher did not exit in {TIMEOUT_S} s. It printed: {self.seen}") from None
        self.reader.join(TIMEOUT_S)
        return code


@contextmanager
def started(base: Path, work: Path, *args: str, **variables: str) -> Iterator[Running]:
    """Start a host's launcher, and kill it and its children at the end of the context.

    Args:
        base: The folder that the host sees as ``/opt/ml``.
        work: The working directory.
        args: Arguments after ``train``.
        variables: Environment variables, and ``python``, the interpreter.
    """
    running = Running(base, work, *args, **variables)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            for process in [*psutil.Process(running.process.pid).children(recursive=True), running.process]:
                process.kill()
        running.process.wait(TIMEOUT_S)
        running.reader.join(TIMEOUT_S)
