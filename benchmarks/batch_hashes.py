"""What the hash of each batch costs: the worker that computes it, and the training process that records it.

Three measurements, each of which lets its variants take turns:

- the speed of several hashes over a batch;
- a worker that stacks samples to a batch in its slot, with the hash and without it;
- what a training process does for a step: it takes the hash of the step's batch, and notes it, with all writing to the
  record. Without the hash, it would do nothing of this.

    python benchmarks/batch_hashes.py --rounds 15
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import xxhash
from data_service import in_turn, machine, spread
from torch.utils.data import DataLoader, TensorDataset

from lightning_sm._table import draw_table
from lightning_sm.data.host import worker
from lightning_sm.data.host.loader import ServedLoader
from lightning_sm.data.host.worker_notes import WorkerNotes
from lightning_sm.data.ipc.host_messages import Build, BuiltRange
from lightning_sm.data.ipc.ring import Ring
from lightning_sm.data.protocol.spec import BatchSpec, StepRangeSpec
from lightning_sm.data.trainer.reporter import Reporter
from lightning_sm.data.trainer.slots import BatchOrigin
from lightning_sm.record.batch_log import BatchLog
from lightning_sm.record.events import Recorder, TrainingPass

HASHES: dict[str, Callable[[Any], Any]] = {
    "XXH3": xxhash.xxh3_64_intdigest,
    "XXH64": xxhash.xxh64_intdigest,
    "CRC-32 (zlib)": zlib.crc32,
    "BLAKE2b": lambda data: hashlib.blake2b(data, digest_size=8).digest(),
}
# A step's batch: 64 images of 3 x 224 x 224, as float32 and as uint8, and 32 rows of 4 numbers.
# And how often a measurement builds it.
LARGE = torch.rand(64, 3, 224, 224)
BATCHES = {
    "38.5 MB (float32)": (LARGE, 40),
    "9.6 MB (uint8)": (torch.randint(0, 256, (64, 3, 224, 224), dtype=torch.uint8), 80),
    "512 B": (torch.rand(32, 4), 2000),
}
_STEPS = 50_000
# So many steps pass between two writes: at 100 steps a second, one second.
_STEPS_PER_LINE = 100


def hash_speed(function: Callable[[Any], Any]) -> float:
    """Return GB/s over a batch of 38.5 MB."""
    data = LARGE.numpy().reshape(-1).view(np.uint8).data
    started = time.perf_counter()
    function(data)
    return len(data) / 1e9 / (time.perf_counter() - started)


class Worker:
    """A worker that stacks the same samples again and again.

    Args:
        samples: The samples.
        num_times: How often a measurement builds the batch.
    """

    def __init__(self, samples: torch.Tensor, num_times: int) -> None:
        self._loader = ServedLoader(DataLoader(TensorDataset(samples), len(samples)), "loader", "train", 0)
        self._loader.enter_worker("here", 0, 1)
        spec = BatchSpec(0, 0, 0, len(samples), 0, np.arange(len(samples)))
        self._request = Build(0, StepRangeSpec("1/fit/train/0", 0, (spec,)).encode())
        self._ring = Ring.create(1, 1 << 30)
        self._mark = WorkerNotes()
        self._times = num_times
        for _ in range(num_times):
            self.build()

    def build(self) -> None:
        """Build the batch."""
        openings = {"1/fit/train/0": [self._loader]}
        outcome, _ = worker.build_range(self._request, self._ring, openings, self._mark, 0)
        if not isinstance(outcome, BuiltRange):
            raise TypeError(f"the worker answered {outcome}")

    def milliseconds(self) -> float:
        """Return the median time of a batch."""
        seconds = []
        for _ in range(self._times):
            started = time.perf_counter()
            self.build()
            seconds.append(time.perf_counter() - started)
        return 1e3 * median(seconds)

    def without_hash(self) -> float:
        """Return the median time of a batch that is not hashed."""
        with mock.patch.object(worker, "content_hash", _no_hash):
            return self.milliseconds()


def _no_hash(*_: object) -> int:
    return 0


def recording() -> tuple[float, float]:
    """Return the microseconds of a step in the training process, and the bytes that it leaves in the record."""
    trainer: Any = SimpleNamespace(current_epoch=0)
    trainer.fit_loop = SimpleNamespace(epoch_loop=SimpleNamespace(_batches_that_stepped=0))
    begun = TrainingPass(0.0, "1-1", "train_dataloader()", 0, "", "", "shuffled", "", 0, 0, 0, 0)
    reporter = Reporter(lambda: None)  # type: ignore[arg-type, return-value]
    reporter.begin_pass(begun)
    with tempfile.TemporaryDirectory() as folder:
        record = Recorder(Path(folder) / "1" / "algo-1-rank-0.batches.jsonl")
        log = BatchLog(record.append)
        origin = BatchOrigin(0x0123456789ABCDEF, None)
        started = time.perf_counter()
        for number in range(_STEPS):
            reporter.add_origin(origin, 0, index=0)
            step = trainer.fit_loop.epoch_loop._batches_that_stepped + number
            log.note("1-1", trainer.current_epoch, number, step, reporter.next_origins())
            if number % _STEPS_PER_LINE == 0:
                log.flush()
        log.flush()
        seconds = time.perf_counter() - started
        num_bytes = record.path.stat().st_size
        record.close()
    return 1e6 * seconds / _STEPS, num_bytes / _STEPS


def main() -> None:
    """Measure, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    sys.stdout.write(machine())
    speeds = in_turn(
        {name: (lambda function=function: hash_speed(function)) for name, function in HASHES.items()}, rounds
    )
    rows = [[name, spread(values, 1)] for name, values in speeds.items()]
    sys.stdout.write(draw_table(rows, ["hash", "GB/s"]) + "\n\n")
    rows = []
    for name, (samples, num_times) in BATCHES.items():
        own = Worker(samples, num_times)
        times = in_turn({"without": own.without_hash, "with": own.milliseconds}, rounds)
        added = [one - other for one, other in zip(times["with"], times["without"], strict=True)]
        rows.append([name, spread(times["without"], 3), spread(times["with"], 3), spread(added, 3)])
    sys.stdout.write(
        draw_table(rows, ["batch", "built, ms", "and hashed, ms", "difference within a round, ms"]) + "\n\n"
    )
    steps = in_turn({"recorded": recording}, rounds)["recorded"]
    sys.stdout.write(
        f"training process: {spread([one for one, _ in steps])} us a step, {steps[0][1]:.1f} bytes a step\n"
    )


if __name__ == "__main__":
    main()
