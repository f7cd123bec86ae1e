"""The requests for batches in the feeder, the slots that their bytes go to, and how many batches each asks for."""

from __future__ import annotations

from lightning_sm.data.feeder.answer import InFlightRange, Piece
from lightning_sm.data.feeder.scheduler import StepRange
from lightning_sm.data.ipc.feeder_messages import StartIterator
from lightning_sm.data.ipc.ring import Ring
from lightning_sm.data.protocol.frames import StepRangeHeader
from lightning_sm.data.protocol.spec import MAX_RANGE_LENGTH
from lightning_sm.errors import BatchTooLargeError, WireError

# A request asks for at most this many bytes, seconds of work, or batches. Longer ranges make small batches faster
# (benchmarks/README.md), but a window of 32 requests takes more memory, and other ranks wait longer behind a request.
_RANGE_BYTES = 8 << 20
_RANGE_S = 0.01
# A window that the user limits is divided into at least this many requests, so that all workers have work.
_MIN_RANGES = 8
# Batches differ in size, and a range that does not fit into a slot is requested again step by step: fill only this part
# of a slot.
_SLOT_PART = 1 / 2


class RangeBuffer:
    """The requested and received ranges of one pass.

    Args:
        request: The iterator, with its limits.
        ring: Memory for the batches.
        free: Unused slots of the ring; shared by all passes over the loader.
        largest: Bytes of the largest batch of earlier passes; 0: unknown.

    Attributes:
        request: The iterator.
        ring: Memory for the batches.
        free: Unused slots of the ring.
        range_length: Batches per future request.
        largest: Bytes of the largest batch so far; batches of one answer count with their mean.
        in_flight: Requested ranges by request id.
        ready: Complete ranges by their first step.
    """

    def __init__(self, request: StartIterator, ring: Ring, free: list[int], *, largest: int) -> None:
        self.request = request
        self.ring = ring
        self.free = free
        self.range_length = 1
        self.largest = largest
        self.in_flight: dict[int, InFlightRange] = {}
        self.ready: dict[int, InFlightRange] = {}
        self._produce_s = 0.0  # moving average of the seconds that a worker takes for a batch

    @property
    def window(self) -> int:
        """Steps that may be in flight or buffered, given the sizes seen so far; at least 2, to overlap them.

        No more than 2 while no size is known: any number of them could exceed ``window_bytes``.
        """
        limits = self.request
        if not self.largest:
            return min(2, limits.window_batches)
        num_steps = limits.window_batches * (1 if limits.is_window_fixed else self.range_length)
        return max(2, min(num_steps, limits.window_bytes // self.largest))

    def take_slot(self, request_id: int, step_range: StepRange) -> bool:
        """Reserve a slot for a range; return whether one is free."""
        if not self.free:
            return False
        slot = self.free.pop()
        self.in_flight[request_id] = InFlightRange(step_range, slot, self.ring.slot(slot), self.request.compression)
        return True

    def drop(self, request_id: int) -> None:
        """Forget a request, if it is in flight. Its slot is free as soon as no piece is being written to it."""
        answer = self.in_flight.pop(request_id, None)
        if answer is None:
            return
        if answer.is_written:
            answer.is_dropped = True
        else:
            self.free.append(answer.slot)

    def take_header(self, request_id: int, header: StepRangeHeader) -> None:
        """Record the header of an answer.

        Raises:
            BatchTooLargeError: The batches do not fit into a slot.
            WireError: It is a second header, or announces a wrong number of batches.
        """
        answer = self.in_flight[request_id]
        least = 1 if self.request.is_stream else answer.step_range.num_steps
        if not least <= header.num_batches <= answer.step_range.num_steps:
            raise WireError(f"{header.num_batches} batches arrived for a request for {answer.step_range.num_steps}")
        if header.num_bytes > self.ring.slot_bytes:
            raise BatchTooLargeError(
                f"The batch of step {answer.step_range.first} has {header.num_bytes} bytes, but a slot only "
                f"{self.ring.slot_bytes} (data_service.max_batch_bytes). Raise the limit on all hosts, or make batches "
                "smaller."
            )
        answer.take_header(header)
        # At once, not when the bytes have arrived: the window opens, or closes, that much earlier. Batches without
        # bytes are known, too.
        self.largest = max(self.largest, 1, -(-header.num_bytes // header.num_batches))

    def end_piece(self, answer: InFlightRange, piece: Piece, *, is_complete: bool = True) -> None:
        """Count a piece that is complete; free the slot if the answer was dropped meanwhile."""
        answer.end_piece(piece, is_complete=is_complete)
        if answer.is_dropped:
            self.free.append(answer.slot)

    def keep(self, request_id: int, latency_s: float) -> InFlightRange:
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
        return answer

    def _choose_range_length(self, header: StepRangeHeader) -> None:
        """Choose how many batches a request asks for: as many as the limits allow, at most twice as many as before."""
        limits = self.request
        produce_s = header.produce_s / header.num_batches
        self._produce_s += (produce_s - self._produce_s) * (1 / 8 if self._produce_s else 1)
        num_bytes = (header.num_bytes + len(header.encoded_batches)) / header.num_batches
        range_bytes = min(_RANGE_BYTES, limits.window_bytes / _MIN_RANGES, _SLOT_PART * self.ring.slot_bytes)
        most = min(MAX_RANGE_LENGTH, range_bytes / max(1.0, num_bytes), _RANGE_S / max(1e-9, self._produce_s))
        length = max(1, min(2 * self.range_length, int(most)))
        if limits.is_window_fixed:
            length = max(1, min(length, self.window // _MIN_RANGES))
        self.range_length = length
