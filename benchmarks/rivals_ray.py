"""Ray Data for rivals.py, in an environment with ray[data]."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import ray
import ray.data
from rivals import BATCH_SIZE, NUM_WORKERS, Batch, Epoch, made


def make(batch: dict[str, Any]) -> dict[str, Any]:
    """Make the samples of some indices."""
    samples, pids = zip(*(made(int(index)) for index in batch["id"]), strict=True)
    return {"index": batch["id"], "pid": np.array(pids), "sample": np.stack(samples)}


@contextlib.contextmanager
def ray_data(num_samples: int) -> Iterator[Epoch]:
    """Run Ray on this machine, and read a dataset through a split, as a training worker does."""
    ray.init(num_cpus=NUM_WORKERS, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    try:
        dataset = ray.data.range(num_samples).map_batches(make, batch_size=BATCH_SIZE)
        [split] = dataset.streaming_split(1, equal=True)

        def epoch() -> Iterator[Batch]:
            for batch in split.iter_batches(batch_size=BATCH_SIZE):
                yield batch["index"], batch["pid"], batch["sample"]

        yield epoch
    finally:
        ray.shutdown()
