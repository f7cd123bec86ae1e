"""The messages between a training process and its feeder."""

from __future__ import annotations

from lightning_sm._structs import Struct
from lightning_sm.data.ipc.messages import Message
from lightning_sm.data.protocol.calls import HeartbeatRequest
from lightning_sm.data.protocol.failures import error_class
from lightning_sm.data.protocol.figures import BatchFigures, HostFigures, RankFigures
from lightning_sm.data.protocol.frames import EncodedBatch
from lightning_sm.data.protocol.openings import Opening
from lightning_sm.data.settings import Credentials
from lightning_sm.errors import DataServiceError

# From the training process


class Configure(Message, frozen=True):
    """The first message.

    Attributes:
        addresses: Addresses of the data hosts.
        credentials: Credentials for them.
        client: The heartbeat of this rank, without figures.
        is_quiet: Whether another rank of this host logs what all of them would.
    """

    addresses: list[str]
    credentials: Credentials
    client: HeartbeatRequest
    is_quiet: bool = False


class ShareSnapshot(Message, frozen=True):
    """A source for the data hosts, of which ``fds`` has the memory."""

    digest: str
    num_bytes: int
    fds: tuple[int, ...]


class ShareRing(Message, frozen=True):
    """Memory for the batches of a loader: ring ``number``, of which ``fds`` has the descriptor."""

    number: int
    num_slots: int
    slot_bytes: int
    fds: tuple[int, ...]


class OpenSource(Message, frozen=True):
    """A source that data hosts are to open; answered by ``SourceOpened``. A ``ShareSnapshot`` with it came before."""

    opening: Opening


class CloseSource(Message, frozen=True):
    """A source that is no longer needed."""

    name: str


class StartIterator(Message, frozen=True):
    """An iterator over a loader, or over one of the workers of a stream.

    It is answered by ``DeliveredRange``, ``EndOfPass`` and ``Failed``.

    Attributes:
        pass_id: Its number; each has its own.
        loader: The loader, for messages.
        opening: Name of the opening of its source.
        source: Digest of its source.
        is_stream: Whether it is a worker of a stream.
        first: Number of its first batch: those before it were read by an earlier run.
        rank: This rank.
        world_size: Number of ranks.
        seed: Its base of random states.
        ring: Number of the ring for the batches.
        window_batches: Limit of requests in flight or buffered.
        is_window_fixed: Whether it limits the batches, too, although one request may ask for several small ones.
        window_bytes: Limit of their bytes.
    """

    pass_id: int
    loader: str
    opening: str
    source: str
    is_stream: bool
    first: int
    rank: int
    world_size: int
    seed: int
    ring: int
    window_batches: int
    is_window_fixed: bool
    window_bytes: int


class SupplyIndices(Message, frozen=True):
    """What the sampler yielded for the next batches of an iterator, pickled, and whether it has ended with them."""

    pass_id: int
    indices: list[bytes]
    is_end: bool


class AskSnapshot(Message, frozen=True):
    """A request for a ``FeederSnapshot``."""


class ShareFigures(Message, frozen=True):
    """The measurements of this rank, for the data hosts and, through them, for rank 0."""

    figures: RankFigures


class Finish(Message, frozen=True):
    """The last message: the training has ended."""


# From the feeder


class SourceOpened(Message, frozen=True):
    """A data host has opened a source, or none can.

    Attributes:
        name: Name of the opening.
        error: Name of an error in ``lightning_sm.errors``, or empty.
        text: Its text.
        result: What trainers get of a call of a hook.
    """

    name: str
    error: str = ""
    text: str = ""
    result: bytes = b""

    def exception(self) -> DataServiceError:
        """Return what the training process raises."""
        return error_class(self.error)(self.text)


class DeliveredRange(Message, frozen=True):
    """The batches of a step range, in one slot.

    Attributes:
        pass_id: Number of the pass.
        ring: Number of the ring.
        slot: Slot of the ring.
        first_step: Step of the first batch.
        num_steps: Number of batches.
        num_bytes: Bytes of all batches.
        figures: What one batch of it took, on average.
        batches: Where they lie, and how they are rebuilt.
        wanted_until: The batch before which the indices of all are wanted now.
    """

    pass_id: int
    ring: int
    slot: int
    first_step: int
    num_steps: int
    num_bytes: int
    figures: BatchFigures
    batches: list[EncodedBatch]
    wanted_until: int


class EndOfPass(Message, frozen=True):
    """Everything up to the end of the pass was delivered.

    Attributes:
        pass_id: Number of the pass.
    """

    pass_id: int


class Failed(Message, frozen=True):
    """A pass cannot continue, or none can if ``pass_id`` is None; ``error`` is a name in ``lightning_sm.errors``."""

    pass_id: int | None
    error: str
    text: str

    def exception(self) -> DataServiceError:
        """Return what the training process raises."""
        return error_class(self.error)(self.text)


class HostSnapshot(HostFigures, frozen=True):
    """A data host: what it did since the start, and what it does now.

    Attributes:
        in_flight: Requests of this rank that it has not answered.
        busy: Workers that build batches.
    """

    in_flight: int = 0
    busy: int = 0


class PassSnapshot(Struct, frozen=True):
    """A pass.

    Attributes:
        waiting_for: The step that is next.
        requested: The data hosts that it was requested from, and how many seconds ago.
        ready: Number of buffered batches.
        in_flight: Number of batches that are requested.
    """

    waiting_for: int
    requested: list[tuple[str, float]]
    ready: int
    in_flight: int


class FeederSnapshot(Message, frozen=True):
    """The feeder's view of hosts and passes.

    Attributes:
        ranks: The figures of each rank that a data host has, by the name of the rank.
    """

    hosts: list[HostSnapshot]
    passes: list[PassSnapshot]
    ranks: dict[str, RankFigures]
