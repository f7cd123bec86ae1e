"""An answer while it arrives: its header, and where the pieces of its bytes go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_sm.data.batch.compression import codec_of
from lightning_sm.data.feeder.scheduler import StepRange
from lightning_sm.data.protocol.frames import StepRangeHeader
from lightning_sm.data.protocol.spec import CHUNK_BYTES
from lightning_sm.errors import WireError

_NOT_ARRIVED = StepRangeHeader(-1, 0.0, 0.0, b"")


@dataclass(eq=False)
class InFlightRange:
    """The answer to the request for a step range.

    Attributes:
        step_range: The steps.
        slot: Slot for the bytes of the batches.
        memory: Memory for its bytes, uint8.
        compression: Name of the codec that its pieces may be compressed with; empty: none.
        header: Its header.
        received: Bytes received so far.
        is_written: Whether a piece is being written to the memory.
        is_dropped: Whether the request was cancelled: the memory is free once that piece is written.
        transfer_s: Seconds from request to the last byte, without those in queue and worker.
    """

    step_range: StepRange
    slot: int
    memory: npt.NDArray[np.uint8]
    compression: str
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

    def begin_piece(
        self, offset: int, size: int, *, is_compressed: bool, ended: Callable[[Piece, bool], None]
    ) -> Piece:
        """Reserve the place of a piece; ``end_piece`` follows once it is written.

        Args:
            offset: Where the piece begins among the bytes of the answer.
            size: Bytes that arrive.
            is_compressed: Whether they are compressed.
            ended: Called once, with the piece and whether it has arrived; if not, nothing more is written to it.

        Raises:
            WireError: The piece is out of order, exceeds the announced size, or is not meant to be compressed.
        """
        num_bytes = self.header.num_bytes
        num_arriving = size
        if is_compressed:
            if not self.compression:
                raise WireError("a compressed piece arrived, but compression is off")
            size = max(0, min(CHUNK_BYTES, num_bytes - offset))
        stop = offset + size
        if offset != self.received or stop > num_bytes:
            raise WireError(f"bytes {offset} to {stop} arrived after {self.received} of {num_bytes}")
        self.is_written = True
        arriving = memoryview(bytearray(num_arriving)) if is_compressed else self.memory[offset:stop].data
        return Piece(self, self.memory[offset:stop], arriving, ended, is_compressed=is_compressed)

    def end_piece(self, piece: Piece, *, is_complete: bool = True) -> None:
        """Count a piece that is complete, and let go of the memory."""
        self.is_written = False
        self.received += len(piece.place) * is_complete


class Piece:
    """A piece of an answer while its bytes arrive.

    Args:
        answer: The answer.
        place: Its place in the memory of the answer, uint8.
        arriving: Where the bytes go: the place, unless they are compressed.
        ended: See ``InFlightRange.begin_piece``.
        is_compressed: Whether they are.
    """

    def __init__(
        self,
        answer: InFlightRange,
        place: npt.NDArray[np.uint8],
        arriving: memoryview,
        ended: Callable[[Piece, bool], None],
        *,
        is_compressed: bool,
    ) -> None:
        self.answer = answer
        self.place = place
        self._arriving = arriving
        self._ended = ended
        self._is_compressed = is_compressed

    @property
    def memory(self) -> memoryview | None:
        """Where the bytes go; None: the request was cancelled."""
        return None if self.answer.is_dropped else self._arriving

    def end(self, is_complete: bool) -> None:
        """Note whether the piece has arrived."""
        self._ended(self, is_complete)

    def decompress(self) -> None:
        """Write a compressed piece to its place. It is slow, but needs no lock: no other thread uses the place.

        Raises:
            WireError: The piece is malformed, or of another size.
        """
        if self._is_compressed:
            content = codec_of(self.answer.compression).decompress(self._arriving, len(self.place))
            self.place[:] = np.frombuffer(content, np.uint8)
