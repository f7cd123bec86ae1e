"""The process that finds out which samples a local DataLoader read, by torch's own samplers, which need torch.

Run it as ``python -m lightning_sm.rebuild.local_order``: JSON on stdin, a list of ``[LocalPass as a line of the record,
number of the batch]``; JSON on stdout, the indices of each, or null if the pass has ended before it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import islice

from torch.utils.data import BatchSampler, DistributedSampler, Sampler, SequentialSampler

from lightning_sm.record.events import LocalPass, from_json


def batches(begun: LocalPass) -> Iterator[list[int]]:
    """Return the indices of all batches of a pass."""
    dataset = range(begun.num_samples)
    sampler: Sampler[int] = SequentialSampler(dataset)
    if begun.distributed:
        arguments = dict(begun.distributed)
        epoch = arguments.pop("epoch")
        distributed: DistributedSampler[int] = DistributedSampler(dataset, **arguments)  # type: ignore[arg-type]
        distributed.set_epoch(epoch)
        sampler = distributed
    return iter(BatchSampler(sampler, begun.batch_size, begun.drop_last))


def main() -> None:
    """Answer stdin."""
    found = []
    for text, number in json.load(sys.stdin):
        begun = from_json(text)
        if not isinstance(begun, LocalPass):
            raise TypeError(f"this is no pass over a local loader: {text[:200]}")
        found.append(next(islice(batches(begun), number, None), None))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
