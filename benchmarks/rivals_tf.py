"""tf.data service for rivals.py, in an environment with tensorflow-cpu.

The dispatcher runs in the consuming process. A worker gets a graph, in which a Python function is only a number in a
table of the process that made the graph; ``stock`` shows what comes of it. ``registered`` goes round it: each worker
makes the same graph first, so that its own table has the function at the same number. Nothing documents that this
works. An element of the source is a whole batch: the dispatcher is asked for every element.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from rivals import BATCH_SIZE, NUM_WORKERS, SHAPE, Batch, Epoch, children, end_with_parent, made

_service = tf.data.experimental.service


def _make(indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    samples, pids = zip(*(made(int(index)) for index in indices), strict=True)
    return np.array(pids, np.int64), np.stack(samples)


def pipeline(num_samples: int) -> Any:
    """Return the dataset that the workers run."""

    def batch(first: Any) -> Any:
        indices = tf.range(first, tf.minimum(first + BATCH_SIZE, num_samples))
        pids, samples = tf.numpy_function(_make, [indices], [tf.int64, tf.float32])
        return indices, tf.ensure_shape(pids, (None,)), tf.ensure_shape(samples, (None, *SHAPE))

    return tf.data.Dataset.range(0, num_samples, BATCH_SIZE).map(batch)


@contextlib.contextmanager
def stock(num_samples: int) -> Iterator[Epoch]:
    """Run workers as documented."""
    with _servers(num_samples, registered_samples=0) as epoch:
        yield epoch


@contextlib.contextmanager
def registered(num_samples: int) -> Iterator[Epoch]:
    """Run workers that know the function."""
    with _servers(num_samples, registered_samples=num_samples) as epoch:
        yield epoch


@contextlib.contextmanager
def _servers(num_samples: int, registered_samples: int) -> Iterator[Epoch]:
    dispatcher = _service.DispatchServer()
    address = dispatcher.target.split("://")[1]
    command = [sys.executable, __file__, address, str(registered_samples)]
    with children([command] * NUM_WORKERS):
        policy = _service.ShardingPolicy.DYNAMIC
        dataset = pipeline(num_samples).apply(_service.distribute(policy, dispatcher.target)).prefetch(4)
        yield lambda: _arrays(dataset)


def _arrays(dataset: Any) -> Iterator[Batch]:
    yield from dataset.as_numpy_iterator()


def work(address: str, registered_samples: int) -> None:
    """Run a worker until stdin is closed."""
    end_with_parent()
    known = pipeline(registered_samples) if registered_samples else None  # the table keeps weak references only
    worker = _service.WorkerServer(_service.WorkerConfig(dispatcher_address=address))
    os.write(1, b"ready\n")
    threading.Event().wait()
    del known, worker


if __name__ == "__main__":
    work(sys.argv[1], int(sys.argv[2]))
