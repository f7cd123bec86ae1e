"""Descriptions of loaders and batches that trainers and data hosts exchange. No torch, no gRPC."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from lightning_sm._structs import Struct
from lightning_sm.data.protocol.codec import AnyInt, BatchSize, Natural
from lightning_sm.errors import WireError

# Batches are sent, and compressed, in pieces of this size. Of 0.5 to 4 MiB it was the fastest (benchmarks/wire.py):
# smaller ones cost more switches between threads, larger ones leave the caches.
CHUNK_BYTES = 2 << 20

# A request asks for at most this many batches. One with more would become a hundred times its size in memory.
MAX_RANGE_LENGTH = 256
# The head of a request is two names, and two numbers for each batch; the keys follow as raw int64.
_MAX_HEAD_BYTES = 64 << 10

# DataModules use these values of the Trainer to build their loaders; trainers send them to the data hosts.
TRAINER_VALUES = ("current_epoch", "global_step", "max_epochs", "max_steps", "num_nodes", "num_devices", "world_size")

# ``pass_index`` counts the Trainer's passes over a loader within an epoch, and from here on those of the user.
FIRST_BY_HAND = 1 << 31

# ``StepRangeSpec.built_by`` where no worker of the data host has built the batch.
ANOTHER_HOST = -1

# The loaders of a hook, "train" of train_dataloader(); empty: none.
LoaderKind = Literal["", "train", "val", "test", "predict"]
OrderKind = Literal["sequential", "shuffled", "sampler", "batch_sampler", "shards"]


def snapshot_hash() -> hashlib.blake2b:
    """Return the hash that names a snapshot of rank 0's DataModule; update it with all of its bytes."""
    return hashlib.blake2b(digest_size=16)


class LoaderDescription(Struct, frozen=True):
    """The description of a user's loader, as trainers need it.

    Attributes:
        name: Where it is in the return value of ``*_dataloader()``, for messages: ``train_dataloader()["a"]``.
        order: Who decides on the order. Trainers compute "sequential" and "shuffled". Data hosts run the user's own
            "sampler" or "batch_sampler". "shards" are virtual shards of an iterable dataset.
        num_samples: Samples in one pass; None if it is unknown until the sampler or dataset has run.
        num_batches: Length of the batch sampler, if it has one.
        batch_size: Samples per batch and rank; None: the dataset or the batch sampler builds whole batches.
        drop_last: Whether an incomplete last batch is dropped.
        identity: Equal for the same data: dataset class, length, and its ``fingerprint()`` if it has one.
        fingerprint: ``identity`` and the versions of the libraries; it must be equal on all data hosts.
        dataset: Description of the dataset, for messages.
        is_split: Whether the user splits the data over the ranks, with a sampler that knows its rank.
        own_sampler: Name of the class of the user's own sampler; empty: there is none but torch's.
        dataset_length: ``len(loader.dataset)``; None if it has none.
        num_workers: ``loader.num_workers``, which data hosts ignore.
        has_indices: Whether trainers know which sample of the dataset is where, by its index.
    """

    name: str
    order: OrderKind
    num_samples: Natural | None
    batch_size: BatchSize | None
    drop_last: bool
    identity: str
    fingerprint: str
    dataset: str
    is_split: bool = False
    own_sampler: str = ""
    num_batches: Natural | None = None
    dataset_length: Natural | None = None
    num_workers: Natural = 0
    has_indices: bool = False


class ShardEnd(Struct, frozen=True, tag=True):
    """The answer for a virtual shard that has none of the batches that were requested.

    Attributes:
        num_batches: How many it has; None: it has the batch whose existence was asked for.
    """

    num_batches: Natural | None


class BatchSpec(NamedTuple):
    """One batch: everything that its content depends on.

    Attributes:
        seed: Base of all random states.
        epoch: Epoch of the training.
        pass_index: Number of the pass over the loader within the epoch.
        order_length: Samples in the order of the pass, of all ranks together; for shards 0.
        position: Where in this order the samples of the batch begin; behind its last sample comes its first. For shards
            0.
        keys: What the dataset is indexed with, int64 of shape (batch,); for shards: (number of shards, shard, offset,
            whether the batch is wanted).
    """

    seed: int
    epoch: int
    pass_index: int
    order_length: int
    position: int
    keys: np.ndarray

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """The positions of its samples in the order of the pass."""
        start = self.position % self.order_length  # Python's own raises where a malformed request has a length of 0
        return np.arange(start, start + len(self.keys)) % self.order_length


@dataclass(frozen=True)
class StepRangeSpec:
    """A request for consecutive batches of a loader, which travel together: small ones cost less than a message each.

    Attributes:
        opening: Name of the request that opened the loader on the data host.
        loader: Position of the loader among those that the request opened.
        batches: What is requested: at least one batch, all of the same pass.
        compression: Name of the codec that compresses the answer; empty: none.
        built_by: None for an ordinary request. A number: the batch was built before, and is to be built again for
            comparison, without continuing an open shard: by a worker other than this one of the data host, if there is
            another; by any if it is ``ANOTHER_HOST``.
    """

    opening: str
    loader: int
    batches: tuple[BatchSpec, ...]
    compression: str = ""
    built_by: int | None = None

    def encode(self) -> bytes:
        """Return the bytes of a FETCH frame."""
        first = self.batches[0]
        head = _Head(
            self.opening,
            self.compression,
            self.built_by,
            self.loader,
            first.seed,
            first.epoch,
            first.pass_index,
            first.order_length,
            sizes=[len(batch.keys) for batch in self.batches],
            positions=[batch.position for batch in self.batches],
        )
        keys = [batch.keys.astype("<i8", copy=False).tobytes() for batch in self.batches]
        return b"".join((head.encode(), b"\n", *keys))

    @classmethod
    def decode(cls, data: bytes) -> StepRangeSpec:
        """Rebuild from bytes.

        Raises:
            WireError: They are malformed.
        """
        end = data.find(b"\n", 0, _MAX_HEAD_BYTES)
        if end < 0 or (len(data) - end - 1) % 8:
            raise WireError(f"A request for a batch is malformed ({len(data)} bytes).")
        try:
            head = _HEAD.decode(data[:end])
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise WireError(f"A request for a batch is malformed: {error}.") from error
        keys = np.frombuffer(data, "<i8", offset=end + 1)
        ends = list(accumulate(head.sizes, initial=0))
        if len(head.positions) != len(head.sizes) or ends[-1] != len(keys):
            raise WireError(
                f"A request for a batch is malformed: it has {len(head.sizes)} sizes with {ends[-1]} keys in all, but "
                f"{len(head.positions)} positions and {len(keys)} keys."
            )
        batches = tuple(
            BatchSpec(head.seed, head.epoch, head.pass_index, head.order_length, position, keys[start:stop])
            for position, (start, stop) in zip(head.positions, pairwise(ends), strict=True)
        )
        return cls(head.opening, head.loader, batches, head.compression, head.built_by)


class _Head(Struct, frozen=True, array_like=True):
    """What stands before the keys of a request; sizes and positions are those of its batches."""

    opening: str
    compression: str
    built_by: AnyInt | None
    loader: AnyInt
    seed: AnyInt
    epoch: AnyInt
    pass_index: AnyInt
    order_length: AnyInt
    sizes: Annotated[list[Natural], Meta(min_length=1, max_length=MAX_RANGE_LENGTH)]
    positions: list[AnyInt]


_HEAD = msgspec.json.Decoder(_Head)
