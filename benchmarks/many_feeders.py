"""Measure the cost of connections between many trainer ranks and many data hosts that request nothing.

All processes run on this machine: the server process of each data host, for which this script acts as the main process,
and the feeder process of each rank. Every feeder opens a source on all data hosts and then only sends heartbeats. A
link is the connection of one rank to one data host.

    python benchmarks/many_feeders.py --ranks 64 --hosts 16

Each link takes 3 to 4 ms of CPU time per second, so 64 x 16 links need four cores. With fewer cores, links keep getting
lost. Then measure the server processes with all ranks and few data hosts, and the feeders with few ranks and all data
hosts: the cost per process is the same.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
from data_service import machine

from lightning_sm._table import draw_table
from lightning_sm.data.feeder.host_link import heartbeat_period_s
from lightning_sm.data.host.pickler import pickle_object
from lightning_sm.data.ipc.feeder_messages import Configure, HostSnapshot
from lightning_sm.data.ipc.host_messages import Listening, Serve, StartedWorkers, StartWorkers
from lightning_sm.data.ipc.messages import MessageSocket
from lightning_sm.data.ipc.processes import describe_exit, start_module
from lightning_sm.data.protocol.calls import HeartbeatRequest
from lightning_sm.data.protocol.openings import Opening
from lightning_sm.data.settings import Credentials, DataServiceSettings, HostSettings
from lightning_sm.data.trainer.feeder_client import FeederClient, HeldOpening
from lightning_sm.errors import DataHostUnreachableError
from lightning_sm.record.data_figures import RankFigures

# Starting processes share few cores, so the timeout grows with the number of processes and of links.
_TIMEOUT_S = 60.0
_TIMEOUT_OF_PROCESS_S = 1.0
_TIMEOUT_OF_LINK_S = 0.03
_BATCH = 16
_POLL_S = 0.2
_STOP_TIMEOUT_S = 10.0
_MAX_NAMED = 4

# Upper bounds. A link takes four threads of the feeder and two of the server, plus one during a short call. Each thread
# takes a process id, and the kernel limits their number for the whole machine.
_THREADS_OF_LINK = 4 + 3
_THREADS_OF_PROCESS = 24
_MAX_SHARE_OF_PIDS = 0.9

# A source from which no rank requests a batch.
_SOURCE = pickle_object(None, by_name=True, named={}, advice="")
_OPENING = Opening(_SOURCE.digest, _SOURCE.digest)
# Figures as after a training run of some hours.
_FIGURES = RankFigures(
    num_batches=123_456,
    num_steps=123_456,
    num_timed=123_455,
    num_bytes=123_456 << 20,
    wait_s=1234.5678,
    transfer_wait_s=123.4567,
    busy_s=12345.6789,
    sync_s=1234.5678,
    queue_s=1234.5678,
    produce_s=12345.6789,
    transfer_s=1234.5678,
)


@dataclass(frozen=True)
class Usage:
    """Resource usage of a process.

    Attributes:
        cpu: CPU seconds per second.
        threads: Number of threads.
        rss_mb: Resident memory, including all shared memory.
        pss_mb: Resident memory, including the process's share of shared memory.
        files: Number of open file descriptors.
        connections: Number of established TCP connections.
    """

    cpu: float
    threads: float
    rss_mb: float
    pss_mb: float
    files: float
    connections: float


class Servers:
    """The server processes of data hosts.

    Args:
        num_hosts: Number of data hosts.
        credentials: Credentials that the servers require of trainers.
    """

    def __init__(self, num_hosts: int, credentials: Credentials) -> None:
        self._processes: list[tuple[subprocess.Popen[bytes], MessageSocket]] = []
        self.addresses: list[str] = []
        lease_s = DataServiceSettings().lease_s
        try:
            for number in range(num_hosts):
                process, main = start_module("lightning_sm.data.server.process")
                self._processes.append((process, main))
                name = f"host-{number}"
                settings = HostSettings("127.0.0.1:0", 8, 1 << 20, lease_s, None, name, credentials)
                # Offer the source at once, like a main process that has restarted its server process.
                main.send(Serve(settings, snapshots=[_SOURCE.digest]))
            for number, (_, main) in enumerate(self._processes):
                self.addresses.append(self._address(number, main, _TIMEOUT_S + num_hosts * _TIMEOUT_OF_PROCESS_S))
                threading.Thread(target=_open, args=(main,), daemon=True).start()
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids."""
        return [process.pid for process, _ in self._processes]

    def check(self) -> None:
        """Check that all server processes are running.

        Raises:
            RuntimeError: A server process has exited.
        """
        for number, (process, _) in enumerate(self._processes):
            status = process.poll()
            if status is not None:
                raise RuntimeError(f"The server process of host-{number} {describe_exit(status)}.")

    def close(self) -> None:
        """Stop all server processes."""
        for _, main in self._processes:
            with socket.socket(fileno=os.dup(main.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)  # unlike close, works although a thread still receives from the socket
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        for process, _ in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.wait()

    @staticmethod
    def _address(number: int, main: MessageSocket, timeout_s: float) -> str:
        try:
            message = main.receive(timeout_s)
        except TimeoutError:
            raise TimeoutError(
                f"The server process of host-{number} did not listen within {timeout_s:.0f} s."
            ) from None
        if isinstance(message, Listening):
            return message.address
        raise RuntimeError(f"The server process of host-{number} does not listen: {message}.")


def _open(main: MessageSocket) -> None:
    """Confirm each request to start workers, without starting any, until the connection is closed."""
    while (message := main.receive()) is not None:
        if isinstance(message, StartWorkers):
            main.send(StartedWorkers(message.opening.name))


class Feeders:
    """The feeder processes of all ranks of a training run.

    Args:
        num_ranks: Number of ranks.
        servers: Servers of the data hosts.
        credentials: Credentials that the servers require.
        timeout_s: Seconds until every feeder must be connected to every data host.
        with_figures: Whether heartbeats carry the measurements of the ranks, as during training.
    """

    def __init__(
        self, num_ranks: int, servers: Servers, credentials: Credentials, timeout_s: float, *, with_figures: bool
    ) -> None:
        self._servers = servers
        self._timeout_s = timeout_s
        self._clients: list[FeederClient] = []
        self._held: list[HeldOpening] = []
        started = time.monotonic()
        self._deadline = started + timeout_s
        try:
            for first in range(0, num_ranks, _BATCH):
                self._start(range(first, min(first + _BATCH, num_ranks)), num_ranks, credentials)
            self._wait_for_links()
            self.start_s = time.monotonic() - started
            if with_figures:
                for client in self._clients:
                    client.share(_FIGURES)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids."""
        return [client._process.pid for client in self._clients]

    def links(self) -> Iterator[tuple[str, HostSnapshot]]:
        """Yield, for each link, the name of the rank and its feeder's snapshot of the data host."""
        for client in self._clients:
            for host in client.snapshot().hosts:
                yield client.name, host

    def close(self) -> None:
        """Kill all feeders, because so many could not disconnect from the data hosts at once."""
        for client in self._clients:
            with contextlib.suppress(ProcessLookupError):
                os.kill(client._process.pid, signal.SIGKILL)
        for client in self._clients:
            client.close()

    def _start(self, ranks: Sequence[int], num_ranks: int, credentials: Credentials) -> None:
        """Start some feeders and wait until they have opened the source, so that not all imports compete for cores."""
        clients = []
        for rank in ranks:
            heartbeat = HeartbeatRequest(f"rank {rank}", num_ranks, wants_figures=rank == 0)
            clients.append(FeederClient(Configure(self._servers.addresses, credentials, heartbeat, is_quiet=True)))
            self._clients.append(clients[-1])
        for client in clients:
            self._open(client)
        self._servers.check()
        sys.stderr.write(f"feeders with an open source: {len(self._clients)} of {num_ranks}\n")

    def _open(self, client: FeederClient) -> None:
        try:
            self._held += client.open_source(_SOURCE, _OPENING)
            client.wait_for_source(_OPENING, "open the source", max(0.0, self._deadline - time.monotonic()))
        except DataHostUnreachableError as error:
            raise TimeoutError(
                f"{client.name} has not opened the source {self._timeout_s:.0f} s after the first feeder started:\n"
                f"{client.describe()}"
            ) from error

    def _wait_for_links(self) -> None:
        while True:
            links = list(self.links())
            missing = [f"{rank} to {host.name}: {host.state} {host.why}" for rank, host in links if _is_down(host)]
            if not missing:
                return
            self._servers.check()
            if time.monotonic() > self._deadline:
                named = "\n".join(missing[:_MAX_NAMED])
                raise TimeoutError(
                    f"Links that are not up after {self._timeout_s:.0f} s: {len(missing)} of {len(links)}.\n{named}"
                )
            time.sleep(_POLL_S)


def _is_down(host: HostSnapshot) -> bool:
    return host.state != "up"


def usages(pids: Sequence[int], seconds: float) -> list[Usage]:
    """Measure the resource usage of processes for some seconds."""
    processes = [psutil.Process(pid) for pid in pids]
    before = [_cpu_s(process) for process in processes]
    time.sleep(seconds)
    after = [_cpu_s(process) for process in processes]
    result = []
    for process, (cpu_0, at_0), (cpu_1, at_1) in zip(processes, before, after, strict=True):
        memory = process.memory_full_info()
        established = [link for link in process.net_connections("tcp") if link.status == psutil.CONN_ESTABLISHED]
        result.append(
            Usage(
                cpu=(cpu_1 - cpu_0) / (at_1 - at_0),
                threads=process.num_threads(),
                rss_mb=memory.rss / 1e6,
                pss_mb=memory.pss / 1e6,
                files=process.num_fds(),
                connections=len(established),
            )
        )
    return result


def _cpu_s(process: psutil.Process) -> tuple[float, float]:
    times = process.cpu_times()
    return times.user + times.system, time.monotonic()


def check_pids(num_ranks: int, num_hosts: int) -> None:
    """Check that the threads of all processes do not use up the machine's process ids.

    Raises:
        SystemExit: The threads may need too many process ids.
    """
    limit = int(Path("/proc/sys/kernel/pid_max").read_text())
    needed = num_ranks * num_hosts * _THREADS_OF_LINK + (num_ranks + num_hosts) * _THREADS_OF_PROCESS
    used = int(Path("/proc/loadavg").read_text().split()[3].split("/")[1])
    if used + needed > _MAX_SHARE_OF_PIDS * limit:
        sys.exit(
            f"{num_ranks} ranks x {num_hosts} hosts need up to {needed} threads in addition to the {used} that run, "
            f"but this machine has only {limit} process ids (kernel.pid_max)."
        )


def table(num_ranks: int, num_hosts: int, servers: Sequence[Usage], feeders: Sequence[Usage]) -> str:
    """Return the table of results."""
    headers = [f"ranks x hosts: {num_ranks} x {num_hosts}"]
    for kind in ("server", "feeder"):
        headers += [f"{kind} process: median", "most", "in all"]
    names = {
        "cpu": ("CPU s per s", 3),
        "threads": ("threads", 0),
        "rss_mb": ("RSS MB", 0),
        "pss_mb": ("PSS MB", 0),
        "files": ("open files", 0),
        "connections": ("TCP connections", 0),
    }
    rows = []
    for name, (label, digits) in names.items():
        row = [label]
        for group in (servers, feeders):
            values = [float(getattr(usage, name)) for usage in group]
            # Omit the sum of RSS, which counts shared memory once per process.
            total = f"{sum(values):.{digits}f}" if name != "rss_mb" else "-"
            row += [f"{statistics.median(values):.{digits}f}", f"{max(values):.{digits}f}", total]
        rows.append(row)
    period_s = heartbeat_period_s(num_ranks)
    of_server, of_feeder = num_ranks / period_s, num_hosts / period_s
    in_all = f"{num_ranks * num_hosts / period_s:.0f}"
    of_both = [[f"{rate:.0f}", f"{rate:.0f}", in_all] for rate in (of_server, of_feeder)]
    rows.append(["heartbeats per s, by the code", *of_both[0], *of_both[1]])
    return draw_table(rows, headers)


def main() -> None:
    """Start all processes, measure them, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--hosts", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=20.0, help="length of the measurement")
    parser.add_argument("--figures", action="store_true", help="let heartbeats carry measurements, as during training")
    options = parser.parse_args()
    check_pids(options.ranks, options.hosts)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    settings = DataServiceSettings()
    credentials = Credentials.of(settings, "many-feeders")
    num_links = options.ranks * options.hosts
    timeout_s = _TIMEOUT_S + options.ranks * _TIMEOUT_OF_PROCESS_S + num_links * _TIMEOUT_OF_LINK_S
    with ExitStack() as processes:
        servers = Servers(options.hosts, credentials)
        processes.callback(servers.close)
        feeders = Feeders(options.ranks, servers, credentials, timeout_s, with_figures=options.figures)
        processes.callback(feeders.close)
        time.sleep(2 * heartbeat_period_s(options.ranks))  # let the work of the start finish
        lost_before = sum(host.num_lost for _, host in feeders.links())
        psutil.cpu_percent()
        measured = usages([*servers.pids, *feeders.pids], options.seconds)
        busy = psutil.cpu_percent()
        links = [host for _, host in feeders.links()]
        servers.check()
        num_up = sum(not _is_down(host) for host in links)
        num_lost = sum(host.num_lost for host in links)
        sys.stdout.write(
            f"{machine()}"
            f"Links: {num_links}. All were up {feeders.start_s:.1f} s after the start of the first feeder. Lost before "
            f"the measurement: {lost_before}; during its {options.seconds:.0f} s: {num_lost - lost_before}; up at its "
            f"end: {num_up}. CPU use of the whole machine, including other processes: {busy:.0f}%.\n\n"
            f"{table(options.ranks, options.hosts, measured[: options.hosts], measured[options.hosts :])}\n"
        )


if __name__ == "__main__":
    main()
