"""The messages between a training process and its feeder."""

from __future__ import annotations

from typing import Literal

from msgspec.structs import replace

from lightning_sm import errors
from lightning_sm._structs import Struct
from lightning_sm.data.ipc.messages import Message
from lightning_sm.data.protocol.calls import HeartbeatRequest, LoaderPass, Loaders, OpenRequest, SetUp
from lightning_sm.data.protocol.figures import BatchFigures, HostFigures, RankFigures
from lightning_sm.data.protocol.openings import Opening
from lightning_sm.data.protocol.spec import LoaderDescription
from lightning_sm.data.settings import Credentials, Verify

# From the training process


def is_local(address: str) -> bool:
    """Return whether an address is that of the local workers of a trainer host."""
    return address.startswith("unix-abstract:")


class Configure(Message, frozen=True):
    """The first message.

    Attributes:
        addresses: Addresses of the data hosts.
        credentials: Credentials for them.
        client: The heartbeat of this rank, without figures.
        hedge_factor: See ``DataServiceSettings``.
        verify: See there.
        verify_share: See there.
        is_quiet: Whether another rank of this host logs what all of them would.
    """

    addresses: list[str]
    credentials: Credentials
    client: HeartbeatRequest
    hedge_factor: float
    verify: Verify = "off"
    verify_share: float = 0.0
    is_quiet: bool = False


class ShareSnapshot(Message, frozen=True):
    """From rank 0: a snapshot for the data hosts, of which ``fds`` has the memory."""

    digest: str
    num_bytes: int
    fds: tuple[int, ...]


class OpenLoaders(Message, frozen=True):
    """A request to all data hosts; answered by ``Opened``.

    Attributes:
        request: The request to the first data host, which runs ``prepare_data`` first.
        prepares_everywhere: Whether the others run ``prepare_data``, too.
        local_datamodule: Digest of the snapshot for local workers, which have not run the script; empty: the same.
    """

    request: OpenRequest
    prepares_everywhere: bool
    local_datamodule: str = ""

    @property
    def snapshots(self) -> set[str]:
        """Digests of the snapshots that data hosts and local workers need for it."""
        return {*self.request.snapshots, self.local_datamodule} - {""}

    def request_to(self, address: str) -> OpenRequest:
        """Return the request to a data host, or to local workers."""
        if self.local_datamodule and is_local(address):
            return replace(self.request, datamodule=self.local_datamodule)
        return self.request


class ShareRing(Message, frozen=True):
    """Memory for the batches of a loader: ring ``number``, of which ``fds`` has the descriptor."""

    number: int
    num_slots: int
    slot_bytes: int
    fds: tuple[int, ...]


class LoaderPlace(Struct, frozen=True):
    """The part of a data hosts' loader that a trainer's loader stands for, and its limits.

    Attributes:
        request_name: The request with which the data hosts opened their loaders.
        index: Index among the loaders of the request.
        stage: "train", "val", "test" or "predict".
        rank: This rank among those that split the data; 0 if every rank gets all of it.
        world_size: Number of ranks that split the data.
        seed: Base of all random states.
        window_batches: Limit of requests in flight or buffered.
        is_window_fixed: Whether it limits the batches, too, although one request may ask for several small ones.
        window_bytes: Limit of their bytes.
        max_batch_bytes: Capacity of a slot.
        timeout_s: Timeout of a batch, in seconds.
        compression: Codec of batches on the network; empty: none.
        num_shards: Number of virtual shards of an iterable dataset.
        batches_per_pass: Batches of an iterable dataset in a pass; None: the user did not set it.
    """

    request_name: str
    index: int
    stage: str
    rank: int
    world_size: int
    seed: int
    window_batches: int
    window_bytes: int
    max_batch_bytes: int
    timeout_s: float
    compression: str = ""
    is_window_fixed: bool = False
    num_shards: int = 1
    batches_per_pass: int | None = None


# What to do if the batches of the ranks differ in size in the last step of a pass: leave them as they are, pad them, or
# end the pass before this step.
TailMode = Literal["exact", "pad", "hold"]


class Position(Struct, frozen=True):
    """The start and the end of a pass.

    Attributes:
        epoch: Epoch of the training.
        pass_index: Index of the pass within the epoch.
        first_step: First batch of the pass.
        stop_step: End of the pass, exclusive; None: the end of the data.
        is_manual_iteration: Whether the user iterates over the loader, and not the Trainer.
        tail: What to do with an uneven last step.
        earlier_stop_step: End of the passes of earlier epochs, to which the Trainer limits them; None: it does not.
        order_stop: Samples (of a batch sampler: batches) after which the order of a sampler is cut; None: those that
            the pass needs.
    """

    epoch: int = 0
    pass_index: int = 0
    first_step: int = 0
    stop_step: int | None = None
    is_manual_iteration: bool = False
    tail: TailMode = "exact"
    earlier_stop_step: int | None = None
    order_stop: int | None = None


