"""The batches of one pass in the feeder: their requests, the slots that their bytes go to, and delivery in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from lightning_sm.data.feeder.range_buffer import InFlightRange, RangeBuffer
from lightning_sm.data.feeder.scheduler import StepRange
from lightning_sm.data.ipc.feeder_messages import DeliveredRange, EndOfBlock, EndOfPass, StartPass
from lightning_sm.data.ipc.ring import Ring
from lightning_sm.data.plan.samples import BatchPlan, SamplePlan, Tail
from lightning_sm.data.plan.shards import ShardSteps
from lightning_sm.data.protocol.spec import BatchSpec, StepRangeSpec
from lightning_sm.errors import WireError

StepPlan: TypeAlias = SamplePlan | BatchPlan | ShardSteps
# The request that opened the loader on the data hosts, and its position among those.
LoaderKey: TypeAlias = tuple[str, int]

# The training process holds a whole block of shards' batches: let it take at most this part of the bytes ahead.
_BLOCK_PART = 1 / 4


class PassBuffer(RangeBuffer):
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
        empty: Steps that are skipped, because their shard has no such batch.
        taken: The consumer has taken all steps below this one.
    """

    def __init__(
        self, request: StartPass, ring: Ring, free: list[int], plan: StepPlan, tail: Tail, *, largest: int = 0
    ) -> None:
        loader_pass, position = request.loader_pass, request.position
        super().__init__(request.place, ring, free, largest=largest, may_end=isinstance(plan, ShardSteps))
        self.request = request
        self.place = request.place
        self.plan = plan
        self.tail = tail
        self.next_step = position.first_step
        self.held_step: int | None = None
        self.spec = StepRangeSpec(loader_pass.opening, loader_pass.loader, (), request.place.compression)
        self.batch_spec = BatchSpec(
            loader_pass.seed, loader_pass.epoch, loader_pass.pass_index, 0, 0, np.empty(0, np.int64)
        )
        self.empty: set[int] = set()
        self.taken = 0
        self._has_ended = False
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

    # Requests

    def keys(self, step: int) -> list[int]:
        """Return the indices of a step, for messages."""
        keys: list[int] = self.plan.batch(step).tolist()
        return keys

    def reserve(self, request_id: int, step_range: StepRange) -> bytes | None:
        """Reserve a slot for a range, and return the encoded spec; None if no slot is free."""
        if not self.take_slot(request_id, step_range):
            return None
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

    # Answers

    def accept(self, request_id: int, latency_s: float) -> InFlightRange:
        """Keep a complete answer until its first step is next, and return it.

        Args:
            request_id: Number of the request.
            latency_s: Seconds from the request until now.
        """
        part = _BLOCK_PART / self.plan.num_shards if isinstance(self.plan, ShardSteps) else 1.0
        answer = self.keep(request_id, latency_s, part)
        header = answer.header
        if isinstance(self.plan, ShardSteps):
            self.plan.range_length = self.range_length
            if header.num_batches < answer.step_range.num_steps:  # the shard ends with these batches
                end = int(self.plan.batch(answer.step_range.first)[2]) + header.num_batches
                self._skip(self.plan, range(answer.step_range.first + header.num_batches, answer.step_range.stop), end)
                answer.step_range = StepRange(answer.step_range.first, header.num_batches)
        return answer

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
