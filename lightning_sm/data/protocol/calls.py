"""The short calls between trainers and data hosts: what they carry is checked before anything uses it. Pure rules."""

from __future__ import annotations

from typing import ClassVar, TypeVar

from msgspec import field

from lightning_sm._structs import Struct
from lightning_sm.data.protocol.codec import Name, Natural, NumPlaces, Real, decode
from lightning_sm.data.protocol.figures import RankFigures

# Names, numbers, and what a rank wants open.
_MAX_REQUEST_BYTES = 1 << 20


class Request(Struct, frozen=True):
    """Base of what a trainer sends to a data host."""

    NAME: ClassVar[str]  # of the gRPC method

    @classmethod
    def parse(cls: type[_Request], data: bytes) -> _Request:
        """Rebuild a request.

        Raises:
            WireError: It is malformed.
        """
        return decode(cls, data, f"{cls.NAME} request", _MAX_REQUEST_BYTES)


_Request = TypeVar("_Request", bound=Request)


class LoadRequest(Request, frozen=True):
    """The head of a snapshot of a source that a rank sends; its bytes follow.

    Attributes:
        digest: Its digest.
        num_bytes: Its size.
    """

    NAME = "Load"

    digest: Name
    num_bytes: Natural


class HeartbeatRequest(Request, frozen=True):
    """A sign of life of a rank; answered by ``HostReport``.

    Attributes:
        client: The rank.
        world_size: Number of ranks of its training.
        figures: What the rank has measured, once it trains.
        wants_figures: Whether the answer is to have the figures of all ranks.
    """

    NAME = "Heartbeat"

    client: Name
    world_size: NumPlaces
    figures: RankFigures | None = None
    wants_figures: bool = False


class FinishRequest(Request, frozen=True):
    """The last message of a rank: its training has ended.

    Attributes:
        client: Name of the rank.
    """

    NAME = "Finish"

    client: Name


class HostReport(Struct, frozen=True):
    """The answer to Heartbeat and Status: how a data host is.

    Attributes:
        name: Its name.
        workers: Its workers.
        busy: Workers that build batches.
        queued: Requests that wait for a worker.
        busy_s: Seconds that workers worked while trainers had more to request, of all workers together.
        capacity_s: Seconds that they could have worked in this time.
        built: Requests that they have done.
        built_s: Seconds that these took.
        figures: The figures of each rank, by its name, if they are wanted.
        channels: Names of its input channels; in answers to Status only.
    """

    name: str
    workers: Natural
    busy: Natural
    queued: Natural
    busy_s: Real = 0.0
    capacity_s: Real = 0.0
    built: Natural = 0
    built_s: Real = 0.0
    figures: dict[str, RankFigures] = field(default_factory=dict)
    channels: list[str] = field(default_factory=list)

    @classmethod
    def parse(cls, data: bytes) -> HostReport:
        """Rebuild an answer.

        Raises:
            WireError: It is malformed.
        """
        return decode(cls, data, "answer to Heartbeat")
