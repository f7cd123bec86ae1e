"""What the feeder tells the training process about batches that lie in a slot of its ring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_sm.data.ipc.messages import Message, MessageSocket

KIND = "batches"


@dataclass(frozen=True)
class Delivery:
    """A run of consecutive batches of a pass, in one slot.

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
        keys: Indices of the samples of each batch; empty if they are not wanted.
        batches: Where each batch lies, and its structure, as ``frames.pack_batches`` packs them.
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
    keys: list[list[int]]
    batches: bytes

    def send(self, receiver: MessageSocket) -> None:
        """Send it to the training process."""
        facts = dict(vars(self))  # asdict() would copy the keys of every sample
        receiver.send(KIND, facts.pop("batches"), **facts)

    @classmethod
    def of(cls, message: Message) -> Delivery:
        """Convert back what the feeder sent."""
        return cls(**message.facts, batches=message.payload)

    def figures(self) -> dict[str, Any]:
        """Return what one batch of it took, on average: bytes, and seconds."""
        return {
            "num_bytes": self.num_bytes // self.num_steps,
            "queue_s": self.queue_s / self.num_steps,
            "produce_s": self.produce_s / self.num_steps,
            "transfer_s": self.transfer_s / self.num_steps,
            "ready": self.num_ready,
        }