class PassRequest(Message, frozen=True):
    """A pass over a loader.

    Attributes:
        pass_id: Number of the pass; each request has its own.
        place: Which loader.
        loader: The data hosts' description of it.
        position: Where the pass starts and ends.
    """

    pass_id: int
    place: LoaderPlace
    loader: LoaderDescription
    position: Position

    @property
    def loader_pass(self) -> LoaderPass:
        """The pass, as data hosts are told of it."""
        place, position = self.place, self.position
        loader_pass = LoaderPass(place.request_name, place.index, place.seed, position.epoch, position.pass_index)
        if self.loader.order not in ("sampler", "batch_sampler"):
            return loader_pass
        step_items = place.world_size * (self.loader.batch_size or 1)
        # One step more than the pass needs, because a tail may belong to its last step.
        stop = 0 if position.stop_step is None else (position.stop_step + 1) * step_items
        return replace(
            loader_pass,
            stop=stop if position.order_stop is None else position.order_stop,
            # Before the first epoch there is no earlier one: passes that differ in nothing else share an order.
            earlier_stop=(position.earlier_stop_step or 0) * step_items if position.epoch else 0,
        )


class MeasurePass(PassRequest, frozen=True):
    """A request for the length of a pass; answered by ``Length`` or ``Failed``."""


class StartPass(PassRequest, frozen=True):
    """A request for the batches of a pass; answered by ``DeliveredRange``, ``EndOfPass`` and ``Failed``.

    Attributes:
        ring: Number of the ring for them.
        tells_keys: Whether the training process wants the keys of each batch.
    """

    ring: int
    tells_keys: bool


class OpenSource(Message, frozen=True):
    """A source that data hosts are to open; answered by ``SourceOpened``. A ``ShareSnapshot`` with it came before."""

    opening: Opening


class CloseSource(Message, frozen=True):
    """A source that is no longer needed."""

    name: str


class StartIterator(Message, frozen=True):
    """An iterator over a loader, or over one of the workers of a stream; answered like ``StartPass``.

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
        compression: Codec of batches on the network; empty: none.
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
    compression: str = ""


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
    """The last message: how the training ended; see ``calls.FinishRequest``."""

    outcome: str
    is_success: bool


# From the feeder


class Opened(Message, frozen=True):
    """The reply on which the data hosts agree."""

    opening: str
    reply: SetUp | Loaders


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

    def exception(self) -> Exception:
        """Return what the training process raises."""
        return _exception(self.error, self.text)


class Length(Message, frozen=True):
    """The length of a pass.

    Attributes:
        pass_id: Number of the pass.
        num_steps: Its steps.
        num_dropped: Batches of all ranks that it leaves out.
        digest: Digest of the order, if it is that of a sampler.
        is_cut: Whether the sampler has more than the limit of the pass.
    """

    pass_id: int
    num_steps: int
    num_dropped: int
    digest: str = ""
    is_cut: bool = False


class DeliveredRange(Message, frozen=True):
    """The batches of a step range, in one slot.

    Attributes:
        pass_id: Number of the pass.
        ring: Number of the ring.
        slot: Slot of the ring.
        first_step: Step of the first batch.
        num_steps: Number of batches.
        num_bytes: Bytes of all batches.
        queue_s: Seconds that the request waited for a worker.
        produce_s: Seconds that the worker took for all batches.
        transfer_s: Seconds from request to delivery, without these two.
        num_ready: Batches that are buffered behind these.
        row: Row of the block that the first batch is in; each further batch is in the next row. None: the batches
            belong to no block, and follow each other.
        keys: Indices of the samples of each batch; empty if they are not wanted.
        tail_weight: Weight of the last of the batches, see ``plan.samples.Tail``: 1 unless it is the last of the pass.
        encoded_batches: Places and structures of the batches, from ``frames.pack_batches``.
        wanted_until: The batch before which the indices of all are wanted now, by an iterator.
    """

    pass_id: int
    ring: int
    slot: int
    first_step: int
    num_steps: int
    num_bytes: int
    queue_s: float
    produce_s: float
    transfer_s: float
    num_ready: int
    row: int | None
    keys: list[list[int]]
    tail_weight: float
    encoded_batches: bytes
    wanted_until: int = 0

    def figures(self) -> BatchFigures:
        """Return what one batch of it took, on average."""
        return BatchFigures(
            num_bytes=self.num_bytes // self.num_steps,
            queue_s=self.queue_s / self.num_steps,
            produce_s=self.produce_s / self.num_steps,
            transfer_s=self.transfer_s / self.num_steps,
            num_ready=self.num_ready,
        )


class EndOfBlock(Message, frozen=True):
    """All batches of the block were delivered."""

    pass_id: int


class EndOfPass(Message, frozen=True):
    """Everything up to the end of the pass was delivered.

    Attributes:
        pass_id: Number of the pass.
        num_batches: Batches in the rank's shards, if they are known.
        held_step: The uneven last step that was held back; None: there is none.
    """

    pass_id: int
    num_batches: int | None
    held_step: int | None = None


class Failed(Message, frozen=True):
    """A pass cannot continue, or none can if ``pass_id`` is None; ``error`` is a name in ``lightning_sm.errors``."""

    pass_id: int | None
    error: str
    text: str

    def exception(self) -> Exception:
        """Return what the training process raises."""
        return _exception(self.error, self.text)


def _exception(error: str, text: str) -> Exception:
    kind: type[Exception] = getattr(errors, error, errors.DataServiceError)
    return kind(text)


class HostSnapshot(HostFigures, frozen=True):
    """A data host: what it did since the start, and what it does now.

    Attributes:
        in_flight: Requests of this rank that it has not answered.
        busy: Workers that build batches.
        queued: Requests of all ranks that wait for a worker.
        stuck: The worker that may hang, and the call in which it is.
    """

    in_flight: int = 0
    busy: int = 0
    queued: int = 0
    stuck: str = ""


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
