"""The batches of one pass in the feeder: their requests, the slots that their bytes go to, and delivery in order."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from lightning_sm.data.batch.compression import codec_of
from lightning_sm.data.ipc.ring import Ring
from lightning_sm.data.plan.samples import BatchPlan, SamplePlan
from lightning_sm.data.plan.shards import ShardSteps
from lightning_sm.data.protocol.spec import CHUNK_BYTES, BatchSpec
from lightning_sm.errors import BatchTooLargeError, WireError

logger = logging.getLogger(__name__)

StepPlan: TypeAlias = SamplePlan | BatchPlan | ShardSteps

# Bytes of a batch that are compared: enough to distinguish it from another.
_NUM_COMPARED = 1 << 16


@dataclass(eq=False)
class InFlightBatch:
    """A batch that was requested from one host.

    Attributes:
        step: Number of the batch.
        slot: Where its bytes go.
        num_bytes: Bytes of data; -1 before the header has arrived.
        header: Structure of the batch.
        received: Bytes so far.
        queue_s: Seconds in the host's queue.
        produce_s: Seconds in the worker.
        transfer_s: Seconds from request to batch, without those in queue and worker.
    """

    step: int
    slot: int
    num_bytes: int = -1
    header: bytes = b""
    received: int = 0
    queue_s: float = 0.0
    produce_s: float = 0.0
    transfer_s: float = 0.0

    @property
    def is_complete(self) -> bool:
        """Whether the header and all bytes have arrived."""
        return self.received == self.num_bytes


@dataclass(eq=False)
class PassBuffer:
    """The batches of one pass.

    Attributes:
        pass_id: Number of the pass.
        ring: Where batches go.
        ring_number: Number of the ring in the training process.
        free: Unused slots of the ring; shared by all passes over the loader.
        template: A request for a batch, except for step and keys.
        plan: Keys of each step.
        next_step: Next step to deliver.
        stop_step: Step after the last; None while it is not known.
        window_batches: Steps that may be in flight or buffered.
        window_bytes: The same limit in bytes.
        tells_keys: Whether the training process gets the keys of each batch.
        largest: Bytes of the largest batch so far.
        in_flight: By request id.
        ready: Complete batches by step.
        empty: Steps of shards that have no batch, and are skipped.
        taken: The consumer has taken every step below.
    """

    pass_id: int
    ring: Ring
    ring_number: int
    free: list[int]
    template: BatchSpec
    plan: StepPlan
    next_step: int
    stop_step: int | None
    window_batches: int
    window_bytes: int
    tells_keys: bool = False
    largest: int = 0
    in_flight: dict[int, InFlightBatch] = field(default_factory=dict)
    ready: dict[int, InFlightBatch] = field(default_factory=dict)
    empty: set[int] = field(default_factory=set)
    taken: int = 0

    def __post_init__(self) -> None:
        """Limit the pass to the steps of its plan."""
        if isinstance(self.plan, ShardSteps):  # it counts steps from where the pass begins
            self.next_step = 0
            self.stop_step = self.plan.stop_step
        else:
            stop = self.plan.num_steps if self.stop_step is None else min(self.plan.num_steps, self.stop_step)
            self.stop_step = max(stop, self.next_step)

    @property
    def window(self) -> int:
        """Steps that may be in flight or buffered, given the sizes seen so far; at least 2, to overlap them."""
        if not self.largest:
            return self.window_batches
        return max(2, min(self.window_batches, self.window_bytes // self.largest))

    # Requests

    def request(self, request_id: int, step: int) -> bytes | None:
        """Reserve a slot for a step, and return the encoded request; None if no slot is free."""
        if not self.free:
            return None
        self.in_flight[request_id] = InFlightBatch(step, self.free.pop())
        return replace(self.template, step=step, keys=self.plan.batch(step)).encode()

    def drop(self, request_id: int) -> None:
        """Forget a request, if it is in flight; bytes of it that still arrive are not written anywhere."""
        batch = self.in_flight.pop(request_id, None)
        if batch is not None:
            self.free.append(batch.slot)

    # Answers

    def take_header(self, request_id: int, num_bytes: int, queue_s: float, produce_s: float, header: bytes) -> None:
        """Record the header of an answer.

        Raises:
            BatchTooLargeError: The batch does not fit into a slot.
            WireError: It is a second header.
        """
        batch = self.in_flight[request_id]
        if batch.num_bytes >= 0:
            raise WireError(f"a second header arrived for step {batch.step}")
        if num_bytes > self.ring.slot_bytes:
            raise BatchTooLargeError(
                f"The batch of step {batch.step} has {num_bytes} bytes, but a slot only {self.ring.slot_bytes} "
                "(data_service.max_batch_bytes). Raise the limit on all hosts, or make batches smaller."
            )
        batch.num_bytes = num_bytes
        batch.queue_s = queue_s
        batch.produce_s = produce_s
        batch.header = header

    def take_data(self, request_id: int, offset: int, payload: memoryview) -> None:
        """Copy a piece of an answer to its place.

        Raises:
            WireError: The piece is out of order, or exceeds the announced size.
        """
        batch = self.in_flight[request_id]
        stop = offset + len(payload)
        if offset != batch.received or stop > batch.num_bytes:
            raise WireError(f"bytes {offset} to {stop} arrived after {batch.received} of {batch.num_bytes}")
        self.ring.slot(batch.slot)[offset:stop] = np.frombuffer(payload, np.uint8)
        batch.received = stop

    def take_compressed(self, request_id: int, offset: int, payload: memoryview) -> None:
        """Decompress a piece of an answer to its place.

        Raises:
            WireError: The piece is malformed, out of order, too long, or not meant to be compressed.
        """
        if not self.template.compression:
            raise WireError("a compressed piece arrived, but compression is off")
        size = min(CHUNK_BYTES, self.in_flight[request_id].num_bytes - offset)
        piece = codec_of(self.template.compression).decompress(payload, max(0, size))
        self.take_data(request_id, offset, memoryview(piece))

    def accept(self, request_id: int, latency_s: float) -> InFlightBatch:
        """Keep a complete answer until its step is next, and return it.

        Args:
            request_id: Number of the request.
            latency_s: Seconds from the request until now.
        """
        batch = self.in_flight.pop(request_id)
        batch.transfer_s = max(0.0, latency_s - batch.queue_s - batch.produce_s)
        self.ready[batch.step] = batch
        self.largest = max(self.largest, batch.num_bytes)
        if isinstance(self.plan, ShardSteps):
            data = self.ring.slot(batch.slot)[: min(batch.num_bytes, _NUM_COMPARED)].tobytes()
            content = hashlib.blake2b(data, key=batch.header[:64]).digest()
            duplicate_shards = self.plan.duplicate_shards(batch.step, content)
            if duplicate_shards is not None:
                logger.warning(
                    "Shards %d and %d of loader %d of %s begin with the same batch. The iterable dataset may yield all "
                    "samples in every shard. It must yield only the part that torch.utils.data.get_worker_info() "
                    "describes, as with several workers of a DataLoader.",
                    *duplicate_shards,
                    self.template.loader,
                    self.template.opening,
                )
        return batch

    def skip(self, request_id: int, end: int | None) -> None:
        """Record the answer that a step of a shard has no batch.

        Args:
            request_id: Number of the request.
            end: Number of batches in the shard; None: the shard has the batch that the step probed.

        Raises:
            WireError: The answer does not fit the request.
        """
        step = self.in_flight[request_id].step
        if not isinstance(self.plan, ShardSteps):
            raise WireError("only shards have an end")
        self.plan.skip(step, end)
        self.drop(request_id)
        self.empty.add(step)
        self.stop_step = self.plan.stop_step

    # Delivery

    def deliverable(self) -> list[InFlightBatch]:
        """Remove and return the batches that are next, in order."""
        batches = []
        while self.next_step in self.ready or self.next_step in self.empty:
            if self.next_step in self.ready:
                batches.append(self.ready.pop(self.next_step))
            self.next_step += 1
        return batches

    def facts(self, batch: InFlightBatch) -> dict[str, Any]:
        """Return the message to the training process about a batch."""
        facts = {
            "pass_id": self.pass_id,
            "ring": self.ring_number,
            "step": batch.step,
            "slot": batch.slot,
            "num_bytes": batch.num_bytes,
            "queue_s": batch.queue_s,
            "produce_s": batch.produce_s,
            "transfer_s": batch.transfer_s,
        }
        return {**facts, "keys": self.plan.batch(batch.step).tolist()} if self.tells_keys else facts

    def take(self, step: int) -> int:
        """Record that the consumer has taken every step below one, and return where the window begins."""
        self.taken = max(self.taken, step)
        while self.taken < self.next_step and self.taken in self.empty:
            self.empty.remove(self.taken)
            self.taken += 1
        if isinstance(self.plan, ShardSteps):
            self.plan.forget(self.taken)
        # Empty steps behind the end were skipped, too, but are not part of the pass.
        return self.taken if self.stop_step is None else min(self.taken, self.stop_step)
