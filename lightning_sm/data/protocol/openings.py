"""Openings: the datasets and hook calls that trainers ask data hosts to open, and the data hosts' answers."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, field

from lightning_sm._structs import AnyInt, Name, Natural, NumPlaces, Struct
from lightning_sm.data.protocol.failures import Failure

# Maximum number of openings per rank, for its loaders and the workers of its streams.
_MAX_OPENINGS = 1 << 14


class StreamWorker(Struct, frozen=True):
    """A worker of a ``DataLoader`` over an iterable dataset.

    Attributes:
        rank: Rank of the iterator.
        world_size: Number of ranks.
        number: Number of the worker in its loader.
        num_workers: Number of the loader's workers.
        seed: The iterator's base seed; the worker's seed is this plus ``number``.
    """

    rank: Natural
    world_size: NumPlaces
    number: Natural
    num_workers: NumPlaces
    seed: AnyInt


class Opening(Struct, frozen=True):
    """A source that a data host has open: a dataset whose batches workers build, or a completed hook call.

    Attributes:
        name: Name of the opening. Ranks that open the same source under the same name share its workers.
        source: Digest of the source.
        stream: The worker, if the source is an iterable dataset. None if the dataset is indexed, so that any worker can
            build any batch.
        is_call: Whether the source is a hook call, which needs no workers.
        is_alone: Whether a single data host opens the source on behalf of all.
        is_spawned: Whether workers are spawned, in which case each unpickles the source.
    """

    name: Name
    source: Name
    stream: StreamWorker | None = None
    is_call: bool = False
    is_alone: bool = False
    is_spawned: bool = False


class CallResult(Struct, frozen=True, tag=True):
    """The result of a hook call.

    Attributes:
        pickled: The result for the trainers, pickled.
        fields: Texts, by name, that are equal on data hosts with the same data.
    """

    pickled: bytes
    fields: dict[str, str]


class OpeningsRequest(Struct, frozen=True):
    """For OpenSources: everything that a rank wants open on a data host from now on. The answer is ``OpeningsReply``.

    Attributes:
        client: Name of the rank.
        openings: The openings. The data host closes openings that no rank wants any more.
        results: Names of the calls whose results the rank lacks.
    """

    client: Name
    openings: Annotated[list[Opening], Meta(max_length=_MAX_OPENINGS)]
    results: list[str] = field(default_factory=list)


class OpeningsReply(Struct, frozen=True):
    """The state of the requested openings.

    Attributes:
        open: Names of the openings that have workers or, for hook calls, have completed.
        missing: Digests of the sources that the host needs first.
        problems: The reasons why openings failed, by name of the opening.
        results: One of the results that the rank lacks, by name of the call; a message has room for only one.
    """

    open: list[str]
    missing: list[str]
    problems: dict[str, Failure] = field(default_factory=dict)
    results: dict[str, CallResult] = field(default_factory=dict)
