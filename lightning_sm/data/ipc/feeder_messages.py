"""The messages between a training process and its feeder."""

from __future__ import annotations

from lightning_sm._structs import Struct
from lightning_sm.data.ipc.messages import Message
from lightning_sm.data.protocol.calls import HeartbeatRequest
from lightning_sm.data.protocol.failures import error_class
from lightning_sm.data.protocol.fetch import FetchSpec
from lightning_sm.data.protocol.frames import EncodedBatch
from lightning_sm.data.protocol.openings import Opening
from lightning_sm.data.settings import Credentials
from lightning_sm.errors import DataServiceError
from lightning_sm.record.data_figures import BatchFigures, HostFigures, RankFigures

# From the training process


class Configure(Message, frozen=True):
    """The first message, which configures the feeder.

    Attributes:
        addresses: Addresses of the data hosts.
        credentials: Credentials for the data hosts.
        client: This rank's heartbeat, without figures.
        is_quiet: Whether another rank on this host logs the messages that are common to all ranks.
    """

    addresses: list[str]
    credentials: Credentials
    client: HeartbeatRequest
    is_quiet: bool = False


class ShareRing(Message, frozen=True):
    """Memory for a loader's batches: ring ``number``, with its descriptor in ``fds``."""

    number: int
    num_slots: int
    slot_bytes: int
    fds: tuple[int, ...]


class OpenSource(Message, frozen=True):
    """A source for data hosts to open, with the descriptor of its memory in ``fds``.

    The answer is a ``SourceOpened`` for each of the openings.
    """

    openings: list[Opening]
    num_bytes: int
    fds: tuple[int, ...]


class CloseSource(Message, frozen=True):
    """A source that is no longer needed."""

    name: str


class StartIterator(Message, frozen=True):
    """An iterator over a loader, or over one worker of a stream.

    The answers are ``DeliveredRange``, ``EndOfPass`` and ``Failed`` messages.

    Attributes:
        pass_id: Unique number of the iterator.
        loader: Name of the loader, for messages.
        source: Digest of the source.
        is_stream: Whether the iterator is over a worker of a stream.
        fetch: A request for the first batch, without its indices. All batches before it were read in an earlier run.
        ring: Number of the ring for the batches.
        window_batches: Limit on requests in flight or buffered.
        is_window_fixed: Whether ``window_batches`` also limits the batches; a request may ask for several.
        window_bytes: Limit on bytes in flight or buffered.
    """

    pass_id: int
    loader: str
    source: str
    is_stream: bool
    fetch: FetchSpec
    ring: int
    window_batches: int
    is_window_fixed: bool
    window_bytes: int


class SupplyIndices(Message, frozen=True):
    """Pickled indices for an iterator's next batches, as yielded by the sampler. With ``is_end``, no more follow."""

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
    """A data host has opened a source, or no host can.

    Attributes:
        name: Name of the opening.
        error: Name of an error in ``lightning_sm.errors``, or empty.
        text: Text of the error.
        result: Pickled result of a hook call.
    """

    name: str
    error: str = ""
    text: str = ""
    result: bytes = b""

    def exception(self) -> DataServiceError:
        """Return the error that the training process raises."""
        return error_class(self.error)(self.text)


class DeliveredRange(Message, frozen=True):
    """The batches of a step range, in one slot.

    Attributes:
        pass_id: Number of the pass.
        slot: Slot of the ring.
        first_step: Step of the first batch.
        num_steps: Number of batches.
        num_bytes: Total size of the batches.
        figures: Figures per batch, averaged over the range.
        batches: Where the batches are, and how to rebuild them.
        wanted_until: The first batch for which the feeder does not want indices yet.
    """

    pass_id: int
    slot: int
    first_step: int
    num_steps: int
    num_bytes: int
    figures: BatchFigures
    batches: list[EncodedBatch]
    wanted_until: int


class EndOfPass(Message, frozen=True):
    """The end of a pass, all of whose batches have been delivered.

    Attributes:
        pass_id: Number of the pass.
    """

    pass_id: int


class Failed(Message, frozen=True):
    """A pass, or every pass if ``pass_id`` is None, has failed; ``error`` is a name in ``lightning_sm.errors``."""

    pass_id: int | None
    error: str
    text: str

    def exception(self) -> DataServiceError:
        """Return the error that the training process raises."""
        return error_class(self.error)(self.text)


class HostSnapshot(HostFigures, frozen=True):
    """A data host's totals since the start, and its current state.

    Attributes:
        in_flight: Number of requests from this rank that the host has not answered.
        busy: Number of workers that are building batches.
    """

    in_flight: int = 0
    busy: int = 0


class PassSnapshot(Struct, frozen=True):
    """The current state of a pass.

    Attributes:
        waiting_for: The step that the consumer needs next.
        requested: The data hosts from which that step was requested, and how many seconds ago.
        ready: Number of buffered batches.
    """

    waiting_for: int
    requested: list[tuple[str, float]]
    ready: int


class FeederSnapshot(Message, frozen=True):
    """The feeder's view of hosts and passes.

    Attributes:
        ranks: Figures that data hosts have for each rank, by rank name.
    """

    hosts: list[HostSnapshot]
    passes: list[PassSnapshot]
    ranks: dict[str, RankFigures]
