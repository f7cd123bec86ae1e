"""Data hosts check each other: which batches are built twice, by whom, and what follows if they differ. No I/O.

One batch of a rank at a time: the first build is copied before the training process gets it, a second one is requested
from another host (with one host, from another of its workers), and both are compared bit for bit.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from zlib import crc32

import numpy as np

from lightning_sm.data.feeder.answer import Answer
from lightning_sm.data.feeder.batch_difference import BatchBuild, BatchDifference, difference
from lightning_sm.data.feeder.pass_buffer import LoaderKey, PassBuffer
from lightning_sm.data.feeder.range_buffer import InFlightRange
from lightning_sm.data.feeder.scheduler import Retry
from lightning_sm.data.feeder.status import RETRIES
from lightning_sm.data.plan.shards import ShardSteps
from lightning_sm.data.protocol.failures import Failure, first_line
from lightning_sm.data.protocol.frames import StepRangeHeader, unpack_batches
from lightning_sm.data.protocol.spec import ANOTHER_HOST, StepRangeSpec
from lightning_sm.data.settings import Verify
from lightning_sm.errors import DataHostMismatchError, WireError

logger = logging.getLogger(__name__)

# The second build is requested once a host has nothing else to do for this rank, or after this time: where data hosts
# are never idle, it takes the place of one request.
_PATIENCE_S = 2.0
# The memory of a check that takes longer than this is freed.
_LONGEST_CHECK_S = 300.0
# With so many checks of a loader that came to nothing, only those that the share asks for are tried.
_MAX_FAILED = 4

# A pass that is about to end waits for its check, or a short training could miss the outcome: for several times as long
# as the first build took, and a bit, in which most second builds arrive. A frozen worker must hold it up no longer.
_HOLD_FACTOR = 3.0
_LEAST_HOLD_S, _LONGEST_HOLD_S = 2.0, 10.0

# A smaller share is none: no training has so many batches.
_LEAST_SHARE = 1e-12

_NUM_SHOWN = 8

# The difference if the virtual shard, of which the first build has a batch, is empty for the second.
MISSING = BatchDifference("batch", ("present", "missing, because the shard is empty,"))

_ERROR_CAUSES = (
    "Usual causes: the order of a set, os.listdir() or glob (sort it); other files or package versions on one host; "
    "the time, a host name or a process id in samples; random numbers that cannot be seeded (os.urandom, secrets). "
    "Make samples depend only on their index, and on random, NumPy and torch. If they are meant to differ, set "
    "data_service.verify=warn."
)
_WARNING_CAUSES = (
    "Training continues, but a second run with the same seed will see other values. Usual causes: random numbers that "
    "cannot be seeded (os.urandom, secrets, the time), a generator that is created in code, threads, different CPUs. "
    "Set data_service.verify=off if this does not matter."
)


@dataclass(eq=False)
class BatchCheck:
    """A batch that is built twice.

    Attributes:
        buffer: The pass.
        step: Number of the batch within the pass.
        spec: The request for the second build.
        first: The first build.
        host: Address of the host that built it.
        worker: Number of the worker that built it.
        candidates: Addresses of the hosts that may build it again.
        kept_at: When the first build arrived.
        hold_s: Seconds after that in which a pass waits for the second build before it ends.
        second: The answer with the second build.
        request_id: The request for the second build; None: not sent yet.
        second_host: Address of the host that was asked for it.
        structure: The structure of the second build.
    """

    buffer: PassBuffer
    step: int
    spec: StepRangeSpec
    first: BatchBuild
    host: str
    worker: int
    candidates: Sequence[str]
    kept_at: float
    hold_s: float
    second: Answer
    request_id: int | None = None
    second_host: str = ""
    structure: bytes = b""

    @property
    def is_shard(self) -> bool:
        """Whether the batch is the first of a virtual shard."""
        return isinstance(self.buffer.plan, ShardSteps)

    def take_header(self, header: StepRangeHeader) -> None:
        """Take the header of the second build, and reserve memory for its bytes.

        Raises:
            WireError: It is a second header, or announces something other than one batch that fits into a slot.
        """
        if header.num_batches != 1 or header.num_bytes > self.buffer.ring.slot_bytes:
            raise WireError(f"{header.num_batches} batches of {header.num_bytes} bytes arrived for a request for one")
        (batch,) = unpack_batches(header.encoded_batches, header.num_bytes)
        if batch.start or not batch.structure:
            raise WireError(f"a single batch lies at byte {batch.start}, with a header of {len(batch.structure)} bytes")
        self.second.take_header(header)
        self.second.memory = np.empty(header.num_bytes, np.uint8)
        self.structure = batch.structure

    def difference(self) -> BatchDifference | None:
        """Compare the two builds; this may take long, and needs no lock.

        Raises:
            WireError: A build is malformed.
        """
        num_samples = len(self.spec.batches[0].keys)
        return difference(
            self.first, BatchBuild(self.structure, self.second.memory), 0 if self.is_shard else num_samples
        )


class Verifier:
    """The checks of one rank.

    Args:
        mode: What follows if integers, text or structure differ.
        share: Share of the batches that are checked, besides the first of each loader.
        name_of: Returns the name of a host at an address.
    """

    def __init__(self, mode: Verify, share: float, name_of: Callable[[str], str]) -> None:
        self.check: BatchCheck | None = None
        self._mode = mode
        self._period = round(1 / share) if share > _LEAST_SHARE else None  # None: no batch but the first ones
        self._name_of = name_of
        self._compared_hosts: dict[LoaderKey, set[str]] = {}
        self._num_failed: Counter[LoaderKey] = Counter()
        self._warned: set[tuple[str, str]] = set()

    # Which batches

    def offer(self, buffer: PassBuffer, answer: InFlightRange, host: str, up: Sequence[str], now: float) -> None:
        """Begin a check of a batch that has arrived, if one is due.

        Rank 0 checks until each host has built a batch of the loader that was compared; all ranks check their share of
        batches, chosen by their numbers. Of a virtual shard only the first batch can be built again without all those
        before it.

        Args:
            buffer: The pass.
            answer: The batches.
            host: Address of the host that built them.
            up: Addresses of the hosts that can be asked.
            now: The current time.
        """
        if self._mode == "off" or self.check is not None or not up:
            return
        step = self._due_by_share(buffer, answer)
        candidates: Sequence[str] = [other for other in up if other != host] or [host]
        if step is None:
            candidates = self._due_hosts(buffer, host, candidates)
            step = answer.step_range.first
        if not candidates or (isinstance(buffer.plan, ShardSteps) and buffer.plan.batch(step)[2]):
            return
        header = answer.header
        latency_s = header.queue_s + header.produce_s + answer.transfer_s
        batch = unpack_batches(header.encoded_batches, header.num_bytes)[step - answer.step_range.first]
        data = buffer.ring.slot(answer.slot)[batch.start : batch.start + batch.num_bytes].copy()
        self.check = BatchCheck(
            buffer=buffer,
            step=step,
            spec=replace(buffer.spec, batches=(buffer.spec_of(step),)),
            first=BatchBuild(batch.structure, data),
            host=host,
            worker=header.worker,
            candidates=candidates,
            kept_at=now,
            hold_s=min(_LONGEST_HOLD_S, _LEAST_HOLD_S + _HOLD_FACTOR * latency_s),
            second=Answer(np.empty(0, np.uint8), buffer.spec.compression),
        )

    def _due_by_share(self, buffer: PassBuffer, answer: InFlightRange) -> int | None:
        """Return the first step of an answer that the share asks to check: every so many, from some step on."""
        period = self._period
        if period is None:
            return None
        first, stop = answer.step_range.first, answer.step_range.stop
        spec = buffer.batch_spec
        # The first such step differs between passes, or passes of fewer steps would always or never have one.
        start = crc32(f"{buffer.loader} {spec.seed} {spec.epoch} {spec.pass_index} {buffer.place.rank}".encode())
        if isinstance(buffer.plan, ShardSteps):
            return first if (start + buffer.plan.shard(first)) % period == 0 else None
        step = first + (start - first) % period
        return step if step < stop else None

    def _due_hosts(self, buffer: PassBuffer, host: str, others: Sequence[str]) -> Sequence[str]:
        """Return the hosts to which a batch of another one should be compared, so that all are with each other."""
        key = buffer.loader
        if buffer.place.rank != 0 or self._num_failed[key] >= _MAX_FAILED:
            return ()
        compared = self._compared_hosts.get(key, set())
        if not compared:
            return others
        if host in compared:
            return [other for other in others if other not in compared]
        return [other for other in others if other in compared] or others

    def holds(self, buffer: PassBuffer, now: float) -> bool:
        """Return whether a pass, all batches of which were delivered, should not end before the check of one."""
        check = self.check
        return check is not None and check.buffer.loader == buffer.loader and now - check.kept_at < check.hold_s

    # The request for the second build

    def is_waiting(self, now: float, *, is_urgent: bool) -> bool:
        """Return whether a second build is to be requested now: if hosts are idle, or ``is_urgent``, even if not."""
        check = self.check
        if check is None or check.request_id is not None:
            return False
        return not is_urgent or now - check.kept_at >= _PATIENCE_S

    def is_late(self, now: float) -> bool:
        """Return whether a second build takes too long."""
        check = self.check
        return check is not None and not check.second.is_complete and now - check.kept_at >= _LONGEST_CHECK_S

    def request(self, check: BatchCheck, request_id: int, host: str) -> bytes:
        """Note that the second build is requested from a host; return the encoded spec."""
        check.request_id, check.second_host = request_id, host
        return replace(check.spec, built_by=check.worker if host == check.host else ANOTHER_HOST).encode()

    def awaited(self, request_id: int, host: str) -> BatchCheck | None:
        """Return the check whose second build a frame belongs to; None: it is of another request."""
        check = self.check
        if check is None or check.second.is_complete or (check.request_id, check.second_host) != (request_id, host):
            return None
        return check

    # The outcome

    def give_up(self, check: BatchCheck, why: str) -> None:
        """End a check without an outcome; a later batch is checked."""
        logger.debug("Not comparing %s: %s.", _place(check), why)
        self._num_failed[check.buffer.loader] += 1
        self.check = None

    def failed(self, check: BatchCheck, failure: Failure) -> None:
        """End a check whose second build failed. If the user's code did, the hosts differ: warn of it, once."""
        first, second = self._name_of(check.host), self._name_of(check.second_host)
        if RETRIES.get(failure.error) in (None, Retry.ONCE):
            self._warn(
                check,
                "failed",
                f"{_place(check)} was built by data host {first}, but could not be built again by data host {second}"
                f"{failure.where and f', {failure.where}'}: {first_line(failure.text)}. Compare the files and package "
                "versions of the data hosts.",
            )
        self.give_up(check, f"data host {second} could not build it: {first_line(failure.text)}")

    def compared(self, check: BatchCheck, found: BatchDifference | None) -> DataHostMismatchError | None:
        """End a check with its outcome, and warn, once for each loader; return the error that ends the training."""
        self.check = None
        self._compared_hosts.setdefault(check.buffer.loader, set()).update((check.host, check.second_host))
        if found is None:
            return None
        if found.is_inexact:
            text = (
                f"Batches of {check.buffer.name} are not reproducible: {self._explain(check, found)}\n{_WARNING_CAUSES}"
            )
            self._warn(check, "inexact", text)
            return None
        who = "Data hosts" if check.second_host != check.host else f"Workers of data host {self._name_of(check.host)}"
        text = f"{who} build different batches: {self._explain(check, found)}\n{_ERROR_CAUSES}"
        if self._mode == "error":
            self._mode = "off"
            return DataHostMismatchError(text)
        self._warn(check, "different", text)
        return None

    def _warn(self, check: BatchCheck, kind: str, text: str) -> None:
        if (check.buffer.name, kind) not in self._warned:
            self._warned.add((check.buffer.name, kind))
            logger.warning("%s", text)

    def _explain(self, check: BatchCheck, found: BatchDifference) -> str:
        """Return what differs, who built it, and where it is."""
        first, second = f"data host {self._name_of(check.host)}", f"data host {self._name_of(check.second_host)}"
        if check.host == check.second_host:
            again = " when it was built again" if check.worker == check.second.header.worker else ""
            first, second = f"worker {check.worker}", f"worker {check.second.header.worker}{again}"
        count = "" if found.num_elements == 1 else f"; {found.num_different} of {found.num_elements} elements differ"
        return (
            f"{found.path} is {found.texts[0]} on {first}, but {found.texts[1]} on {second} "
            f"({_place(check)}, {_samples(check, found.rows)}{count})."
        )


def _place(check: BatchCheck) -> str:
    if check.is_shard:
        return f"first batch of shard {check.spec.batches[0].keys[1]} of {check.buffer.name}"
    return f"batch {check.step} of {check.buffer.name}"


def _samples(check: BatchCheck, rows: Sequence[int]) -> str:
    """Name the samples in some rows of a batch; all samples if the rows are unknown."""
    if check.is_shard:
        return f"epoch {check.spec.batches[0].epoch}"
    keys = check.spec.batches[0].keys.tolist()
    shown = [keys[row] for row in rows] or keys
    which = "sample" if len(shown) == 1 else "samples" if rows else "one of the samples"
    more = f" and {len(shown) - _NUM_SHOWN} more" if len(shown) > _NUM_SHOWN else ""
    numbers = ", ".join(map(str, shown[:_NUM_SHOWN])) + more
    if check.buffer.request.loader.has_indices:
        return f"{which} with {'index' if len(shown) == 1 else 'indices'} {numbers}"
    return f"{which} at {'position' if len(shown) == 1 else 'positions'} {numbers} of the sampler's order"
