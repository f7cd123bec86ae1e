"""Measure the pipeline strategy: the share of a step in which ranks wait for each other, and the memory of each rank.

bubble  Run the passes of a step on p ranks with layers that sleep instead of computing: 40 ms for the forward pass of a
        microbatch over all stages of a rank, 80 ms for the backward pass. The idle share is 1 - compute time of a rank
        / duration of the step. In theory it is (p - 1) / (m + p - 1), with m microbatches.
memory  Measure the peak resident memory of a process during 5 steps of the app's transformer with AdamW, minus the peak
        before the model is built: for one process, and for each rank of a pipeline.

    python benchmarks/pipeline.py bubble --rounds 3
    python benchmarks/pipeline.py memory --rounds 3
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import resource
import sys
import time
from collections.abc import Callable
from multiprocessing.queues import Queue
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_sm._table import draw_table

FORWARD_S = 0.04
BUBBLE = [(p, m) for p in (2, 4) for m in (4, 8)]
MEMORY = {"one process": (1, {}), "pipeline": (4, {"num_microbatches": 8})}
_TIMEOUT_S = 300


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: float, back: float) -> Tensor:
        ctx.back = back
        time.sleep(there)  # simulates compute
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.back)
        return grad, None, None


class SleepingLayer(nn.Module):
    """A layer that sleeps once in the forward pass, and twice in the backward pass: for its input and for its weight.

    Args:
        seconds: Seconds per sleep.
        is_first: Whether this is the network's first layer, which computes no gradient of its input. It sleeps twice as
            long for its weight's gradient, so that all stages take the same time.
    """

    def __init__(self, seconds: float, *, is_first: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.seconds = seconds
        self.weight_seconds = 2 * seconds if is_first else seconds

    def forward(self, x: Tensor) -> Tensor:
        """Sleep, and return a tensor of the input's shape, (B, 4) float32."""
        slept: Tensor = _Sleep.apply(x, self.seconds, self.seconds) + _Sleep.apply(
            self.weight, 0.0, self.weight_seconds
        )
        return slept


def bubble(rank: int, p: int, m: int) -> float | None:
    """Return the idle share of a step on rank 0, and None on other ranks."""
    from lightning_sm.training.strategies.pipeline.backward import StepPasses
    from lightning_sm.training.strategies.pipeline.exchange import Replica
    from lightning_sm.training.strategies.pipeline.stage import Stage

    stage = Stage([SleepingLayer(FORWARD_S, is_first=rank == 0)], ["layer"], is_first=rank == 0)
    world: Any = dist.group.WORLD
    replica = Replica(world, world, list(range(p)), torch.device("cpu"))

    def step() -> None:
        passes = StepPasses(stage, replica, lambda: None)
        output = passes.forward([torch.ones(m, 4)], m)
        passes.attach(torch.ones((), requires_grad=True) if output is None else output).sum().backward()

    step()  # connects the ranks
    dist.barrier()
    began = time.perf_counter()
    steps = 2
    for _ in range(steps):
        step()
    dist.barrier()
    took = (time.perf_counter() - began) / steps
    return 1 - 3 * FORWARD_S * m / took if rank == 0 else None


def memory(rank: int, p: int, strategy: dict[str, Any]) -> float:
    """Return the growth of the peak resident memory since before the model was built, in MB."""
    import pytorch_lightning as pl
    from pytorch_lightning.plugins.environments import LightningEnvironment

    from app.transformer import TransformerLanguageModel
    from lightning_sm import PipelineParallelStrategy

    class Processes(LightningEnvironment):
        creates_processes_externally = True

    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0")
    tokens = torch.randint(0, 256, (80, 129))
    data = torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:])
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=p,
        strategy=PipelineParallelStrategy(**strategy) if p > 1 else "auto",
        plugins=[Processes()] if p > 1 else None,
        max_steps=5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    before = _peak_mb()
    model = TransformerLanguageModel(256, 128, width=384, num_blocks=14, num_heads=6)
    trainer.fit(model, torch.utils.data.DataLoader(data, 16))
    return _peak_mb() - before


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _process(  # noqa: PLR0917
    rank: int, p: int, port: int, results: Queue[Any], run: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    # As under torchrun, rank 0 connects to the store instead of serving it.
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **agent)
    if run is bubble:
        dist.init_process_group("gloo", rank=rank, world_size=p)
    results.put((rank, run(rank, p, *arguments)))
    if dist.is_initialized():
        dist.destroy_process_group()


def in_processes(p: int, run: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run a measurement in p new processes, and return the result of each rank."""
    context = multiprocessing.get_context("spawn")
    # This process serves the store, not rank 0: another process could take a free port before rank 0 binds it.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results: Queue[Any] = context.Queue()
    processes = [
        context.Process(target=_process, args=(rank, p, store.port, results, run, arguments)) for rank in range(p)
    ]
    for process in processes:
        process.start()
    try:
        by_rank = dict(results.get(timeout=_TIMEOUT_S) for _ in processes)
    finally:
        for process in processes:
            process.join(_TIMEOUT_S)
            process.kill()
    return [by_rank[rank] for rank in range(p)]


def _spread(values: list[float], digits: str) -> str:
    return f"{median(values):{digits}} ({min(values):{digits}}-{max(values):{digits}})"


def main() -> None:
    """Run the cases in turn and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=("bubble", "memory"))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    sys.stdout.write(f"{os.cpu_count()} cores, torch {torch.__version__}, Python {platform.python_version()}\n")
    if options.experiment == "bubble":
        shares: dict[Any, list[float]] = {case: [] for case in BUBBLE}
        for _ in range(options.rounds):
            for p, m in BUBBLE:
                shares[p, m].append(in_processes(p, bubble, m)[0])
        rows = []
        for (p, m), idle in shares.items():
            rows.append((p, m, f"{(p - 1) / (m + p - 1):.3f}", _spread(idle, ".3f")))
        headers = ["ranks", "microbatches", "theory", "idle"]
    else:
        peaks: dict[str, list[list[float]]] = {name: [] for name in MEMORY}
        for _ in range(options.rounds):
            for name, (p, strategy) in MEMORY.items():
                peaks[name].append(in_processes(p, memory, strategy))
        (alone,) = zip(*peaks["one process"], strict=True)
        rows = []
        for name, rounds in peaks.items():
            ranks = [median(values) for values in zip(*rounds, strict=True)]
            shown = ", ".join(f"{value:.0f}" for value in ranks)
            rows.append((name, len(ranks), shown, f"{max(ranks) / median(alone):.2f}"))
        headers = ["", "ranks", "MB of each rank (median)", "largest / one process"]
    sys.stdout.write(draw_table(rows, headers) + "\n")


if __name__ == "__main__":
    main()
