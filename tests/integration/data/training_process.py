"""A training process with its own data host, for tests that kill it: ``python -m`` this module."""

from __future__ import annotations

import sys
import threading

from torch.utils.data import DataLoader

from tests.integration.data.cluster import Host, remote, running
from tests.integration.data.datasets import Augmented


def make() -> DataLoader:
    """A loader whose epoch nobody sees the end of."""
    return DataLoader(Augmented(100_000, 0.001), batch_size=4)


def main() -> None:
    """Take a few batches, tell so, and wait to be killed."""
    with running(Host("own", make)) as hosts, remote(hosts) as module:
        stream = iter(module.train_dataloader())
        for _ in range(3):
            next(stream)
        sys.stdout.write("training\n")
        sys.stdout.flush()
        threading.Event().wait(120)


if __name__ == "__main__":
    main()
