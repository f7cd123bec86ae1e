"""A pass in the feeder: which keys each step has, which slot each answer goes to, and delivery in order."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from lightning_sm.data.batch.compression import codec_of
from lightning_sm.data.ipc.ring import Ring
from lightning_sm.data.plan.samples import IndexArray
from lightning_sm.data.plan.shards import ShardSteps
from lightning_sm.data.protocol.spec import CHUNK_BYTES, BatchSpec
from lightning_sm.errors import BatchTooLargeError, WireError

logger = logging.getLogger(__name__)

# Enough of a batch to tell it from another one.
_NUM_COMPARED = 1 << 16


class StepPlan(Protocol):
    """What a pass asks of a plan."""

    @property
    def num_steps(self) -> int | None:
        """Steps of the pass; None if only their end will tell."""

    def batch(self, step: int) -> IndexArray:
        """Keys of this rank at a step."""


@dataclass(eq=False)
class Arrival:
    """An answer that is coming in.

    Attributes:
        step: Number of the batch.
        slot: Where its bytes go.
        num_bytes: Bytes of data; -1 before the header came.
        header: Structure of the batch.
        received: Bytes so far.
        timings: Seconds in the host's queue, and in the worker.
    """

    step: int
    slot: int
    num_bytes: int = -1
    header: bytes = b""
    received: int = 0
    timings: tuple[float, float] = (0.0, 0.0)

    @property
    def is_complete(self) -> bool:
        """Whether everything came."""
        return self.received == self.num_bytes


@dataclass(eq=False)
class Intake:
    """One pass.

    Attributes:
        pass_id: Number of the pass.
        ring: Where batches go.
        ring_number: How the training process calls the ring.
        free: Slots of the ring that nobody uses; shared by all passes over the loader.
        template: Request for a batch, but for step and keys.
        plan: Keys of each step; None until a data host has listed them.
        next_step: Next step to deliver.
        stop_step: Step after the last; None while it is not known.
        window_batches: Steps that may be under way or ready.
        window_bytes: The same limit in bytes.
        empty: Steps of shards that have no batch, and are passed over.
        taken: The consumer has taken every step below.
    """

    pass_id: int
    ring: Ring
    ring_number: int
    free: list[int]
    template: BatchSpec
    plan: StepPlan | None
    next_step: int
    stop_step: int | None
    window_batches: int
    window_bytes: int
    largest: int = 0
    arrivals: dict[int, Arrival] = field(default_factory=dict)
    ready: dict[int, Arrival] = field(default_factory=dict)
    empty: set[int] = field(default_factory=set)
    taken: int = 0

    def begin_plan(self, plan: StepPlan) -> None:
        """Take the plan, and from it where the pass begins and ends.

        Args:
            plan: The plan.
        """
        self.plan = plan
        if isinstance(plan, ShardSteps):  # it counts steps from where the pass begins
            self.next_step, self.stop_step = 0, plan.stop_step
        elif plan.num_steps is not None:
            stop = plan.num_steps if self.stop_step is None else min(plan.num_steps, self.stop_step)
            self.stop_step = max(stop, self.next_step)

    @property
    def num_batches(self) -> int | None:
        """Batches in the shards of this rank, once all have ended."""
        return self.plan.num_batches if isinstance(self.plan, ShardSteps) else None

    def spec(self, step: int) -> bytes:
        """Return the encoded request for a step.

        Args:
            step: Number of the batch.
        """
        if self.plan is None:
            raise AssertionError("requests are made only once there is a plan")
        old = self.template
        spec = BatchSpec(
            old.opening,
            old.loader,
            old.seed,
            old.epoch,
            old.pass_index,
            step,
            old.rank,
            self.plan.batch(step),
            old.compression,
        )
        return spec.encode()

    def keys(self, step: int) -> list[int]:
        """Return the keys of a step, for messages.

        Args:
            step: Number of the batch.
        """
        return [] if self.plan is None else self.plan.batch(step).tolist()

    def facts(self, arrival: Arrival) -> dict[str, Any]:
        """Return what the training process is told of a batch.

        Args:
            arrival: The batch.
        """
        queue_s, produce_s = arrival.timings
        return {
            "pass_id": self.pass_id,
            "ring": self.ring_number,
            "step": arrival.step,
            "slot": arrival.slot,
            "num_bytes": arrival.num_bytes,
            "queue_s": queue_s,
            "produce_s": produce_s,
        }

    def begin(self, request_id: int, step: int) -> bool:
        """Reserve a slot for an answer.

        Args:
            request_id: Number of the request.
            step: Number of the batch.

        Returns:
            Whether there was one.
        """
        if not self.free:
            return False
        self.arrivals[request_id] = Arrival(step, self.free.pop())
        return True

    def take_header(self, request_id: int, num_bytes: int, timings: tuple[float, float], header: bytes) -> None:
        """Note what an answer will be.

        Args:
            request_id: Number of the request.
            num_bytes: Bytes of data.
            timings: Seconds in the host's queue, and in the worker.
            header: Structure of the batch.

        Raises:
            BatchTooLargeError: It does not fit into a slot.
            WireError: A second header came.
        """
        arrival = self.arrivals[request_id]
        if arrival.num_bytes >= 0:
            raise WireError(f"a second header came for step {arrival.step}")
        if num_bytes > self.ring.slot_bytes:
            raise BatchTooLargeError(
                f"The batch of step {arrival.step} has {num_bytes} bytes, a slot {self.ring.slot_bytes} "
                "(data_service.max_batch_bytes). Set it higher, on all hosts, or make batches smaller."
            )
        arrival.num_bytes, arrival.header, arrival.timings = num_bytes, header, timings

    def take_data(self, request_id: int, offset: int, payload: memoryview) -> None:
        """Copy a piece of an answer to its place.

        Args:
            request_id: Number of the request.
            offset: Where it belongs.
            payload: The bytes.

        Raises:
            WireError: The piece lies outside of what was announced, or out of order.
        """
        arrival = self.arrivals[request_id]
        stop = offset + len(payload)
        if offset != arrival.received or stop > arrival.num_bytes:
            raise WireError(f"bytes {offset} to {stop} came after {arrival.received} of {arrival.num_bytes}")
        self.ring.slot(arrival.slot)[offset:stop] = np.frombuffer(payload, np.uint8)
        arrival.received = stop

    def take_compressed(self, request_id: int, offset: int, payload: memoryview) -> None:
        """Decompress a piece of an answer to its place.

        Args:
            request_id: Number of the request.
            offset: Where it belongs.
            payload: The compressed bytes.

        Raises:
            WireError: The piece is malformed, lies outside of what was announced, or was not asked for.
        """
        if not self.template.compression:
            raise WireError("a compressed piece came, which was not asked for")
        size = min(CHUNK_BYTES, self.arrivals[request_id].num_bytes - offset)
        piece = codec_of(self.template.compression).decompress(payload, max(0, size))
        self.take_data(request_id, offset, memoryview(piece))

    def accept(self, request_id: int) -> None:
        """Keep a complete answer until it is its turn.

        Args:
            request_id: Number of the request.
        """
        arrival = self.arrivals.pop(request_id)
        self.ready[arrival.step] = arrival
        if isinstance(self.plan, ShardSteps):
            self._warn_of_twins(arrival, self.plan)
        self.largest = max(self.largest, arrival.num_bytes)

    def _warn_of_twins(self, arrival: Arrival, plan: ShardSteps) -> None:
        data = self.ring.slot(arrival.slot)[: min(arrival.num_bytes, _NUM_COMPARED)].tobytes()
        twins = plan.duplicate_shards(arrival.step, hashlib.blake2b(data, key=arrival.header[:64]).digest())
        if twins is not None:
            logger.warning(
                "Shards %d and %d of loader %d of %s begin with the same batch. Does the iterable dataset yield "
                "everything in every shard? It must leave out what is not its part by "
                "torch.utils.data.get_worker_info(), as with several workers of a DataLoader.",
                *twins,
                self.template.loader,
                self.template.opening,
            )

    def pass_over(self, request_id: int, end: int | None) -> None:
        """Take the answer that a step of a shard has no batch.

        Args:
            request_id: Number of the request.
            end: Number of batches in the shard; None: more than were asked about.

        Raises:
            WireError: The answer does not fit the question.
        """
        step = self.arrivals[request_id].step
        if not isinstance(self.plan, ShardSteps):
            raise WireError("only shards have an end")
        self.plan.skip(step, end)
        self.drop(request_id)
        self.empty.add(step)
        self.stop_step = self.plan.stop_step

    def take(self, step: int) -> int:
        """Note that the consumer has taken every step below one, and return where its window begins.

        Args:
            step: Number of the step.
        """
        self.taken = max(self.taken, step)
        while self.taken < self.next_step and self.taken in self.empty:
            self.empty.remove(self.taken)
            self.taken += 1
        if isinstance(self.plan, ShardSteps):
            self.plan.forget(self.taken)
        # Empty steps behind the end were passed over, too, and are none of the pass.
        return self.taken if self.stop_step is None else min(self.taken, self.stop_step)

    def drop(self, request_id: int) -> None:
        """Forget a request; what still comes of it is not written anywhere.

        Args:
            request_id: Number of the request.
        """
        arrival = self.arrivals.pop(request_id, None)
        if arrival is not None:
            self.free.append(arrival.slot)

    def deliverable(self) -> list[Arrival]:
        """Return the answers whose turn it is, in order."""
        arrivals = []
        while self.next_step in self.ready or self.next_step in self.empty:
            if self.next_step in self.ready:
                arrivals.append(self.ready.pop(self.next_step))
            self.next_step += 1
        return arrivals

    @property
    def window(self) -> int:
        """Steps that may be under way or ready, as far as the sizes seen so far allow; at least 2, to overlap."""
        if not self.largest:
            return self.window_batches
        return max(2, min(self.window_batches, self.window_bytes // self.largest))
