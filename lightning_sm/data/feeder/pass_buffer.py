"""The batches of one pass in the feeder: their requests, the slots that their bytes go to, and delivery in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

import numpy as np

from lightning_sm.data.batch.compression import codec_of
from lightning_sm.data.feeder.scheduler import StepRange
from lightning_sm.data.ipc.feeder_messages import DeliveredRange, EndOfBlock
from lightning_sm.data.ipc.ring import Ring
from lightning_sm.data.plan.samples import BatchPlan, SamplePlan, Tail
from lightning_sm.data.plan.shards import ShardSteps
from lightning_sm.data.protocol.frames import StepRangeHeader
from lightning_sm.data.protocol.spec import CHUNK_BYTES, BatchSpec, StepRangeSpec
from lightning_sm.errors import BatchTooLargeError, WireError

StepPlan: TypeAlias = SamplePlan | BatchPlan | ShardSteps

# A request asks for at most this many bytes, seconds of work, or batches. Longer ranges make small batches faster
# (benchmarks/README.md), but a window of 32 requests takes more memory, and other ranks wait longer behind a request.
_RANGE_BYTES = 8 << 20
_RANGE_S = 0.01
_MAX_RANGE_LENGTH = 256
# A window that the user limits is divided into at least this many requests, so that all workers have work.
_MIN_RANGES = 8
# Batches differ in size, and a range that does not fit into a slot is requested again step by step: fill only this part
# of a slot.
_SLOT_PART = 1 / 2

# The training process holds a whole block of shards' batches: let it take at most this part of the bytes ahead.
_BLOCK_PART = 1 / 4

_NOT_ARRIVED = StepRangeHeader(-1, 0.0, 0.0, b"")


@dataclass(eq=False)
class InFlightRange:
    """A step range that was requested from one host.

    Attributes:
        step_range: The steps.
        slot: Slot for the bytes of the batches.
        header: The header of the answer.
        received: Bytes received so far.
        transfer_s: Seconds from request to the last byte, without those in queue and worker.
        is_written: Whether a piece is being written to the slot.
        is_dropped: Whether the request was cancelled: the slot is free once that piece is written.
    """

    step_range: StepRange
    slot: int
    header: StepRangeHeader = _NOT_ARRIVED
    received: int = 0
    transfer_s: float = 0.0
    is_written: bool = False
    is_dropped: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether the header and all bytes have arrived."""
        return self.received == self.header.num_bytes


class Piece(NamedTuple):
    """A piece of an answer, and its place in the slot.

    Attributes:
        answer: The answer.
        place: Where it goes, uint8.
        compression: Name of the codec that it was compressed with; empty: none.
    """

    answer: InFlightRange
    place: np.ndarray
    compression: str

    def write(self, payload: memoryview) -> None:
        """Copy or decompress the piece to its place. It is slow, but needs no lock: no other thread uses the place.

        Raises:
            WireError: The piece is malformed, or of another size.
        """
        if self.compression:
            payload = memoryview(codec_of(self.compression).decompress(payload, len(self.place)))
        self.place[:] = np.frombuffer(payload, np.uint8)


