"""The batches of one pass in the feeder: their requests, the slots that their bytes go to, and delivery in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np

from lightning_sm.data.feeder.answer import Answer, Piece
from lightning_sm.data.feeder.scheduler import StepRange
from lightning_sm.data.ipc.feeder_messages import DeliveredRange, EndOfBlock, EndOfPass, StartPass
from lightning_sm.data.ipc.ring import Ring
from lightning_sm.data.plan.samples import BatchPlan, SamplePlan, Tail
from lightning_sm.data.plan.shards import ShardSteps
from lightning_sm.data.protocol.frames import StepRangeHeader
from lightning_sm.data.protocol.spec import MAX_RANGE_LENGTH, BatchSpec, StepRangeSpec
from lightning_sm.errors import BatchTooLargeError, WireError

StepPlan: TypeAlias = SamplePlan | BatchPlan | ShardSteps
# The request that opened the loader on the data hosts, and its position among those.
LoaderKey: TypeAlias = tuple[str, int]

# A request asks for at most this many bytes, seconds of work, or batches. Longer ranges make small batches faster
# (benchmarks/README.md), but a window of 32 requests takes more memory, and other ranks wait longer behind a request.
_RANGE_BYTES = 8 << 20
_RANGE_S = 0.01
# A window that the user limits is divided into at least this many requests, so that all workers have work.
_MIN_RANGES = 8
# Batches differ in size, and a range that does not fit into a slot is requested again step by step: fill only this part
# of a slot.
_SLOT_PART = 1 / 2

# The training process holds a whole block of shards' batches: let it take at most this part of the bytes ahead.
_BLOCK_PART = 1 / 4


@dataclass(eq=False, kw_only=True)
class InFlightRange(Answer):
    """The answer to the request for a step range.

    Attributes:
        step_range: The steps.
        slot: Slot for the bytes of the batches.
        transfer_s: Seconds from request to the last byte, without those in queue and worker.
    """

    step_range: StepRange
    slot: int
    transfer_s: float = 0.0


class PassBuffer:
    """The batches of one pass.

    Args:
        request: The pass.
        ring: Memory for the batches.
        free: Unused slots of the ring; shared by all passes over the loader.
        plan: The batches of this rank.
        tail: The last step of the plan.
        largest: Bytes of the largest batch of earlier passes; 0: unknown.

    Attributes:
        place: The loader.
        next_step: The next step to deliver.
        stop_step: End of the pass, exclusive, as far as it is known.
        held_step: The uneven last step before which the pass ends, as it is held back; None: there is none.
        spec: A request without batches.
        batch_spec: A batch of the pass, without position and keys.
        range_length: Batches per future request.
        largest: Bytes of the largest batch so far; batches of one answer count with their mean.
        in_flight: Requested ranges by request id.
        ready: Complete ranges by their first step.
        empty: Steps that are skipped, because their shard has no such batch.
        taken: The consumer has taken all steps below this one.
    """

    def __init__(
        self, request: StartPass, ring: Ring, free: list[int], plan: StepPlan, tail: Tail, *, largest: int = 0
    ) -> None:
        loader_pass, position = request.loader_pass, request.position
        self.request = request
        self.place = request.place
        self.ring = ring
        self.free = free
        self.plan = plan
        self.tail = tail
        self.largest = largest
        self.next_step = position.first_step
        self.held_step: int | None = None
        self.spec = StepRangeSpec(loader_pass.opening, loader_pass.loader, (), request.place.compression)
        self.batch_spec = BatchSpec(
            loader_pass.seed, loader_pass.epoch, loader_pass.pass_index, 0, 0, np.empty(0, np.int64)
        )
        self.range_length = 1
        self.in_flight: dict[int, InFlightRange] = {}
        self.ready: dict[int, InFlightRange] = {}
        self.empty: set[int] = set()
        self.taken = 0
        self._has_ended = False
        self._produce_s = 0.0  # moving average of the seconds that a worker takes for a batch
        if isinstance(plan, ShardSteps):  # its step 0 is where the pass begins
            self.next_step = 0
            self.stop_step = plan.stop_step
        else:
            stop = plan.num_steps if position.stop_step is None else min(plan.num_steps, position.stop_step)
            if position.tail == "hold" and tail.is_uneven and self.next_step < stop == plan.num_steps:
                stop -= 1
                self.held_step = stop
            self.stop_step = max(stop, self.next_step)

    @property
    def pass_id(self) -> int:
        """Number of the pass."""
        return self.request.pass_id

    @property
    def name(self) -> str:
        """Name of the loader, for messages."""
        return self.request.loader.name

    @property
    def loader(self) -> LoaderKey:
        """The loader, as data hosts know it."""
        return self.spec.opening, self.spec.loader

    @property
    def window(self) -> int:
        """Steps that may be in flight or buffered, given the sizes seen so far; at least 2, to overlap them.

        No more than 2 while no size is known: any number of them could exceed ``window_bytes``.
        """
        if not self.largest:
            return min(2, self.place.window_batches)
        num_steps = self.place.window_batches * (1 if self.place.is_window_fixed else self.range_length)
        return max(2, min(num_steps, self.place.window_bytes // self.largest))

    # Requests

    def keys(self, step: int) -> list[int]:
        """Return the indices of a step, for messages."""
        keys: list[int] = self.plan.batch(step).tolist()
        return keys

    def reserve(self, request_id: int, step_range: StepRange) -> bytes | None:
        """Reserve a slot for a range, and return the encoded spec; None if no slot is free."""
        if not self.free:
            return None
        slot = self.free.pop()
        self.in_flight[request_id] = InFlightRange(
            self.ring.slot(slot), self.spec.compression, step_range=step_range, slot=slot
        )
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
        least = 1 if isinstance(self.plan, ShardSteps) else answer.step_range.num_steps
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
        """Choose how many batches a request asks for."""
        produce_s = header.produce_s / header.num_batches
        self._produce_s += (produce_s - self._produce_s) * (1 / 8 if self._produce_s else 1)
        window = self.window if self.place.is_window_fixed else None
        part = _BLOCK_PART / self.plan.num_shards if isinstance(self.plan, ShardSteps) else 1.0
        limits = RangeLimits(self.place.window_bytes, self.ring.slot_bytes, window, part)
        self.range_length = range_length(header, self.range_length, self._produce_s, limits)

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

    def deliveries(self, *, holds_end: bool = False) -> Iterator[DeliveredRange | EndOfBlock | EndOfPass]:
        """Remove the ranges that are next, in order, and yield their messages to the training process.

        Args:
            holds_end: Whether the last range of the pass, and its end, are held back.
        """
        while self.next_step in self.ready or self.next_step in self.empty:
            if self.next_step in self.ready:
                if holds_end and self.ready[self.next_step].step_range.stop == self.stop_step:
                    return
                answer = self.ready.pop(self.next_step)
                self.next_step = answer.step_range.stop
                yield self._delivery(answer)
            else:
                self.next_step += 1
            if isinstance(self.plan, ShardSteps) and self.plan.ends_block(self.next_step):
                yield EndOfBlock(self.pass_id)
        if self.next_step >= self.stop_step and not (holds_end or self._has_ended):
            self._has_ended = True
            num_batches = self.plan.num_batches if isinstance(self.plan, ShardSteps) else None
            yield EndOfPass(self.pass_id, num_batches, self.held_step)

    def _delivery(self, answer: InFlightRange) -> DeliveredRange:
        header = answer.header
        steps = range(answer.step_range.first, answer.step_range.stop)
        return DeliveredRange(
            pass_id=self.pass_id,
            ring=self.request.ring,
            slot=answer.slot,
            first_step=answer.step_range.first,
            num_steps=answer.step_range.num_steps,
            num_bytes=header.num_bytes,
            queue_s=header.queue_s,
            produce_s=header.produce_s,
            transfer_s=answer.transfer_s,
            num_ready=sum(answer.step_range.num_steps for answer in self.ready.values()),
            row=self.plan.row(answer.step_range.first) if isinstance(self.plan, ShardSteps) else None,
            keys=[self.plan.batch(step).tolist() for step in steps] if self.request.tells_keys else [],
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
        return min(self.taken, self.stop_step)


class RangeLimits(NamedTuple):
    """What limits the batches of a request.

    Attributes:
        window_bytes: Limit of the bytes in flight or buffered.
        slot_bytes: Capacity of a slot.
        window: Number of batches to which the user limits the window; None: the user does not.
        part: Part of the window that a request may fill.
    """

    window_bytes: int
    slot_bytes: int
    window: int | None
    part: float = 1.0


def range_length(header: StepRangeHeader, before: int, produce_s: float, limits: RangeLimits) -> int:
    """Return how many batches a request asks for: as many as the limits allow, at most twice as many as before.

    Args:
        header: The last answer.
        before: How many batches requests have asked for.
        produce_s: Seconds that a worker takes for a batch.
        limits: The limits.
    """
    num_bytes = (header.num_bytes + len(header.encoded_batches)) / header.num_batches
    shares = limits.window_bytes / _MIN_RANGES, _SLOT_PART * limits.slot_bytes, limits.part * limits.window_bytes
    range_bytes = min(_RANGE_BYTES, *shares)
    most = min(MAX_RANGE_LENGTH, range_bytes / max(1.0, num_bytes), _RANGE_S / max(1e-9, produce_s))
    length = max(1, min(2 * before, int(most)))
    return length if limits.window is None else max(1, min(length, limits.window // _MIN_RANGES))
