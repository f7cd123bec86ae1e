"""Measure how long the launchers of a job with many hosts take to agree on its end, and how much they log.

All hosts run on this machine, each with a launcher (``lightning-sm train``) and a script that waits for a signal and
does not import torch. Each row of the table is a separate job. Times of an ending count from its cause.

    python benchmarks/launchers.py --hosts 64
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from lightning_sm._table import draw_table
from lightning_sm.emulator import own_disk
from lightning_sm.emulator.cluster import LocalCluster
from lightning_sm.emulator.guard import guarded
from lightning_sm.emulator.spec import ClusterSpec, LocalHost
from lightning_sm.job.emulated_service import GroupSpec

# On few CPUs, 64 interpreters take long to start. The timeout keeps a hanging launcher from hanging the benchmark.
_TIMEOUT_S = 300.0
_POLL_S = 0.02
# Seconds from a connection to the first messages. Launchers do not notice the loss of one that never sent a message.
_SETTLE_S = 2.0
_FAILED = 7
_INTERRUPTED = 128 + signal.SIGTERM
_KILLED = 128 + signal.SIGKILL
_SCRIPT = f"""\
import os, signal, sys, time
from pathlib import Path

base = Path(os.environ["SAGEMAKER_BASE_DIR"])


def note(name, text):
    (base / "new").write_text(text)
    (base / "new").rename(base / name)


signals = {{signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP}}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
note("pid", str(os.getpid()))
number = signal.sigwait(signals)
note("told", repr(time.monotonic()))
sys.exit({{signal.SIGTERM: {_INTERRUPTED}, signal.SIGUSR1: 0, signal.SIGHUP: {_FAILED}}}[number])
"""


@dataclass(frozen=True)
class Ending:
    """The end of a job with many launchers.

    Attributes:
        name: Cause of the end.
        start_s: Seconds from the first launcher's start until all scripts run and all launchers are connected.
        known_s: Seconds from the cause until all scripts have been told to exit, or have exited.
        left_s: Seconds from the cause until all launchers have exited.
        lines: Largest number of log lines of a host.
        lines_in_all: Total number of log lines.
        exit_codes: Number of launchers by exit code.
    """

    name: str
    start_s: float
    known_s: float
    left_s: float
    lines: int
    lines_in_all: int
    exit_codes: Mapping[int, int]


class ManyLaunchers:
    """The launchers of one job, each a process with a separate log file.

    Args:
        cluster: The emulated hosts.
        script: Training script of the job.
        processes: Stack that kills leftover processes when it is closed.
    """

    def __init__(self, cluster: LocalCluster, script: Path, processes: ExitStack) -> None:
        self.hosts = cluster.hosts
        self._started = time.monotonic()
        self._processes = {host.name: self._start(host, script, processes) for host in self.hosts}
        self._ended: dict[str, tuple[float, int]] = {}
        self._pids = {host.name: int(self._wait_for(host, "pid")) for host in self.hosts}
        self._wait_for_connections()
        self.start_s = time.monotonic() - self._started
        time.sleep(_SETTLE_S)

    def tell_scripts(self, signum: int, *hosts: LocalHost) -> None:
        """Send a signal to the scripts of hosts."""
        for host in hosts:
            os.kill(self._pids[host.name], signum)

    def tell_launchers(self, signum: int, *hosts: LocalHost) -> None:
        """Send a signal to the launchers of hosts."""
        for host in hosts:
            self._processes[host.name].send_signal(signum)

    def end(self, name: str, cause: Callable[[ManyLaunchers], None]) -> Ending:
        """End the job, wait until all launchers have exited, and return the measurements."""
        caused_at = time.monotonic()
        cause(self)
        deadline = caused_at + _TIMEOUT_S
        while len(self._ended) < len(self.hosts):
            if time.monotonic() > deadline:
                missing = sorted(set(self._processes) - set(self._ended))
                raise TimeoutError(f"{name}: the launchers of {missing} did not exit within {_TIMEOUT_S:.0f} s.")
            self._collect()
            time.sleep(_POLL_S)
        told = [float((host.folder / "told").read_text()) for host in self.hosts if (host.folder / "told").exists()]
        lines = [(host.folder / "log").read_bytes().count(b"\n") for host in self.hosts]
        codes = [code for _, code in self._ended.values()]
        return Ending(
            name,
            self.start_s,
            max(told) - caused_at,
            max(ended for ended, _ in self._ended.values()) - caused_at,
            max(lines),
            sum(lines),
            {code: codes.count(code) for code in sorted(set(codes))},
        )

    @staticmethod
    def _start(host: LocalHost, script: Path, processes: ExitStack) -> subprocess.Popen[bytes]:
        launcher = [sys.executable, "-m", "lightning_sm", "train", str(script)]
        with (host.folder / "log").open("wb") as log:
            process = subprocess.Popen(
                own_disk.command(host.folder.parent, host.folder, launcher),
                env=dict(host.env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        processes.callback(process.wait)
        processes.callback(process.kill)
        return process

    def _collect(self) -> None:
        for name, process in self._processes.items():
            if name not in self._ended and process.poll() is not None:
                code = process.returncode
                self._ended[name] = time.monotonic(), code if code >= 0 else 128 - code
                if code == -signal.SIGKILL:  # kill the script, too, as in a container where the launcher is process 1
                    os.kill(self._pids[name], signal.SIGKILL)

    def _wait_for_connections(self) -> None:
        """Wait until all other launchers are connected to the main host's launcher."""
        main = psutil.Process(self._processes[self.hosts[0].name].pid)
        while sum(link.status == psutil.CONN_ESTABLISHED for link in main.net_connections("tcp")) < len(self.hosts) - 1:
            if time.monotonic() > self._started + _TIMEOUT_S:
                raise TimeoutError(f"Not all launchers have connected to the launcher of {self.hosts[0].name}.")
            time.sleep(_POLL_S)

    def _wait_for(self, host: LocalHost, name: str) -> str:
        deadline = self._started + _TIMEOUT_S
        while not (host.folder / name).exists():
            if self._processes[host.name].poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{host.name} has not started: {(host.folder / 'log').read_text()}")
            time.sleep(_POLL_S)
        return (host.folder / name).read_text()


