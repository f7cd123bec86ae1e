"""Openings: what trainers ask data hosts to open, datasets and calls of hooks, and how data hosts answer."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, field

from lightning_sm._structs import Struct
from lightning_sm.data.protocol.calls import Request
from lightning_sm.data.protocol.codec import AnyInt, Name, Natural, NumPlaces
from lightning_sm.data.protocol.failures import Failure

# Of one rank: its loaders, and the workers of its streams.
_MAX_OPENINGS = 1 << 14


class StreamWorker(Struct, frozen=True):
    """A worker of a ``DataLoader`` over an iterable dataset.

    Attributes:
        rank: Rank of the iterator.
        world_size: Number of ranks.
        number: Number of the worker in its loader.
        num_workers: Workers of the loader.
        seed: The iterator's base of random states; the worker's own seed is this plus its number.
    """

    rank: Natural
    world_size: NumPlaces
    number: Natural
    num_workers: NumPlaces
    seed: AnyInt


class Opening(Struct, frozen=True):
    """A source that a data host has open: workers build its batches, or it is a call of a hook that has run.

    Attributes:
        name: Its name. Ranks that open the same source under the same name share its workers.
        source: Digest of the source.
        stream: The worker, if the source is an iterable dataset; None: the dataset is indexed, so that any worker can
            build any batch.
        is_call: Whether the source is a call of a hook, and needs no workers.
        is_alone: Whether one data host opens it for all.
        is_spawned: Whether workers are spawned, not forked, and each unpickles the source.
    """

    name: Name
    source: Name
    stream: StreamWorker | None = None
    is_call: bool = False
    is_alone: bool = False
    is_spawned: bool = False


class CallResult(Struct, frozen=True, tag=True):
    """The result of a call of a hook.

    Attributes:
        pickled: What the trainers get.
        fields: Texts that are equal on data hosts that have the same data, by name.
    """

    pickled: bytes
    fields: dict[str, str]


class OpeningsRequest(Request, frozen=True):
    """All that a rank wants open on a data host from now on; answered by ``OpeningsReply``.

    Attributes:
        client: The rank.
        openings: The openings. Those that no rank wants any more are closed.
        results: Names of the calls whose results the rank lacks.
    """

    NAME = "OpenSources"

    client: Name
    openings: Annotated[list[Opening], Meta(max_length=_MAX_OPENINGS)]
    results: list[str] = field(default_factory=list)


class OpeningsReply(Struct, frozen=True):
    """What is open of that.

    Attributes:
        open: Names of the openings that have workers.
        missing: Digests of the sources that the host needs first.
        problems: Why there are no workers, by name of the opening.
        results: The result of one of the calls that the rank lacks, by its name: a message has room for one.
    """

    open: list[str]
    missing: list[str]
    problems: dict[str, Failure] = field(default_factory=dict)
    results: dict[str, CallResult] = field(default_factory=dict)
