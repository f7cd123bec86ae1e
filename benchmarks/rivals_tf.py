"""tf.data service for rivals.py, in an environment with tensorflow-cpu.

The dispatcher runs in the consuming process. Workers get a graph, in which a Python function is only a number in a table
of the process that made it: the service documents that it has no ``py_function``, and ``stock`` shows what comes of it.
``registered`` goes round it: each worker makes the same graph first, so that its own table has the function at the same
number. Nothing documents that this works.
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


def _make(index: int) -> tuple[np.ndarray, np.int64]:
    sample, pid = made(int(index))
    return sample, np.int64(pid)


def pipeline(num_samples: int) -> Any:
    """Return the dataset that the workers run."""

    def one(index: Any) -> Any:
        sample, pid = tf.numpy_function(_make, [index], [tf.float32, tf.int64])
        return index, tf.ensure_shape(pid, ()), tf.ensure_shape(sample, SHAPE)

    return tf.data.Dataset.range(num_samples).map(one).batch(BATCH_SIZE)


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
