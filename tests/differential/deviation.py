"""A difference between stock Lightning and data hosts, and the reasons that one may have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Documented in docs/heterogeneous-clusters.md, or refused by stock Lightning.
REASONS = {
    "unsized": "a sampler without length: stock refuses fractions, or does not validate; data hosts count its batches",
    "batch sampler refused": "stock refuses a batch sampler that is not a BatchSampler under DDP and overfit_batches",
    "own sampler not split": "use_distributed_sampler=False with a sampler that knows no rank: data hosts refuse it",
    "batch sampler replaced": "stock replaces the sampler or the batch size of a torch BatchSampler; data hosts do not",
    "batch sampler not shared": "a batch sampler of another class: in stock, each rank predicts all of its batches",
    "overfit_batches": "a random batch sampler: stock trains on other batches in each epoch, data hosts on the same",
    "DistributedSampler kept": "overfit_batches: stock replaces a DistributedSampler of the script, data hosts keep it",
    "counting sampler": "a sampler that counts its passes: data hosts count epochs",
    "shards": "a stream: each virtual shard may end with a smaller batch, so there may be more batches",
    "shuffled": "a training loader without shuffle, or with an own sampler: stock shuffles it on several ranks",
    "RandomSampler replaced": "stock's DistributedSampler forgets num_samples of a RandomSampler, data hosts do not",
    "padding": "ranks that do not divide the samples: stock repeats some, data hosts share the last step",
    "DistributedSampler drops": "drop_last of a DistributedSampler: stock leaves samples out, data hosts take all",
    "drop_last": "ranks that do not divide the samples: stock pads first, data hosts drop what does not fill a step",
}


@dataclass
class Deviation:
    """A difference.

    Attributes:
        where: Run, stage and epoch.
        what: What differs.
        stock: By stock Lightning.
        ours: With data hosts.
        reason: Key of ``REASONS``; None: it has none.
    """

    where: str
    what: str
    stock: Any
    ours: Any
    reason: str | None = None
