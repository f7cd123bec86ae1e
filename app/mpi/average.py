"""Average arrays over all ranks, twice: rank 0 gathers, averages and broadcasts them; then one all-reduce.

On one machine, with Open MPI (Debian: openmpi-bin) and "pip install mpi4py":
  mpirun -n 4 python app/mpi/average.py

With torch.distributed on Gloo, which does not need mpi4py, and in a SageMaker job not even mpirun:
  mpirun -n 4 python app/mpi/average.py --torch
  lightning-sm local --group trainer=3 --devices 2 -- app/mpi/average.py --torch
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

_ENDS = "This script needs at least 2 processes, but there is 1"


def with_mpi4py() -> None:
    """Run the calls with mpi4py, which infers the type of each array; a wrong explicit type sends half the bytes."""
    from mpi4py import MPI  # noqa: PLC0415  # initialises MPI

    world = MPI.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    if size == 1:
        sys.exit(f"{_ENDS}. Start it with mpirun.")
    message = np.arange(3) if rank == 0 else np.empty(3, dtype=int)
    if rank == 0:
        world.Send(message, dest=1)
    elif rank == 1:
        world.Recv(message, source=0)
        _say(rank, size, f"received {message} from rank 0")
    numbers = np.arange(10) if rank == 0 else np.empty(10, dtype=int)
    world.Bcast(numbers, root=0)

    part = np.full(10, float(rank))
    parts = np.empty((size, part.size)) if rank == 0 else None
    world.Gather(part, parts, root=0)
    mean = np.empty_like(part) if parts is None else parts.mean(axis=0)
    world.Bcast(mean, root=0)

    total = np.empty_like(part)
    world.Allreduce(part, total, op=MPI.SUM)
    _say(rank, size, _summary(numbers, mean, total / size))


def with_torch() -> None:
    """Run the calls with torch.distributed on Gloo, because torch's wheels have no MPI backend.

    The ranks may come from mpirun or from ``lightning-sm train``.
    """
    import torch  # noqa: PLC0415  # takes seconds
    import torch.distributed as dist  # noqa: PLC0415

    if "OMPI_COMM_WORLD_SIZE" in os.environ:  # torch does not read mpirun's variables
        os.environ |= {"RANK": os.environ["OMPI_COMM_WORLD_RANK"], "WORLD_SIZE": os.environ["OMPI_COMM_WORLD_SIZE"]}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}
    if os.environ.get("WORLD_SIZE", "1") == "1":
        sys.exit(f"{_ENDS}. Start it with mpirun, or in a SageMaker job with several ranks.")
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    message = torch.arange(3) if rank == 0 else torch.empty(3, dtype=torch.int64)
    if rank == 0:
        dist.send(message, dst=1)
    elif rank == 1:
        dist.recv(message, src=0)
        _say(rank, size, f"received {message.numpy()} from rank 0")
    numbers = torch.arange(10) if rank == 0 else torch.empty(10, dtype=torch.int64)
    dist.broadcast(numbers, src=0)

    part = torch.full((10,), float(rank))
    parts = [torch.empty_like(part) for _ in range(size)] if rank == 0 else None
    dist.gather(part, parts, dst=0)
    mean = torch.empty_like(part) if parts is None else torch.stack(parts).mean(dim=0)
    dist.broadcast(mean, src=0)

    total = part.clone()
    dist.all_reduce(total)
    _say(rank, size, _summary(numbers.numpy(), mean.numpy(), total.numpy() / size))
    dist.destroy_process_group()


def _summary(numbers: Any, mean: Any, mean_by_all_reduce: Any) -> str:
    return f"broadcast {numbers}, mean {mean[0]} by gather and broadcast, {mean_by_all_reduce[-1]} by all-reduce"


def _say(rank: int, size: int, text: str) -> None:
    # Write the line in one piece, so that the output of several ranks does not mix.
    sys.stdout.write(f"rank {rank} of {size}: {text}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and average the arrays."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", action="store_true", help="use torch.distributed on Gloo instead of mpi4py")
    with_torch() if parser.parse_args(arguments).torch else with_mpi4py()


if __name__ == "__main__":
    main()
