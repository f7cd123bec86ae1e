"""Measure how much receiving batches slows a training loop down: its step rate with and without 0.5 GB/s of batches.

The loop works half in the interpreter and half in matrix products, on one thread. Windows in which it takes 0.5 GB/s of
batches (payload (a) of ``wire_baselines.py``) alternate with windows in which it takes none, so that other load on the
machine affects both. In the windows without batches, the ring is full and the feeder idle. The ratio per CPU second of
the loop's thread excludes the time in which other processes used its core.

    python benchmarks/interference.py --windows 20
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from data_service import in_child, machine, parser, ratio, service, spread, work_unit
from wire import ReadyData
from wire_baselines import PAYLOADS

from lightning_sm._table import draw_table

SETTLE_S = 0.3  # until the ring is full and the feeder idle


def loop(seconds: float, batches: Iterator[Any] | None, batches_per_s: float) -> tuple[float, float, int]:
    """Work for some seconds, and take batches at a given rate.

    Returns:
        Steps per second, steps per CPU second of this thread, and the number of batches taken.
    """
    matrix = torch.rand(128, 128)
    steps = taken = 0
    start, cpu = time.perf_counter(), time.thread_time()
    while (elapsed := time.perf_counter() - start) < seconds:
        if batches is not None and taken < elapsed * batches_per_s:
            next(batches)
            taken += 1
        work_unit(matrix)
        steps += 1
    return steps / elapsed, steps / (time.thread_time() - cpu), taken


def windows(
    *, payload: str, gb_per_s: float, num_windows: int, seconds: float, host_cores: list[int], trainer_cores: list[int]
) -> dict[str, list[float]]:
    """Alternate between both kinds of windows in one process, and return the rates of each."""
    kind = PAYLOADS[payload]
    rates: dict[str, list[float]] = {"undisturbed": [], "receiving": [], "gb_per_s": []}
    rates |= {"undisturbed_cpu": [], "receiving_cpu": []}
    with service(ReadyData(kind, 2), 2, host_cores, trainer_cores) as running:
        batches = iter(running.loader)
        loop(2 * SETTLE_S, batches, gb_per_s * 1e9 / kind.size_bytes)
        for _ in range(num_windows):
            loop(SETTLE_S, None, 0.0)
            rate, cpu_rate, _ = loop(seconds, None, 0.0)
            rates["undisturbed"].append(rate)
            rates["undisturbed_cpu"].append(cpu_rate)
            rate, cpu_rate, taken = loop(seconds, batches, gb_per_s * 1e9 / kind.size_bytes)
            rates["receiving"].append(rate)
            rates["receiving_cpu"].append(cpu_rate)
            rates["gb_per_s"].append(taken * kind.size_bytes / 1e9 / seconds)
        del batches
    return rates


def main() -> None:
    """Run the rounds and print a table."""
    options = parser("step rate of a training loop while it receives batches", rounds=1, seconds=1.5)
    options.add_argument("--payload", choices=PAYLOADS, default="a")
    options.add_argument("--gb-per-s", type=float, default=0.5)
    options.add_argument("--windows", type=int, default=20, help="number of windows of each kind")
    args = options.parse_args()
    table = []
    for _ in range(args.rounds):
        rates = in_child(
            windows,
            payload=args.payload,
            gb_per_s=args.gb_per_s,
            num_windows=args.windows,
            seconds=args.seconds,
            host_cores=args.host_cores,
            trainer_cores=args.trainer_cores,
        )
        columns = [
            spread(rates[name], digits) for name, digits in (("undisturbed", 0), ("receiving", 0), ("gb_per_s", 2))
        ]
        columns.append(ratio(rates["receiving"], rates["undisturbed"], 3))
        table.append([*columns, ratio(rates["receiving_cpu"], rates["undisturbed_cpu"], 3)])
    headers = ["steps/s undisturbed", "steps/s receiving", "GB/s", "ratio", "ratio per CPU second"]
    sys.stdout.write(machine() + draw_table(table, headers) + "\n")


if __name__ == "__main__":
    main()
