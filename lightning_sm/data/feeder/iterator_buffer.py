"""The feeder's buffer for one iterator: indices, requests, slots, and in-order delivery of batches.

It also chooses how many batches each request asks for, and how many may be in flight or buffered.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from lightning_sm.data.feeder.scheduler import PassLimits, StepRange
from lightning_sm.data.ipc.feeder_messages import DeliveredRange, EndOfPass, Failed, StartIterator
from lightning_sm.data.ipc.ring import Ring
from lightning_sm.data.protocol.frames import StepRangeHeader
from lightning_sm.data.protocol.spec import MAX_RANGE_LENGTH
from lightning_sm.errors import BatchTooLargeError, WireError
from lightning_sm.record.data_figures import BatchFigures

# Stands for the end of an iterator until the end of its sampler or stream is known.
_NO_END = 1 << 62

# Limits on a request in bytes and seconds of work, besides MAX_RANGE_LENGTH. With longer ranges, small batches arrive
# faster (benchmarks/README.md), but a window of 32 requests takes more memory, and other ranks wait longer for workers.
_RANGE_BYTES = 8 << 20
_RANGE_S = 0.01
# Split a window that the user limits into at least this many requests, so that all workers stay busy.
_MIN_RANGES = 8
# Fill only this fraction of a slot: batches differ in size, and a range that does not fit is requested step by step.
_SLOT_PART = 1 / 2


_NOT_ARRIVED = StepRangeHeader(-1, 0.0, 0.0, [])


@dataclass(eq=False)
class InFlightRange:
    """The answer to a request for a step range, and the destination of the piece being written.

    Attributes:
        step_range: The steps.
        slot: Number of the slot for the batches.
        buffer: The slot's memory.
        header: Header of the answer.
        received: Bytes received so far.
        piece: Memory for the piece being written, if any.
        is_dropped: Whether the request was cancelled. The slot is freed once the piece has been written.
        transfer_s: Seconds from the request to the last byte, excluding the time in the queue and in the worker.
        ended: Called at the end of the piece, with whether all of it has arrived.
    """

    step_range: StepRange
    slot: int
    buffer: memoryview
    header: StepRangeHeader = _NOT_ARRIVED
    received: int = 0
    piece: memoryview | None = None
    is_dropped: bool = False
    transfer_s: float = 0.0
    ended: Callable[[bool], None] = field(init=False)

    @property
    def is_complete(self) -> bool:
        """Whether the header and all bytes have arrived."""
        return self.received == self.header.num_bytes

    @property
    def memory(self) -> memoryview | None:
        """Memory for the piece, or None if the request was cancelled."""
        return None if self.is_dropped else self.piece

    def begin_piece(self, offset: int, size: int, ended: Callable[[bool], None]) -> InFlightRange:
        """Reserve memory for a piece, and return its destination.

        Args:
            offset: Offset of the piece in the answer, in bytes.
            size: Size of the piece, in bytes.
            ended: Called once, with whether the whole piece has arrived. Nothing more is written after the call.

        Raises:
            WireError: The piece is out of order, or exceeds the announced size.
        """
        num_bytes = self.header.num_bytes
        stop = offset + size
        if offset != self.received or stop > num_bytes:
            raise WireError(f"bytes {offset} to {stop} arrived after {self.received} of {num_bytes}")
        self.piece, self.ended = self.buffer[offset:stop], ended
        return self

    def end(self, is_complete: bool) -> None:
        """Report whether the piece has arrived."""
        self.ended(is_complete)


class IteratorBuffer:
    """The batches of one iterator, numbered from the first batch that it requests.

    Args:
        request: Description of the iterator, with its limits.
        ring: Memory for the batches.
        free: Unused slots of the ring.
        largest: Size of the largest batch in earlier iterators, in bytes; 0 if unknown.

    Attributes:
        request: Description of the iterator.
        limits: How far the iterator may go, for the scheduler.
        largest: Size of the largest batch so far, in bytes. If an answer has several batches, their mean size counts.
        in_flight: Requested ranges by request id.
        ready: Complete ranges that the consumer has not taken, by their first step.
        errors: Errors by their batch, in whose place they are delivered.
        next_step: The next batch to deliver.
    """

    def __init__(self, request: StartIterator, ring: Ring, free: list[int], *, largest: int = 0) -> None:
        self.request = request
        self.largest = largest
        known = _NO_END if request.is_stream else 0
        self.limits = PassLimits(_NO_END, min(2, request.window_batches), request.window_batches, free, known)
        self.in_flight: dict[int, InFlightRange] = {}
        self.ready: dict[int, InFlightRange] = {}
        self.errors: dict[int, Exception] = {}
        self.next_step = 0
        self._indices: dict[int, bytes] = {}  # by batch, until delivered
        self._has_ended = False
        self._ring = ring
        self._produce_s = 0.0  # moving average per batch
        self._update_window()

    @property
    def pass_id(self) -> int:
        """Number of the iterator."""
        return self.request.pass_id

    def supply(self, indices: list[bytes], *, is_end: bool) -> None:
        """Add the indices of the next batches.

        Args:
            indices: What the sampler yielded for each batch, pickled.
            is_end: Whether these are the last ones.
        """
        for index in indices:
            self._indices[self.limits.known] = index
            self.limits.known += 1
        if is_end:
            self.limits.stop_step = self.limits.known

    def keys(self, step: int) -> list[Any]:
        """Return the indices of a batch, for messages."""
        if step not in self._indices:
            return []
        index = pickle.loads(self._indices[step])  # noqa: S301  # from the training process
        return list(index) if isinstance(index, (list, tuple)) else [index]

    # Requests

    def _update_window(self) -> None:
        """Set the number of steps that may be in flight or buffered.

        It depends on the largest batch so far, but is at least 2, so that steps overlap, unless the limit is
        lower. Until a size is known, it is at most 2, because more steps could exceed ``window_bytes``.
        """
        request = self.request
        num_steps = request.window_batches * (1 if request.is_window_fixed else self.limits.range_length)
        fitting = request.window_bytes // self.largest if self.largest else 0
        self.limits.window = max(min(2, request.window_batches), min(num_steps, fitting))

    def expect(self, request_id: int, step_range: StepRange, slot: int) -> bytes:
        """Expect the answer for a range in a slot, and return the encoded request."""
        request = self.request
        self.in_flight[request_id] = InFlightRange(step_range, slot, self._ring.slot(slot))
        steps = range(step_range.first, step_range.stop)
        indices = [] if request.is_stream else [self._indices[step] for step in steps]
        first = request.fetch.first + step_range.first
        return replace(request.fetch, first=first, num_batches=step_range.num_steps, indices=indices).encode()

    def drop(self, request_id: int) -> None:
        """Forget a request if it is in flight. Its slot is freed once no piece is being written to it."""
        answer = self.in_flight.pop(request_id, None)
        if answer is None:
            return
        if answer.piece is not None:
            answer.is_dropped = True
        else:
            self.limits.free.append(answer.slot)

    # Answers

    def take_header(self, request_id: int, header: StepRangeHeader) -> None:
        """Record the header of an answer.

        Raises:
            BatchTooLargeError: The batches do not fit into a slot.
            WireError: The answer already has a header, or the number of batches is wrong.
        """
        answer = self.in_flight[request_id]
        num_batches = len(header.batches)
        least = 1 if self.request.is_stream else answer.step_range.num_steps
        if not least <= num_batches <= answer.step_range.num_steps:
            raise WireError(f"{num_batches} batches arrived for a request for {answer.step_range.num_steps}")
        if header.num_bytes > self._ring.slot_bytes:
            raise BatchTooLargeError(
                f"The batch of step {answer.step_range.first} has {header.num_bytes} bytes, but a slot has only "
                f"{self._ring.slot_bytes} (data_service.max_batch_bytes). Raise the limit on all hosts, or make "
                "batches smaller."
            )
        if answer.header is not _NOT_ARRIVED:
            raise WireError("a second header arrived")
        answer.header = header
        # Update this before the bytes arrive, so that the window adapts sooner. Batches without bytes count as 1 byte,
        # because 0 means unknown.
        self.largest = max(self.largest, 1, -(-header.num_bytes // num_batches))
        self._update_window()

    def end_piece(self, answer: InFlightRange, *, is_complete: bool = True) -> None:
        """Count the bytes of a complete piece, and free the slot if the answer was dropped in the meantime."""
        answer.received += len(answer.piece or b"") * is_complete
        answer.piece = None
        if answer.is_dropped:
            self.limits.free.append(answer.slot)

    def accept(self, request_id: int, latency_s: float) -> InFlightRange:
        """Store a complete answer until its first batch is due, and return the answer.

        Args:
            request_id: Number of the request.
            latency_s: Seconds from the request until now.
        """
        answer = self.in_flight.pop(request_id)
        header, first = answer.header, answer.step_range.first
        answer.transfer_s = max(0.0, latency_s - header.queue_s - header.produce_s)
        self.ready[first] = answer
        self._choose_range_length(header)
        if len(header.batches) < answer.step_range.num_steps:  # the stream ends with these batches
            answer.step_range = StepRange(first, len(header.batches))
            self.limits.stop_step = min(self.limits.stop_step, answer.step_range.stop)
        return answer

    def _choose_range_length(self, header: StepRangeHeader) -> None:
        """Set the number of batches per request: the most that the limits allow, up to twice the last number."""
        request, num_batches = self.request, len(header.batches)
        produce_s = header.produce_s / num_batches
        self._produce_s += (produce_s - self._produce_s) * (1 / 8 if self._produce_s else 1)
        num_bytes = header.num_bytes / num_batches
        range_bytes = min(_RANGE_BYTES, request.window_bytes / _MIN_RANGES, _SLOT_PART * self._ring.slot_bytes)
        most = min(MAX_RANGE_LENGTH, range_bytes / max(1.0, num_bytes), _RANGE_S / max(1e-9, self._produce_s))
        length = max(1, min(2 * self.limits.range_length, int(most)))
        if request.is_window_fixed:
            length = max(1, min(length, self.limits.window // _MIN_RANGES))
        self.limits.range_length = length
        self._update_window()

    def skip(self, request_id: int, end: int) -> None:
        """Record that a stream has ended before the requested batches.

        Args:
            request_id: Number of the request.
            end: Number of batches in the stream.

        Raises:
            WireError: The iterator is not over a stream.
        """
        if not self.request.is_stream:
            raise WireError("only streams have an end")
        # Another host's stream may be shorter, but what was delivered stays.
        stop_step = max(self.next_step, end - self.request.fetch.first)
        self.limits.stop_step = min(self.limits.stop_step, stop_step)
        self.drop(request_id)

    # Delivery

    def deliveries(self) -> Iterator[DeliveredRange | EndOfPass | Failed]:
        """Yield messages that deliver the ranges and the error that are due, in order."""
        while self.next_step < self.limits.stop_step and (answer := self.ready.get(self.next_step)) is not None:
            for step in range(self.next_step, answer.step_range.stop):
                self._indices.pop(step, None)
            self.next_step = answer.step_range.stop
            yield self._delivery(answer)
        if (error := self.errors.pop(self.next_step, None)) is not None:
            yield Failed(self.pass_id, type(error).__name__, str(error))
        if self.next_step >= self.limits.stop_step and not self._has_ended:
            self._has_ended = True
            yield EndOfPass(self.pass_id)

    def _delivery(self, answer: InFlightRange) -> DeliveredRange:
        header, num_steps = answer.header, answer.step_range.num_steps
        figures = BatchFigures(
            num_bytes=header.num_bytes // num_steps,
            queue_s=header.queue_s / num_steps,
            produce_s=header.produce_s / num_steps,
            transfer_s=answer.transfer_s / num_steps,
            num_ready=sum(other.step_range.num_steps for first, other in self.ready.items() if first >= self.next_step),
        )
        return DeliveredRange(
            pass_id=self.pass_id,
            slot=answer.slot,
            first_step=answer.step_range.first,
            num_steps=num_steps,
            num_bytes=header.num_bytes,
            figures=figures,
            batches=header.batches,
            wanted_until=answer.step_range.stop + self.limits.window + self.limits.range_length,
        )

    def take(self, step: int) -> None:
        """Forget the batches below ``step``: the consumer has taken them, and will release their slots."""
        self.ready = {first: answer for first, answer in self.ready.items() if first >= step}
