"""The feeder's client in the training process, which starts the feeder and exchanges messages with it. No gRPC."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import weakref
from collections import deque
from collections.abc import Callable
from itertools import count
from time import monotonic  # bound here, because tests of scripts may replace time.monotonic
from typing import NoReturn, TypeAlias

from lightning_sm import errors
from lightning_sm.data.host.pickler import PickledObject
from lightning_sm.data.ipc import feeder_messages as kinds
from lightning_sm.data.ipc.messages import RELEASE, Message, NothingReceivedError, Released
from lightning_sm.data.ipc.processes import describe_exit, start_module
from lightning_sm.data.ipc.ring import Ring
from lightning_sm.data.protocol.openings import Opening
from lightning_sm.record.data_figures import RankFigures

logger = logging.getLogger(__name__)

# Interval between log lines during a long wait.
_REPORT_PERIOD_S = 30.0
_EXIT_TIMEOUT_S = 10.0


_OfPass: TypeAlias = kinds.DeliveredRange | kinds.EndOfPass | kinds.Failed


class HeldOpening:
    """An opening that data hosts keep until this object is garbage-collected.

    Args:
        opening: The opening.
        closing: Gets the opening then. The finalizer only notes what to close, because it may interrupt the thread that
            holds the client's lock.
    """

    def __init__(self, opening: Opening, closing: deque[Opening]) -> None:
        self.opening = opening
        weakref.finalize(self, closing.append, opening).atexit = False


class FeederClient:
    """A feeder process and the connection to it.

    Args:
        settings: The first message to the feeder.

    Attributes:
        name: Name of this rank.
    """

    def __init__(self, settings: kinds.Configure) -> None:
        self.name = settings.client.client
        releases, self._releases = os.pipe()
        self._process, self._socket = start_module("lightning_sm.data.feeder.process", releases)
        os.close(releases)
        self._pid = os.getpid()
        self._is_quiet = settings.is_quiet
        # Serialises threads that read loaders. Finalizers must not acquire it, because they may interrupt its holder.
        self._lock = threading.RLock()
        self._inboxes: dict[int, deque[_OfPass]] = {}
        self._error: kinds.Failed | None = None
        self._snapshots: list[kinds.FeederSnapshot] = []
        self._closing: deque[Opening] = deque()  # filled by finalizers
        self._held: weakref.WeakValueDictionary[Opening, HeldOpening] = weakref.WeakValueDictionary()
        self._opened_sources: dict[str, kinds.SourceOpened] = {}
        self._ring_numbers, self._pass_ids = count(1), count(1)
        self._socket.send(settings)

    def open_source(self, pickled: PickledObject, *openings: Opening) -> list[HeldOpening]:
        """Have the data hosts open a source, and return the openings, which they close once nothing refers to them.

        Args:
            pickled: The source.
            *openings: The openings of the source.
        """
        with self._lock:
            self._close_sources()
            held = [self._held.get(opening) or HeldOpening(opening, self._closing) for opening in openings]
            new = {one.opening: one for one in held if one.opening not in self._held}
            if new:
                fd = pickled.write()
                try:
                    self._send(kinds.OpenSource(list(new), pickled.num_bytes, (fd,)))
                finally:
                    os.close(fd)
            self._held.update(new)
        return held

    def wait_for_source(self, opening: Opening, what: str, timeout_s: float) -> bytes:
        """Wait until a data host has opened a source, and return the result if the source is a hook call.

        Args:
            opening: The opening of the source.
            what: What the data host is to do, for messages.
            timeout_s: Maximum wait in seconds.

        Raises:
            DataServiceError: No host can open the source, or none did in time.
        """
        name = opening.name
        if not self._wait(lambda: name in self._opened_sources, timeout_s, f"a data host to {what}", logging.INFO):
            raise errors.DataHostUnreachableError(
                f"Waited {timeout_s:.0f} s (data_service.startup_timeout_s) for a data host to {what}.\n"
                f"{self.describe()}\nSee the logs of the data hosts. If they download data, raise the timeout."
            )
        opened = self._opened_sources[name]
        if opened.error:
            raise opened.exception()
        return opened.result

    def _close_sources(self) -> None:
        while self._closing:
            opening = self._closing.popleft()
            if opening not in self._held:  # otherwise, it has been opened again
                self._opened_sources.pop(opening.name, None)
                self._send(kinds.CloseSource(opening.name))

    def start_iterator(self, make: Callable[[int], kinds.StartIterator]) -> int:
        """Start an iterator, and return its number.

        Args:
            make: Called with the number; returns the message to the feeder.
        """
        with self._lock:
            self._close_sources()
        pass_id = next(self._pass_ids)
        self._inboxes[pass_id] = deque()
        self._send(make(pass_id))
        return pass_id

    def supply(self, pass_id: int, indices: list[bytes], *, is_end: bool) -> None:
        """Give an iterator the output of its sampler.

        Args:
            pass_id: Number of the iterator.
            indices: The pickled indices for each of the next batches.
            is_end: Whether the sampler is exhausted.
        """
        self._send(kinds.SupplyIndices(pass_id, indices, is_end))

    def add_ring(self, ring: Ring) -> int:
        """Share a ring with the feeder, and return its number."""
        number = next(self._ring_numbers)
        self._socket.send(kinds.ShareRing(number, ring.num_slots, ring.slot_bytes, (ring.fd,)))
        return number

    def close_pass(self, pass_id: int) -> None:
        """End a pass; may be called from a finalizer."""
        self._inboxes.pop(pass_id, None)
        self._release(Released.PASS, pass_id, 0)

    def next(self, pass_id: int, timeout_s: float) -> _OfPass:
        """Wait for the next batches of a pass, or for its end, and return the feeder's message.

        Args:
            pass_id: Number of the pass.
            timeout_s: Timeout in seconds.

        Raises:
            DataServiceError: The batch failed, or did not arrive in time.
        """
        inbox = self._inboxes[pass_id]

        def has_arrived() -> bool:
            return bool(inbox) and not isinstance(inbox[0], kinds.Failed)

        if self._wait(has_arrived, timeout_s, "a batch", logging.WARNING, pass_id=pass_id):
            return inbox.popleft()
        end = (
            f"within {timeout_s:.0f} s (data_service.batch_timeout_s).\n{self.describe()}\n"
            "See the logs of the data hosts for the cause."
        )
        if any(host.state == "up" for host in self.snapshot().hosts):
            raise errors.DataTimeoutError(f"No batch arrived {end}")
        raise errors.DataHostUnreachableError(f"All data hosts are unreachable, and no batch arrived {end}")

    def take(self, pass_id: int, step: int) -> None:
        """Notify the feeder that all steps below ``step`` in a pass have been taken."""
        self._release(Released.STEP, pass_id, step)

    def release(self, ring: int, slot: int) -> None:
        """Release a slot of a ring; may be called from a finalizer, in any thread."""
        self._release(Released.SLOT, ring, slot)

    def snapshot(self) -> kinds.FeederSnapshot:
        """Return the feeder's view of hosts and passes."""
        with self._lock:
            self._send(kinds.AskSnapshot())
            deadline = monotonic() + _EXIT_TIMEOUT_S
            self._snapshots.clear()
            while not self._snapshots:
                if not self._receive(deadline - monotonic()):
                    raise errors.DataServiceError(f"The feeder process did not answer within {_EXIT_TIMEOUT_S:.0f} s.")
            return self._snapshots.pop()

    def share(self, figures: RankFigures) -> None:
        """Send this rank's measurements to the data hosts; rank 0 gets them with its ``snapshot``."""
        self._send(kinds.ShareFigures(figures))

    def describe(self) -> str:
        """Describe hosts and passes for messages, one on each line."""
        try:
            snapshot = self.snapshot()
        except errors.DataServiceError as error:  # a failed description must not end the training
            return f"  {error}"
        lines = []
        for host in snapshot.hosts:
            why = f" ({host.why})" if host.why else ""
            busy = f", {host.busy} of {host.workers} workers busy" if host.workers else ""
            lines.append(f"  {host.name}: {host.state}{why}{busy}, requests in flight: {host.in_flight}")
        for state in snapshot.passes:
            requests = ", ".join(f"{host} {for_s:.1f} s ago" for host, for_s in state.requested)
            where = f"requested from {requests}" if requests else "not requested"
            lines.append(f"  waiting for batch {state.waiting_for}: {where}; {state.ready} buffered")
        return "\n".join(lines)

    def close(self) -> None:
        """Notify the data hosts that training has finished, and stop the feeder."""
        if self._releases < 0 or os.getpid() != self._pid:
            return
        try:
            self._socket.send(kinds.Finish())
        except OSError:
            logger.debug("The feeder process has already exited.")
        self._socket.close()
        os.close(self._releases)
        self._releases = -1
        try:
            self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, message: Message) -> None:
        try:
            self._socket.send(message)
        except OSError:
            self._raise_ended()

    def _release(self, kind: Released, number: int, value: int) -> None:
        """Write to the release pipe without the lock, because a finalizer may interrupt the thread that holds it."""
        # Do nothing in a forked child: the training process may still use the inherited arrays that the child drops.
        if self._releases < 0 or os.getpid() != self._pid:
            return
        try:
            os.write(self._releases, RELEASE.pack(kind, number, value))
        except BrokenPipeError:
            logger.debug("The feeder process has exited.")

    def _wait(
        self, is_ready: Callable[[], bool], timeout_s: float, what: str, level: int, *, pass_id: int | None = None
    ) -> bool:
        """Receive messages until a condition holds, and return whether it held in time. Log the cause of a long wait.

        All ranks wait for the same loaders, so only the first rank on each host logs such a wait (INFO). Each rank
        waits for batches of its own, so every rank logs these waits.

        Raises:
            DataServiceError: The feeder reported an error for this pass or for all passes.
        """
        if self._is_quiet and level == logging.INFO:
            level = logging.DEBUG
        deadline = monotonic() + timeout_s
        report_at = monotonic() + _REPORT_PERIOD_S
        with self._lock:
            while not is_ready():
                self._raise_error(pass_id)
                if self._receive(min(report_at, deadline) - monotonic()):
                    continue
                now = monotonic()
                if now >= deadline:
                    return False
                if now >= report_at:
                    report_at = now + _REPORT_PERIOD_S
                    logger.log(level, "Waiting for %s:\n%s", what, self.describe())
        return True

    def _receive(self, timeout_s: float) -> bool:
        """Handle the next message; return False if none arrives in time."""
        try:
            message = self._socket.receive(max(0.0, timeout_s))
        except NothingReceivedError:
            return False
        if message is None:
            self._raise_ended()
        match message:
            case kinds.SourceOpened() as source:
                self._opened_sources[source.name] = source
            case kinds.FeederSnapshot() as snapshot:
                self._snapshots.append(snapshot)
            case kinds.Failed(pass_id=None) as error:
                self._error = error
            case (kinds.DeliveredRange() | kinds.EndOfPass() | kinds.Failed()) as of_pass:
                # If the pass has been closed, the feeder frees the slots of what was not taken.
                self._inboxes.get(of_pass.pass_id or 0, deque()).append(of_pass)
        return True

    def _raise_error(self, pass_id: int | None) -> None:
        """Raise the error that ended all passes, or the error that is next in the inbox of this pass, if any."""
        error = self._error or next(iter(self._inboxes.get(pass_id or 0, ())), None)
        if isinstance(error, kinds.Failed):
            raise error.exception()

    def _raise_ended(self) -> NoReturn:
        status = self._process.wait()
        raise errors.DataServiceError(
            f"The feeder process of this rank (pid {self._process.pid}) {describe_exit(status)}. Without it, this rank "
            "receives no batches."
        )
