"""The messages of short calls between trainers and data hosts, which are checked before use. Pure logic."""

from __future__ import annotations

from msgspec import field

from lightning_sm._structs import Name, Natural, NumPlaces, Struct
from lightning_sm.data.protocol.message_codec import decode
from lightning_sm.record.data_figures import HostFigures, RankFigures

# Maximum size of a request, which holds names, numbers, and the openings that a rank wants.
MAX_REQUEST_BYTES = 1 << 20


class HeartbeatRequest(Struct, frozen=True):
    """The heartbeat of a rank; the answer is a ``HostReport``.

    Attributes:
        client: Name of the rank.
        world_size: Number of ranks in its run.
        figures: The rank's measurements; None before it trains.
        wants_figures: Whether to include the figures of all ranks in the answer.
        is_last: Whether the rank's training has finished.
    """

    client: Name
    world_size: NumPlaces
    figures: RankFigures | None = None
    wants_figures: bool = False
    is_last: bool = False


class HostReport(Struct, frozen=True):
    """The state of a data host: the answer to Heartbeat and Status.

    Attributes:
        host: The host's name and its work, without what only a rank knows.
        busy: Number of workers that are building batches.
        figures: Figures of each rank, by name, if requested.
        channels: Names of the host's input channels; only in answers to Status.
    """

    host: HostFigures
    busy: Natural = 0
    figures: dict[str, RankFigures] = field(default_factory=dict)
    channels: list[str] = field(default_factory=list)

    @classmethod
    def parse(cls, data: bytes) -> HostReport:
        """Decode an answer.

        Raises:
            WireError: The answer is malformed.
        """
        return decode(cls, data, "answer to Heartbeat")