@dataclass(eq=False)
class PassBuffer:
    """The batches of one pass.

    Attributes:
        pass_id: Number of the pass.
        name: Name of the loader, for messages.
        ring: Memory for the batches.
        ring_number: Number of the ring in the training process.
        free: Unused slots of the ring; shared by all passes over the loader.
        spec: A request without batches.
        batch_spec: A batch of the pass, without position and keys.
        plan: Keys of each step.
        next_step: Next step to deliver.
        stop_step: Step after the last; None while it is unknown.
        window_batches: Requests that may be in flight or buffered.
        window_bytes: Bytes that may be in flight or buffered.
        is_window_fixed: Whether ``window_batches`` limits the batches, too, and not only the requests for them.
        rank: Rank whose batches they are.
        tells_keys: Whether the training process gets the keys of each batch.
        tail: The last step of the plan.
        holds_tail: Whether the pass ends before this step if it is uneven.
        held_step: The step before which the pass ends for this reason.
        has_indices: Whether the keys are indices of the dataset.
        range_length: Batches per future request.
        largest: Bytes of the largest batch so far, also of earlier passes; batches of one answer count with their mean.
            0: unknown.
        produce_s: Moving average of the seconds that a worker takes for a batch.
        in_flight: Requested ranges by request id.
        ready: Complete ranges by their first step.
        empty: Steps that are skipped, because their shard has no such batch.
        taken: The consumer has taken all steps below this one.
    """

    pass_id: int
    name: str
    ring: Ring
    ring_number: int
    free: list[int]
    spec: StepRangeSpec
    batch_spec: BatchSpec
    plan: StepPlan
    next_step: int
    stop_step: int | None
    window_batches: int
    window_bytes: int
    is_window_fixed: bool = False
    rank: int = 0
    tells_keys: bool = False
    tail: Tail = Tail()  # noqa: RUF009  # immutable
    holds_tail: bool = False
    held_step: int | None = None
    has_indices: bool = False
    range_length: int = 1
    largest: int = 0
    produce_s: float = 0.0
    in_flight: dict[int, InFlightRange] = field(default_factory=dict)
    ready: dict[int, InFlightRange] = field(default_factory=dict)
    empty: set[int] = field(default_factory=set)
    taken: int = 0

    def __post_init__(self) -> None:
        """Limit the pass to the steps of its plan."""
        if isinstance(self.plan, ShardSteps):  # its step 0 is where the pass begins
            self.next_step = 0
            self.stop_step = self.plan.stop_step
        else:
            stop = self.plan.num_steps if self.stop_step is None else min(self.plan.num_steps, self.stop_step)
            if self.holds_tail and self.tail.is_uneven and self.next_step < stop == self.plan.num_steps:
                stop -= 1
                self.held_step = stop
            self.stop_step = max(stop, self.next_step)

    @property
    def window(self) -> int:
        """Steps that may be in flight or buffered, given the sizes seen so far; at least 2, to overlap them.

        No more than 2 while no size is known: any number of them could exceed ``window_bytes``.
        """
        if not self.largest:
            return min(2, self.window_batches)
        num_steps = self.window_batches * (1 if self.is_window_fixed else self.range_length)
        return max(2, min(num_steps, self.window_bytes // self.largest))

    # Requests

    def reserve(self, request_id: int, step_range: StepRange) -> bytes | None:
        """Reserve a slot for a range, and return the encoded spec; None if no slot is free."""
        if not self.free:
            return None
        self.in_flight[request_id] = InFlightRange(step_range, self.free.pop())
        steps = range(step_range.first, step_range.stop)
        return replace(self.spec, batches=tuple(map(self.spec_of, steps))).encode()

    def spec_of(self, step: int) -> BatchSpec:
        """Return everything that the content of a step's batch depends on."""
        plan = self.plan
        if isinstance(plan, ShardSteps):
            return self.batch_spec._replace(keys=plan.batch(step))
        return self.batch_spec._replace(
            order_length=plan.order_length, position=plan.position(step), keys=plan.batch(step)
        )

    def drop(self, request_id: int) -> None:
        """Forget a request, if it is in flight. Its slot is free as soon as no piece is being written to it."""
        answer = self.in_flight.pop(request_id, None)
        if answer is None:
            return
        if answer.is_written:
            answer.is_dropped = True
        else:
            self.free.append(answer.slot)

    # Answers

    def take_header(self, request_id: int, header: StepRangeHeader) -> None:
        """Record the header of an answer.

        Raises:
            BatchTooLargeError: The batches do not fit into a slot.
            WireError: It is a second header, or announces a wrong number of batches.
        """
        answer = self.in_flight[request_id]
        if answer.header is not _NOT_ARRIVED:
            raise WireError("a second header arrived")
        least = 1 if isinstance(self.plan, ShardSteps) else answer.step_range.num_steps
        if not least <= header.num_batches <= answer.step_range.num_steps:
            raise WireError(f"{header.num_batches} batches arrived for a request for {answer.step_range.num_steps}")
        if header.num_bytes > self.ring.slot_bytes:
            raise BatchTooLargeError(
                f"The batch of step {answer.step_range.first} has {header.num_bytes} bytes, but a slot only "
                f"{self.ring.slot_bytes} (data_service.max_batch_bytes). Raise the limit on all hosts, or make batches "
                "smaller."
            )
        answer.header = header
        # At once, not when the bytes have arrived: the window opens, or closes, that much earlier. Batches without
        # bytes are known, too.
        self.largest = max(self.largest, 1, -(-header.num_bytes // header.num_batches))

    def begin_piece(self, request_id: int, offset: int, size: int, *, is_compressed: bool) -> Piece:
        """Reserve the place of a piece of an answer; ``end_piece`` follows once it is written.

        Args:
            request_id: Number of the request.
            offset: Where the piece begins among the bytes of the answer.
            size: Bytes that arrived.
            is_compressed: Whether they are compressed.

        Raises:
            WireError: The piece is out of order, exceeds the announced size, or is not meant to be compressed.
        """
        answer = self.in_flight[request_id]
        num_bytes = answer.header.num_bytes
        if is_compressed:
            if not self.spec.compression:
                raise WireError("a compressed piece arrived, but compression is off")
            size = max(0, min(CHUNK_BYTES, num_bytes - offset))
        stop = offset + size
        if offset != answer.received or stop > num_bytes:
            raise WireError(f"bytes {offset} to {stop} arrived after {answer.received} of {num_bytes}")
        answer.is_written = True
        place = self.ring.slot(answer.slot)[offset:stop]
        return Piece(answer, place, self.spec.compression if is_compressed else "")

    def end_piece(self, piece: Piece) -> None:
        """Count a piece that was written; free the slot if the answer was dropped meanwhile."""
        answer = piece.answer
        answer.is_written = False
        answer.received += len(piece.place)
        if answer.is_dropped:
            self.free.append(answer.slot)

    def accept(self, request_id: int, latency_s: float) -> InFlightRange:
        """Keep a complete answer until its first step is next, and return it.

        Args:
            request_id: Number of the request.
            latency_s: Seconds from the request until now.
        """
        answer = self.in_flight.pop(request_id)
        header = answer.header
        answer.transfer_s = max(0.0, latency_s - header.queue_s - header.produce_s)
        self.ready[answer.step_range.first] = answer
        self._choose_range_length(header)
        if isinstance(self.plan, ShardSteps):
            self.plan.range_length = self.range_length
            if header.num_batches < answer.step_range.num_steps:  # the shard ends with these batches
                end = int(self.plan.batch(answer.step_range.first)[2]) + header.num_batches
                self._skip(self.plan, range(answer.step_range.first + header.num_batches, answer.step_range.stop), end)
                answer.step_range = StepRange(answer.step_range.first, header.num_batches)
        return answer

    def _choose_range_length(self, header: StepRangeHeader) -> None:
        """Choose how many batches a request asks for: as many as the limits allow, at most twice as many as before."""
        num_steps = header.num_batches
        produce_s = header.produce_s / num_steps
        self.produce_s += (produce_s - self.produce_s) * (1 / 8 if self.produce_s else 1)
        num_bytes = (header.num_bytes + len(header.encoded_batches)) / num_steps
        range_bytes = min(_RANGE_BYTES, self.window_bytes / _MIN_RANGES, _SLOT_PART * self.ring.slot_bytes)
        most = min(_MAX_RANGE_LENGTH, range_bytes / max(1.0, num_bytes), _RANGE_S / max(1e-9, self.produce_s))
        if isinstance(self.plan, ShardSteps):
            most = min(most, _BLOCK_PART * self.window_bytes / max(1.0, num_bytes) / self.plan.num_shards)
        length = max(1, min(2 * self.range_length, int(most)))
        if self.is_window_fixed:
            length = max(1, min(length, self.window // _MIN_RANGES))
        self.range_length = length

    def skip(self, request_id: int, end: int | None) -> None:
        """Record the answer that a shard has none of the batches of a request.

        Args:
            request_id: Number of the request.
            end: Number of batches in the shard; None: the shard has the batch that the step probed.

        Raises:
            WireError: The answer does not fit the request.
        """
        step_range = self.in_flight[request_id].step_range
        if not isinstance(self.plan, ShardSteps):
            raise WireError("only shards have an end")
        self._skip(self.plan, range(step_range.first, step_range.stop), end)
        self.drop(request_id)

    def _skip(self, plan: ShardSteps, steps: range, end: int | None) -> None:
        for step in steps:
            plan.skip(step, end)
        self.empty.update(steps)
        self.stop_step = plan.stop_step

    # Delivery

    def deliveries(self, *, holds_last: bool = False) -> Iterator[DeliveredRange | EndOfBlock]:
        """Remove the ranges that are next, in order, and yield their messages to the training process.

        Args:
            holds_last: Whether the last range of the pass stays.
        """
        while self.next_step in self.ready or self.next_step in self.empty:
            if self.next_step in self.ready:
                if holds_last and self.ready[self.next_step].step_range.stop == self.stop_step:
                    return
                answer = self.ready.pop(self.next_step)
                self.next_step = answer.step_range.stop
                yield self._delivery(answer)
            else:
                self.next_step += 1
            if isinstance(self.plan, ShardSteps) and self.plan.ends_block(self.next_step):
                yield EndOfBlock(self.pass_id)

    def _delivery(self, answer: InFlightRange) -> DeliveredRange:
        header = answer.header
        steps = range(answer.step_range.first, answer.step_range.stop)
        return DeliveredRange(
            pass_id=self.pass_id,
            ring=self.ring_number,
            slot=answer.slot,
            first_step=answer.step_range.first,
            num_steps=answer.step_range.num_steps,
            num_bytes=header.num_bytes,
            queue_s=header.queue_s,
            produce_s=header.produce_s,
            transfer_s=answer.transfer_s,
            num_ready=sum(answer.step_range.num_steps for answer in self.ready.values()),
            row=self.plan.row(answer.step_range.first) if isinstance(self.plan, ShardSteps) else None,
            keys=[self.plan.batch(step).tolist() for step in steps] if self.tells_keys else [],
            tail_weight=self.tail.weight if steps.stop == self.plan.num_steps else 1.0,
            encoded_batches=header.encoded_batches,
        )

    def take(self, step: int) -> int:
        """Record that the consumer has taken all steps below ``step``, and return where the window begins."""
        self.taken = max(self.taken, step)
        while self.taken < self.next_step and self.taken in self.empty:
            self.empty.remove(self.taken)
            self.taken += 1
        if isinstance(self.plan, ShardSteps):
            self.plan.forget(self.taken)
        # Empty steps after the end were skipped, too, but are not part of the pass.
        return self.taken if self.stop_step is None else min(self.taken, self.stop_step)
