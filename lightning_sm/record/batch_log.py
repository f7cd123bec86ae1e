"""The log of the batches on which a rank has trained: which step each belongs to, and what it contains."""

from __future__ import annotations

import base64
import struct
import time
from collections.abc import Callable, Sequence

from lightning_sm.record.events import TrainedBatches

# So many batches are at most kept in memory before they are written.
_MAX_BATCHES = 4096


class BatchLog:
    """The batches that have not been written yet.

    Args:
        write: Writes a line.
    """

    def __init__(self, write: Callable[[TrainedBatches], None]) -> None:
        self._write = write
        self._fit = ""
        self._epoch = 0
        self._first = 0
        self._steps: list[int] = []
        self._loaders: list[int] = []
        self._hashes: dict[int, list[int]] = {}
        self._shards: dict[int, list[tuple[int, int, int]]] = {}

    def note(
        self,
        fit: str,
        epoch: int,
        number: int,
        step: int,
        origins: Sequence[tuple[int, int, tuple[int, int, int] | None]] = (),
    ) -> None:
        """Note a batch.

        Args:
            fit: Which fit of the script.
            epoch: The epoch, from 0.
            number: Number of the batch in the epoch, from 0.
            step: Its step as loggers count it, from 0: batches of one step accumulate gradients.
            origins: Of each training loader that it is from: the position of the loader, the hash of the content, and
                the place in an iterable dataset, see ``TrainedBatches.shards``.
        """
        loaders = [origin[0] for origin in origins]
        num = len(self._steps)
        is_next = number == self._first + num and epoch == self._epoch and fit == self._fit
        if not is_next or loaders != self._loaders or num >= _MAX_BATCHES or not num:
            self.flush()
            self._fit, self._epoch, self._first, self._loaders = fit, epoch, number, loaders
            self._hashes = {loader: [] for loader in loaders}
        self._steps.append(step)
        for loader, content_hash, shard in origins:
            self._hashes[loader].append(content_hash)
            if shard is not None:
                self._shards.setdefault(loader, []).append(shard)

    def flush(self) -> None:
        """Write what was noted."""
        steps, self._steps = self._steps, []
        hashes, self._hashes = self._hashes, {}
        shards, self._shards = self._shards, {}
        if not steps:
            return
        num = len(steps)
        has_own_steps = steps == list(range(steps[0], steps[0] + num))
        self._write(
            TrainedBatches(
                t=time.time(),
                fit=self._fit,
                epoch=self._epoch,
                first=self._first,
                num=num,
                step=steps[0],
                steps=[] if has_own_steps else steps,
                hashes={str(loader): pack(values) for loader, values in hashes.items()},
                shards={str(loader): places for loader, places in shards.items()},
            )
        )


def pack(hashes: Sequence[int]) -> str:
    """Return unsigned 64-bit numbers as text: little-endian bytes in base64."""
    return base64.b64encode(struct.pack(f"<{len(hashes)}Q", *hashes)).decode("ascii")


def unpack(text: str) -> list[int]:
    """Return the numbers of a text that ``pack`` made.

    Raises:
        ValueError: The text is malformed.
    """
    data = base64.b64decode(text, validate=True)
    if len(data) % 8:
        raise ValueError(f"{len(data)} bytes are no 64-bit numbers")
    return [value for (value,) in struct.iter_unpack("<Q", data)]


def steps_of(line: TrainedBatches) -> Sequence[int]:
    """Return the step of each batch of a line."""
    return line.steps or range(line.step, line.step + line.num)
