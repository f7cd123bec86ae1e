"""The files between ``lightning-sm replay`` and the process that runs the user's script for it."""

from __future__ import annotations

from msgspec import field

from lightning_sm._structs import Struct


class WantedBatch(Struct, frozen=True):
    """A batch to rebuild.

    Attributes:
        begun: Its pass: a ``TrainingPass`` as a line of the record.
        number: Its number in the pass.
        shard: Virtual shard and number in the shard, if the dataset is iterable.
        shard_pass: Index of the pass over the shards.
        replacements: The index that replaced a sample, by the sample's number in the batch.
    """

    begun: str
    number: int
    shard: tuple[int, int] | None = None
    shard_pass: int = 0
    replacements: dict[int, int] = field(default_factory=dict)


class RebuildRequest(Struct, frozen=True):
    """To the process: what to rebuild, and where its results go.

    Attributes:
        fit: Which fit of the script, as in the record.
        batches: By batch of the Trainer, those of the training loaders.
        output: File for the batches, which torch.load reads.
        answer: File for the ``Rebuilt``.
    """

    fit: str
    batches: list[list[WantedBatch]]
    output: str
    answer: str


class RebuiltBatch(Struct, frozen=True):
    """A batch that was rebuilt.

    Attributes:
        content_hash: Hash of its content.
        indices: Keys with which the dataset was read; for a shard of an iterable dataset none.
        position: Where its samples begin in the order of the pass.
        notes: What differs from the record, and may be why the content does.
    """

    content_hash: int
    indices: list[int]
    position: int
    notes: list[str]


class Rebuilt(Struct, frozen=True, tag=True):
    """From the process: what it has rebuilt, as in ``RebuildRequest.batches``."""

    batches: list[list[RebuiltBatch]]


class Refused(Struct, frozen=True, tag=True):
    """From the process: why it has rebuilt nothing."""

    text: str
