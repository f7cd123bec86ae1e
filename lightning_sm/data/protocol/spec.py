"""What trainers and data hosts tell each other about loaders and batches. No torch, no gRPC."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from lightning_sm.errors import WireError

# Batches travel, and are compressed, in pieces of this size. Of 0.5 to 4 MiB it was the fastest (benchmarks/wire.py):
# smaller ones cost more switches between threads, larger ones leave the caches.
CHUNK_BYTES = 2 << 20

# A header is two lengths and a few numbers; the keys follow as raw int64.
_MAX_HEAD_BYTES = 1 << 20
# Loader, seed, epoch, pass, step, rank.
_NUM_NUMBERS = 6

# The values of the Trainer that DataModules use to build their loaders; trainers send them to the data hosts.
TRAINER_FACTS = ("current_epoch", "global_step", "max_epochs", "max_steps", "num_nodes", "num_devices", "world_size")

Order = Literal["sequential", "shuffled", "sampler", "batch_sampler", "shards"]


@dataclass(frozen=True)
class LoaderFacts:
    """What a trainer has to know of a loader of the user.

    Attributes:
        name: Where it stands in what ``*_dataloader()`` returned, for messages: ``train_dataloader()["a"]``.
        order: Who decides on the order. "sequential" and "shuffled" are computed by the trainers; "sampler" and
            "batch_sampler" are the user's own and computed by a data host; "shards" are virtual shards of an
            iterable dataset.
        num_samples: Samples in one pass; None if only the data host's listing tells.
        batch_size: Samples per batch and rank; None: the dataset or the batch sampler makes whole batches.
        drop_last: Whether an incomplete last batch is dropped.
        identity: Equal for the same data: dataset class, length, and its ``fingerprint()`` if it has one.
        fingerprint: The same with the versions of the libraries, which must be equal on all data hosts.
        dataset: Description of the dataset, for messages.
        is_split: Whether the user splits the data over the ranks by hand, with a ``DistributedSampler``.
    """

    name: str
    order: Order
    num_samples: int | None
    batch_size: int | None
    drop_last: bool
    identity: str
    fingerprint: str
    dataset: str
    is_split: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, facts: Any) -> LoaderFacts:
        """Rebuild from JSON values.

        Args:
            facts: What ``to_json`` returned.

        Raises:
            WireError: A field is missing or has the wrong type.
        """
        try:
            loader = cls(**facts)
        except TypeError as error:
            raise WireError(
                f"A data host described a loader in a way that this version does not know: {error}."
            ) from error
        counts = (loader.num_samples, loader.batch_size)
        if not all(count is None or (isinstance(count, int) and count >= 0) for count in counts):
            raise WireError(f"A data host described a loader with impossible sizes: {facts}.")
        return loader


@dataclass(frozen=True)
class BatchSpec:
    """One batch: everything that its content depends on.

    Attributes:
        opening: Which opened loaders of the data host are meant.
        loader: Position of the loader among them.
        seed: Base of all random states.
        epoch: Epoch of the training.
        pass_index: Number of the pass over the loader within the epoch.
        step: Number of the batch within the pass.
        rank: Rank that asked.
        keys: What the dataset is indexed with, int64 of shape (batch,); for shards: (shards, shard, offset).
        compression: How the answer is compressed; empty: not at all.
    """

    opening: str
    loader: int
    seed: int
    epoch: int
    pass_index: int
    step: int
    rank: int
    keys: np.ndarray
    compression: str = ""

    def encode(self) -> bytes:
        """Return the bytes that go over the wire."""
        head = [
            self.opening,
            self.compression,
            self.loader,
            self.seed,
            self.epoch,
            self.pass_index,
            self.step,
            self.rank,
        ]
        return json.dumps(head, separators=(",", ":")).encode() + b"\n" + self.keys.astype("<i8", copy=False).tobytes()

    @classmethod
    def decode(cls, data: bytes) -> BatchSpec:
        """Rebuild from bytes.

        Args:
            data: What ``encode`` returned.

        Raises:
            WireError: They are malformed.
        """
        end = data.find(b"\n", 0, _MAX_HEAD_BYTES)
        if end < 0 or (len(data) - end - 1) % 8:
            raise WireError(f"A request for a batch is malformed ({len(data)} bytes).")
        try:
            opening, compression, *numbers = json.loads(data[:end])
        except (ValueError, TypeError) as error:
            raise WireError(f"A request for a batch is malformed: {error}.") from error
        if (
            not isinstance(opening, str)
            or not isinstance(compression, str)
            or len(numbers) != _NUM_NUMBERS
            or not all(type(number) is int for number in numbers)
        ):
            raise WireError(f"A request for a batch is malformed: {data[:80]!r}.")
        loader, seed, epoch, pass_index, step, rank = numbers
        keys = np.frombuffer(data, "<i8", offset=end + 1)
        return cls(opening, loader, seed, epoch, pass_index, step, rank, keys, compression)