CAUSES: Mapping[str, Callable[[ManyLaunchers], None]] = {
    "success": lambda job: job.tell_scripts(signal.SIGUSR1, *job.hosts),
    "one script fails": lambda job: job.tell_scripts(signal.SIGHUP, job.hosts[-1]),
    "SIGTERM to all hosts": lambda job: job.tell_launchers(signal.SIGTERM, *job.hosts),
    "one launcher is killed": lambda job: job.tell_launchers(signal.SIGKILL, job.hosts[-1]),
}


def run(name: str, num_hosts: int) -> Ending:
    """Run a job with many hosts and end it with one of the ``CAUSES``.

    Raises:
        RuntimeError: A launcher did not start its script.
        TimeoutError: Launchers did not connect or exit in time.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as processes:
        script = Path(folder) / "wait.py"
        script.write_text(_SCRIPT)
        spec = ClusterSpec(groups=[GroupSpec("trainer", num_hosts)])
        with LocalCluster(spec, Path(folder) / "jobs") as cluster, guarded(cluster.job_dir):
            return ManyLaunchers(cluster, script, processes).end(name, CAUSES[name])


def main() -> None:
    """Run the jobs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=64)
    parser.add_argument("--json", action="store_true", help="write JSON instead of a table")
    options = parser.parse_args()
    endings = [run(name, options.hosts) for name in CAUSES]
    if options.json:
        sys.stdout.write(json.dumps([asdict(ending) for ending in endings]) + "\n")
        return
    headers = ["", "start s", "all know s", "all have exited s", "log lines: most of a host", "in all", "exit codes"]
    rows = [
        [
            ending.name,
            f"{ending.start_s:.1f}",
            f"{ending.known_s:.1f}",
            f"{ending.left_s:.1f}",
            ending.lines,
            ending.lines_in_all,
            ", ".join(f"{count} x {code}" for code, count in ending.exit_codes.items()),
        ]
        for ending in endings
    ]
    sys.stdout.write(draw_table(rows, headers) + "\n")


if __name__ == "__main__":
    main()
