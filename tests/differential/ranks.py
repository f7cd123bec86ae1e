"""Rank processes for cases with several ranks, reused by all cases because starting torch takes seconds."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from tests.differential.fits import RANKS_TIMEOUT_S, Runner, Seen
from tests.fakes.reserved_job import reserve_job
from tests.integration.hosts import REPOSITORY
from tests.quick_processes import python_path

# Each run of a Trainer may wait for a failed rank.
_TIMEOUT_S = 4 * RANKS_TIMEOUT_S


class Ranks:
    """Ranks on this machine, which are killed after a case that hangs or breaks their process group.

    Args:
        hosts: Addresses of data hosts, by the name of the set of hosts.
        world_size: Number of ranks.
        hooks: Where the hooks of DataModules run.
    """

    def __init__(self, hosts: dict[str, Sequence[str]], world_size: int = 2, hooks: str = "trainers") -> None:
        self._hooks = hooks
        self._hosts = json.dumps(hosts)
        self._world_size = world_size
        self._ranks: list[tuple[subprocess.Popen[bytes], Connection]] = []
        self._ports = ExitStack()

    def run(self, number: int, hosts: str | None = None) -> list[Seen]:
        """Run a case on all ranks, and return the batches and errors of each.

        Args:
            number: Number of the case.
            hosts: Name of the set of data hosts; None for stock Lightning.

        Raises:
            RuntimeError: A rank did not answer.
        """
        if not self._ranks:
            self._start()
        for _, connection in self._ranks:
            connection.send((number, hosts))
        try:
            seen = [self._reply(number, rank) for rank in range(self._world_size)]
        except RuntimeError:
            self.close()
            raise
        has_hung = any("pair closure" in text or "gloo" in text for rank in seen for text in rank.errors.values())
        if has_hung or any([*rank.errors] != [*seen[0].errors] for rank in seen):
            self.close()  # a failed collective call breaks the process group for good
        return seen

    def close(self) -> None:
        """Stop the processes."""
        for _, connection in self._ranks:
            connection.close()
        for process, _ in self._ranks:
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()
        self._ranks.clear()
        self._ports.close()

    def _start(self) -> None:
        _, topology, ports = reserve_job({"trainer": ["algo-1"]})
        self._ports.push(ports)
        for rank in range(self._world_size):
            ours, theirs = socket.socketpair()
            env = {
                **os.environ,
                "LOCAL_RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(topology.main_port),
            }
            env |= {"PYTHONPATH": python_path(REPOSITORY), "OMP_NUM_THREADS": "1"}
            with theirs:
                command = [
                    sys.executable,
                    "-m",
                    "tests.differential.ranks",
                    str(theirs.fileno()),
                    self._hosts,
                    self._hooks,
                    str(self._world_size),
                ]
                process = subprocess.Popen(
                    command, env=env, pass_fds=[theirs.fileno()], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
            self._ranks.append((process, Connection(ours.detach())))

    def _reply(self, number: int, rank: int) -> Seen:
        process, connection = self._ranks[rank]
        if not connection.poll(_TIMEOUT_S):
            raise RuntimeError(f"case {number}: rank {rank} did not answer within {_TIMEOUT_S} s")
        try:
            seen: Seen = connection.recv()
        except EOFError as error:
            raise RuntimeError(f"case {number}: rank {rank} exited with {process.wait(20)}") from error
        return seen


def main(descriptor: str, hosts: str, hooks: str, world_size: str) -> None:
    """Run the cases whose numbers arrive on a socket, until the other end is closed."""
    import torch

    warnings.simplefilter("ignore")
    if world_size != "1":
        # The first fit would create the group: of a case's two runs, only the first would begin without one, and
        # samplers that are created before it would differ.
        rank, timeout = int(os.environ["LOCAL_RANK"]), timedelta(seconds=RANKS_TIMEOUT_S)
        torch.distributed.init_process_group("gloo", rank=rank, world_size=int(world_size), timeout=timeout)
    connection: Connection[Any, Any] = Connection(int(descriptor))
    runner = Runner(json.loads(hosts), hooks)
    while True:
        try:
            number, name = connection.recv()
        except EOFError:
            break
        connection.send(runner.run(number, name))
    runner.close()
    # A Gloo thread that outlives the interpreter aborts the process.
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
