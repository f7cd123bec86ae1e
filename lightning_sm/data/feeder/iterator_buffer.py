"""The batches of one iterator in the feeder: their indices, requests, slots, and delivery in order."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

from lightning_sm.data.feeder.answer import InFlightRange
from lightning_sm.data.feeder.range_buffer import RangeBuffer
from lightning_sm.data.feeder.scheduler import StepRange
from lightning_sm.data.ipc.feeder_messages import DeliveredRange, EndOfPass, StartIterator
from lightning_sm.data.ipc.ring import Ring
from lightning_sm.data.protocol.fetch import FetchSpec
from lightning_sm.errors import WireError

# The end of an iterator whose sampler, or stream, has not ended yet.
_NO_END = 1 << 62


class IteratorBuffer(RangeBuffer):
    """The batches of one iterator, counted from the first one that it asks for.

    Args:
        request: The iterator.
        ring: Memory for the batches.
        free: Unused slots of the ring.
        largest: Bytes of the largest batch of earlier iterators; 0: unknown.

    Attributes:
        next_step: The next batch to deliver.
        stop_step: The batch after the last, as far as it is known.
    """

    def __init__(self, request: StartIterator, ring: Ring, free: list[int], *, largest: int = 0) -> None:
        super().__init__(request, ring, free, largest=largest)
        self.next_step = 0
        self.stop_step = _NO_END
        self._indices: dict[int, bytes] = {}  # by batch: those that are not delivered
        self._num_supplied = 0
        self._taken = 0
        self._has_ended = False

    @property
    def pass_id(self) -> int:
        """Number of the iterator."""
        return self.request.pass_id

    @property
    def known(self) -> int:
        """The batch from which on no batch can be requested yet."""
        return _NO_END if self.request.is_stream else self._num_supplied

    def supply(self, indices: list[bytes], *, is_end: bool) -> None:
        """Take the indices of the next batches.

        Args:
            indices: What the sampler yielded for each, pickled.
            is_end: Whether there are no more.
        """
        for index in indices:
            self._indices[self._num_supplied] = index
            self._num_supplied += 1
        if is_end:
            self.stop_step = self._num_supplied

    def keys(self, step: int) -> list[Any]:
        """Return the indices of a batch, for messages."""
        if step not in self._indices:
            return []
        index = pickle.loads(self._indices[step])  # noqa: S301  # it is from the training process
        return list(index) if isinstance(index, (list, tuple)) else [index]

    # Requests

    def reserve(self, request_id: int, step_range: StepRange) -> bytes | None:
        """Reserve a slot for a range, and return the encoded request; None if no slot is free."""
        if not self.take_slot(request_id, step_range):
            return None
        request = self.request
        steps = range(step_range.first, step_range.stop)
        return FetchSpec(
            request.opening,
            request.compression,
            request.rank,
            request.world_size,
            request.seed,
            request.first + step_range.first,
            step_range.num_steps,
            [] if request.is_stream else [self._indices[step] for step in steps],
        ).encode()

    # Answers

    def accept(self, request_id: int, latency_s: float) -> InFlightRange:
        """Keep a complete answer until its first batch is next, and return it.

        Args:
            request_id: Number of the request.
            latency_s: Seconds from the request until now.
        """
        answer = self.keep(request_id, latency_s)
        header, first = answer.header, answer.step_range.first
        if header.num_batches < answer.step_range.num_steps:  # the stream ends with these batches
            answer.step_range = StepRange(first, header.num_batches)
            self.stop_step = min(self.stop_step, answer.step_range.stop)
        return answer

    def skip(self, request_id: int, end: int) -> None:
        """Record the answer that a stream has none of the batches of a request.

        Args:
            request_id: Number of the request.
            end: Number of batches in the stream.

        Raises:
            WireError: The answer does not fit the request.
        """
        if not self.request.is_stream:
            raise WireError("only streams have an end")
        self.stop_step = min(self.stop_step, max(0, end - self.request.first))
        self.drop(request_id)

    # Delivery

    def deliveries(self) -> Iterator[DeliveredRange | EndOfPass]:
        """Remove the ranges that are next, in order, and yield their messages to the training process."""
        while (answer := self.ready.pop(self.next_step, None)) is not None:
            for step in range(self.next_step, answer.step_range.stop):
                self._indices.pop(step, None)
            self.next_step = answer.step_range.stop
            yield self._delivery(answer)
        if self.next_step >= self.stop_step and not self._has_ended:
            self._has_ended = True
            yield EndOfPass(self.pass_id)

    def _delivery(self, answer: InFlightRange) -> DeliveredRange:
        header = answer.header
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
            encoded_batches=header.encoded_batches,
            wanted_until=answer.step_range.stop + self.window + self.range_length,
        )

    def take(self, step: int) -> int:
        """Record that the consumer has taken all batches below ``step``, and return where the window begins."""
        self._taken = max(self._taken, step)
        return min(self._taken, self.stop_step)
