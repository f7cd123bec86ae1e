"""An answer while it arrives: its header, and where the pieces of its bytes go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_sm.data.feeder.scheduler import StepRange
from lightning_sm.data.protocol.frames import StepRangeHeader
from lightning_sm.errors import WireError

_NOT_ARRIVED = StepRangeHeader(-1, 0.0, 0.0, b"")


@dataclass(eq=False)
class InFlightRange:
    """The answer to the request for a step range.

    Attributes:
        step_range: The steps.
        slot: Slot for the bytes of the batches.
        memory: Memory for its bytes, uint8.
        header: Its header.
        received: Bytes received so far.
        is_written: Whether a piece is being written to the memory.
        is_dropped: Whether the request was cancelled: the memory is free once that piece is written.
        transfer_s: Seconds from request to the last byte, without those in queue and worker.
    """

    step_range: StepRange
    slot: int
    memory: npt.NDArray[np.uint8]
    header: StepRangeHeader = _NOT_ARRIVED
    received: int = 0
    is_written: bool = False
    is_dropped: bool = False
    transfer_s: float = 0.0

    @property
    def is_complete(self) -> bool:
        """Whether the header and all bytes have arrived."""
        return self.received == self.header.num_bytes

    def take_header(self, header: StepRangeHeader) -> None:
        """Record the header.

        Raises:
            WireError: It is a second header.
        """
        if self.header is not _NOT_ARRIVED:
            raise WireError("a second header arrived")
        self.header = header

    def begin_piece(self, offset: int, size: int, ended: Callable[[Piece, bool], None]) -> Piece:
        """Reserve the place of a piece; ``end_piece`` follows once it is written.

        Args:
            offset: Where the piece begins among the bytes of the answer.
            size: Bytes that arrive.
            ended: Called once, with the piece and whether it has arrived; if not, nothing more is written to it.

        Raises:
            WireError: The piece is out of order, or exceeds the announced size.
        """
        num_bytes = self.header.num_bytes
        stop = offset + size
        if offset != self.received or stop > num_bytes:
            raise WireError(f"bytes {offset} to {stop} arrived after {self.received} of {num_bytes}")
        self.is_written = True
        return Piece(self, self.memory[offset:stop].data, ended)

    def end_piece(self, piece: Piece, *, is_complete: bool = True) -> None:
        """Count a piece that is complete, and let go of the memory."""
        self.is_written = False
        self.received += len(piece.place) * is_complete


class Piece:
    """A piece of an answer while its bytes arrive.

    Args:
        answer: The answer.
        place: Its place in the memory of the answer.
        ended: See ``InFlightRange.begin_piece``.
    """

    def __init__(self, answer: InFlightRange, place: memoryview, ended: Callable[[Piece, bool], None]) -> None:
        self.answer = answer
        self.place = place
        self._ended = ended

    @property
    def memory(self) -> memoryview | None:
        """Where the bytes go; None: the request was cancelled."""
        return None if self.answer.is_dropped else self.place

    def end(self, is_complete: bool) -> None:
        """Note whether the piece has arrived."""
        self._ended(self, is_complete)
