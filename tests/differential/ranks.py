"""The ranks of cases with several: processes that stay for all of them, because starting torch takes seconds."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import warnings
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.differential.fits import RANKS_TIMEOUT_S, Seen, Twice
from tests.integration.hosts import REPOSITORY
from tests.quick_processes import python_path

# Each run of the Trainer may wait for a rank that failed.
_TIMEOUT_S = 4 * RANKS_TIMEOUT_S


class Ranks:
    """Ranks on this machine, which a case that hangs or breaks their process group ends.

    Args:
        path: File from which the DataModules read the number of the case.
        address: The data host.
        world_size: How many there are.
    """

    def __init__(self, path: Path, address: str, world_size: int = 2) -> None:
        self._arguments = [str(path), address]
        self._world_size = world_size
        self._ranks: list[tuple[subprocess.Popen[bytes], Connection]] = []

    def run(self, number: int) -> tuple[list[Seen], list[Seen]]:
        """Run a case on all ranks; return what they saw by stock Lightning, and with the data host.

        Raises:
            RuntimeError: A rank did not answer.
        """
        stock, ours = (self._run(number, is_stock) for is_stock in (True, False))
        return stock, ours

    def _run(self, number: int, is_stock: bool) -> list[Seen]:
        if not self._ranks:
            self._start()
        for _, connection in self._ranks:
            connection.send((number, is_stock))
        try:
            seen = [self._reply(number, rank) for rank in range(self._world_size)]
        except RuntimeError:
            self.close()
            raise
        has_hung = any("pair closure" in text or "gloo" in text for one in seen for text in one.errors.values())
        if has_hung or any([*one.errors] != [*seen[0].errors] for one in seen):
            self.close()  # a process group in which a collective call failed stays broken
        return seen

    def close(self) -> None:
        """End the processes."""
        for _, connection in self._ranks:
            connection.close()
        for process, _ in self._ranks:
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()
        self._ranks.clear()

    def _start(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        for rank in range(self._world_size):
            ours, theirs = socket.socketpair()
            env = {**os.environ, "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            env |= {"PYTHONPATH": python_path(REPOSITORY), "OMP_NUM_THREADS": "1"}
            with theirs:
                command = [sys.executable, "-m", "tests.differential.ranks", str(theirs.fileno()), *self._arguments]
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


def main(descriptor: str, path: str, address: str) -> None:
    """Run the cases whose numbers come over a socket, until its other end is closed."""
    import torch

    warnings.simplefilter("ignore")
    connection: Connection[Any, Any] = Connection(int(descriptor))
    twice = Twice(Path(path), address)
    while True:
        try:
            number, is_stock = connection.recv()
        except EOFError:
            break
        connection.send(twice.stock(number) if is_stock else twice.ours(number))
    twice.close()
    # A Gloo thread that outlives the interpreter aborts the process.
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
