"""The feeder process of one trainer rank: requests batches from data hosts, and fills the training process's ring.

It runs in a separate interpreter, so that receiving batches and training never block each other.
"""

from __future__ import annotations

import logging
import mmap
import os
import selectors
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from lightning_sm.data.feeder.host_link import HostLink
from lightning_sm.data.feeder.iterator_buffer import InFlightRange, IteratorBuffer
from lightning_sm.data.feeder.scheduler import Liveness, Retry, Scheduler, StepRequest
from lightning_sm.data.feeder.source_openings import SourceOpenings
from lightning_sm.data.feeder.status import RETRIES, explain, host_snapshot, rank_figures
from lightning_sm.data.ipc import feeder_messages as kinds
from lightning_sm.data.ipc.messages import RELEASE, Message, MessageSocket, Released
from lightning_sm.data.ipc.processes import connection_to_parent, run_and_exit
from lightning_sm.data.ipc.ring import Ring
from lightning_sm.data.protocol.failures import LOST_WORKERS, Failure, first_line
from lightning_sm.data.protocol.frames import FrameKind, StepRangeHeader, frame, parse_failure
from lightning_sm.data.protocol.openings import CallResult
from lightning_sm.errors import BatchTooLargeError, DataServiceError, WireError
from lightning_sm.record.data_figures import RankFigures

logger = logging.getLogger(__name__)

# Send a host one more request than it has workers: a worker needs its next request while its answer is in transit.
_EXTRA_CREDITS = 1


class Feeder:
    """The link between a training process and all data hosts.

    Args:
        trainer: Connection to the training process.
        releases: Pipe through which the training process releases slots.
        settings: The first message from the training process.
    """

    def __init__(self, trainer: MessageSocket, releases: int, settings: kinds.Configure) -> None:
        self._trainer = trainer
        self._releases = releases
        self._num_ranks = settings.client.world_size
        self._lock = threading.RLock()
        self._scheduler = Scheduler()
        self._rings: dict[int, tuple[Ring, list[int]]] = {}
        self._buffers: dict[int, IteratorBuffer] = {}
        # Size in bytes of the largest batch of each source, so that later passes start with the right window.
        self._largest: dict[str, int] = {}
        self._closed_early: set[int] = set()
        self._links: dict[str, HostLink] = {}
        self._openings = SourceOpenings(self._links, self._notify)
        # Sent with heartbeats. The links' threads read this object without the lock: it is replaced, never modified.
        self.figures: RankFigures | None = None
        self._is_running = True
        for address in settings.addresses:
            self._links[address] = HostLink(address, settings.credentials, settings.client, self)

    def run(self) -> None:
        """Serve the training process until it closes the connection or exits."""
        with selectors.DefaultSelector() as selector:
            self._handle(self._trainer.buffered())
            selector.register(self._trainer, selectors.EVENT_READ, self._receive)
            selector.register(self._releases, selectors.EVENT_READ, self._take_releases)
            # EOF on the socket is not enough: a fork of the training process may hold the other end open.
            parent = os.pidfd_open(os.getppid())
            selector.register(parent, selectors.EVENT_READ, self._finish)
            while self._is_running:
                with self._lock:
                    wakeup = self._scheduler.next_wakeup(time.monotonic())
                wait_s = 0.5 if wakeup is None else min(0.5, max(0.0, wakeup - time.monotonic()))
                for key, _ in selector.select(wait_s):
                    key.data()
                with self._lock:
                    self._openings.tick(time.monotonic())
                self._send_requests()
            os.close(parent)

    # Messages from the training process

    def _receive(self) -> None:
        self._handle(self._trainer.pending())
        if self._trainer.is_at_end:
            self._finish()

    def _handle(self, messages: list[Message]) -> None:
        for message in messages:
            match message:
                case kinds.ShareRing():
                    ring = Ring(message.fds[0], message.num_slots, message.slot_bytes)
                    self._rings[message.number] = (ring, list(range(ring.num_slots)))
                case kinds.AskSnapshot():
                    self._notify(self._snapshot())
                case kinds.ShareFigures():
                    self.figures = message.figures
                case kinds.Finish():
                    self._finish()
                case kinds.OpenSource(openings):
                    snapshot = mmap.mmap(message.fds[0], message.num_bytes, prot=mmap.PROT_READ)
                    os.close(message.fds[0])
                    with self._lock:
                        for opening in openings:
                            self._openings.open(opening, snapshot)
                case kinds.CloseSource(name):
                    with self._lock:
                        self._openings.close(name)
                case kinds.StartIterator():
                    self._start_iterator(message)
                case kinds.SupplyIndices():
                    self._supply(message)

    def _start_iterator(self, request: kinds.StartIterator) -> None:
        ring, free = self._rings[request.ring]
        with self._lock:
            if request.pass_id in self._closed_early:
                self._closed_early.remove(request.pass_id)
                return
            buffer = IteratorBuffer(request, ring, free, largest=self._largest.get(request.source, 0))
            self._buffers[request.pass_id] = buffer
            self._scheduler.open_pass(
                request.pass_id,
                buffer.limits,
                loader=request.loader,
                may_hedge=not request.is_stream,  # a second host would read the stream from its beginning
                can_take=lambda host: self._links[host].has_source(request.fetch.opening),
            )
            self._deliver(buffer)

    def _supply(self, message: kinds.SupplyIndices) -> None:
        with self._lock:
            buffer = self._buffers.get(message.pass_id)
            if buffer is None:  # the iterator has been closed
                return
            buffer.supply(message.indices, is_end=message.is_end)
            self._deliver(buffer)

    def _take_releases(self) -> None:
        data = os.read(self._releases, RELEASE.size << 10)
        with self._lock:
            for kind, number, value in RELEASE.iter_unpack(data):
                if kind == Released.SLOT:
                    self._rings[number][1].append(value)
                elif kind == Released.PASS:
                    self._close(number)
                elif number in self._buffers:
                    self._buffers[number].take(value)
                    self._scheduler.advance(number, value)

    def _close(self, pass_id: int) -> None:
        if pass_id not in self._buffers:  # the release overtook the message that starts the pass
            self._closed_early.add(pass_id)
            return
        self._cancel(self._scheduler.close_pass(pass_id))
        buffer = self._buffers.pop(pass_id)
        buffer.limits.free.extend(run.slot for run in buffer.ready.values())

    def _finish(self) -> None:
        if not self._is_running:
            return
        self._is_running = False
        with ThreadPoolExecutor(max(1, len(self._links))) as pool:
            list(pool.map(HostLink.finish, self._links.values()))

    # Messages to the training process

    def _notify(self, message: Message) -> None:
        try:
            self._trainer.send(message)
        except OSError:
            logger.debug("The training process has exited, so the feeder exits too.")

    def fail(self, error: Exception) -> None:
        """End all passes with an error, as when a host is not part of this job or violates the protocol."""
        self._notify(kinds.Failed(None, type(error).__name__, str(error)))

    def _deliver(self, buffer: IteratorBuffer) -> None:
        for message in buffer.deliveries():
            self._notify(message)

    def _snapshot(self) -> kinds.FeederSnapshot:
        with self._lock:
            known = {status.host: status for status in self._scheduler.hosts()}
            passes = self._scheduler.passes(time.monotonic())
        hosts = [host_snapshot(link, known.get(address)) for address, link in self._links.items()]
        return kinds.FeederSnapshot(hosts, passes, rank_figures(self._links.values()))

    # Events from links

    def link_up(self, link: HostLink) -> None:
        """Start requesting batches from the host."""
        workers = max(1, link.report.host.workers if link.report is not None else 0)
        num_credits = -(-workers // self._num_ranks) + _EXTRA_CREDITS
        with self._lock:
            self._scheduler.host_up(link.address, num_credits)
        self._send_requests()

    def link_lost(self, link: HostLink) -> None:
        """Move the host's requests to other hosts."""
        with self._lock:
            self._cancel(self._scheduler.host_lost(link.address, is_silent=link.state is Liveness.SUSPECT))
        self._send_requests()

    def snapshot(self, digest: str) -> mmap.mmap | None:
        """Return the memory of a source, or None if the source is no longer wanted."""
        with self._lock:
            return self._openings.snapshot(digest)

    def link_opened_source(self, link: HostLink, name: str, outcome: Failure | CallResult | None) -> None:
        """Start requesting a source's batches from the host, or record that the host could not open the source."""
        try:
            with self._lock:
                self._openings.opened(link, name, outcome)
        except DataServiceError as error:
            self.fail(error)
        self._send_requests()

    def link_frame(self, link: HostLink, request_id: int, kind: int, value: int, payload: memoryview) -> None:
        """Handle a frame of an answer."""
        with self._lock:
            request = self._scheduler.request(request_id, link.address)
            if request is None:
                return
            buffer = self._buffers[request.pass_id]
            try:
                self._receive_frame(buffer, request, kind, value, payload)
            except BatchTooLargeError as error:
                buffer.errors[request.first_step] = error
                self._deliver(buffer)
            except WireError as error:
                raise _about(request, error) from error

    def link_piece(self, link: HostLink, request_id: int, kind: int, value: int, size: int) -> InFlightRange | None:
        """Return the destination of a piece of a batch, or None to discard the piece."""
        with self._lock:
            request = self._scheduler.request(request_id, link.address)
            if request is None:
                return None
            buffer = self._buffers[request.pass_id]
            answer = buffer.in_flight[request_id]
            ended = partial(self._piece_ended, request, buffer, answer)
            try:
                return answer.begin_piece(value, size, ended)
            except WireError as error:
                raise _about(request, error) from error

    def _piece_ended(self, request: StepRequest, buffer: IteratorBuffer, answer: InFlightRange, is_whole: bool) -> None:
        with self._lock:
            buffer.end_piece(answer, is_complete=is_whole)
            if answer.is_dropped:
                self._send_requests()
            elif answer.is_complete:
                self._complete(buffer, request)

    def _receive_frame(
        self, buffer: IteratorBuffer, request: StepRequest, kind: int, value: int, payload: memoryview
    ) -> None:
        if kind == FrameKind.FAILURE:
            self._request_failed(buffer, request, parse_failure(payload))
        elif kind == FrameKind.ENDED:
            self._skip(buffer, request, value)
        elif kind == FrameKind.HEADER:
            self._take_header(buffer, request, StepRangeHeader.decode(payload))
            if buffer.in_flight[request.request_id].is_complete:  # the batches have no bytes
                self._complete(buffer, request)
        else:
            raise WireError(f"unexpected frame of kind {kind}")

    def _take_header(self, buffer: IteratorBuffer, request: StepRequest, header: StepRangeHeader) -> None:
        before = buffer.largest
        buffer.take_header(request.request_id, header)
        if buffer.largest != before:
            source = buffer.request.source
            self._largest[source] = max(self._largest.get(source, 0), buffer.largest)
            self._send_requests()

    def _complete(self, buffer: IteratorBuffer, request: StepRequest) -> None:
        now = time.monotonic()
        answer = buffer.accept(request.request_id, now - request.sent_at)
        superfluous = self._scheduler.completed(request.request_id, now, answer.header.produce_s)
        self._links[request.host].transfer_s += answer.transfer_s
        self._cancel(superfluous or ())
        if answer.step_range != request.step_range:  # the stream has ended
            self._cancel(self._scheduler.cut(buffer.pass_id))
        self._deliver(buffer)
        self._send_requests()

    def _skip(self, buffer: IteratorBuffer, request: StepRequest, end: int) -> None:
        """Record that a stream ended before the requested batches, and end the pass there."""
        self._cancel(self._scheduler.completed(request.request_id, time.monotonic()) or ())
        buffer.skip(request.request_id, end)
        self._cancel(self._scheduler.cut(buffer.pass_id))
        self._deliver(buffer)
        self._send_requests()

    def _request_failed(self, buffer: IteratorBuffer, request: StepRequest, failure: Failure) -> None:
        link = self._links[request.host]
        if failure.error == "NotOpen":
            opening = buffer.request.fetch.opening
            if not self._openings.is_wanted(opening):  # the iterator is about to be closed
                return
            link.reopen_source(opening)
        first, stop = request.first_step, request.step_range.stop
        steps = f"batch of step {first}" if stop == first + 1 else f"batches of steps {first} to {stop - 1}"
        place = ", ".join(filter(None, (f"data host {link.name}", failure.where, steps)))
        is_lost = failure.error in LOST_WORKERS
        reason = f"{failure.text} on data host {link.name}" if is_lost else failure.at(place)
        retry = RETRIES.get(failure.error, Retry.NEVER)
        decision = self._scheduler.failed(request.request_id, time.monotonic(), retry=retry, reason=reason)
        buffer.drop(request.request_id)
        if decision.is_fatal:
            self._cancel(decision.cancel)
            buffer.errors[first] = explain(failure.error, first, decision, buffer.keys(first))
            self._deliver(buffer)
            return
        # A failed range is requested again step by step, so report only the step that fails then.
        if request.step_range.num_steps == 1:
            logger.warning("Retrying a batch that failed on %s: %s", place, first_line(failure.text))
        self._send_requests()

    # Requests to data hosts

    def _send_requests(self) -> None:
        fetches: dict[str, list[bytes]] = {}
        with self._lock:
            now = time.monotonic()
            for request in self._scheduler.next_requests(now):
                buffer = self._buffers[request.pass_id]
                encoded_spec = buffer.expect(request.request_id, request.step_range, request.slot)
                fetches.setdefault(request.host, []).append(
                    frame(request.request_id, FrameKind.FETCH, len(encoded_spec)) + encoded_spec
                )
            for host, messages in fetches.items():
                self._links[host].send(b"".join(messages))

    def _cancel(self, requests: tuple[StepRequest, ...]) -> None:
        for request in requests:
            self._buffers[request.pass_id].drop(request.request_id)
            self._links[request.host].send(frame(request.request_id, FrameKind.CANCEL))


def _about(request: StepRequest, error: WireError) -> WireError:
    return WireError(f"the answer for step {request.first_step}: {error}")


def main() -> None:
    """Run the feeder. The command-line arguments are the descriptors of the connection and the release pipe."""
    trainer = connection_to_parent()
    settings = trainer.receive()
    if isinstance(settings, kinds.Configure):
        if settings.is_quiet:
            logging.getLogger("lightning_sm").setLevel(logging.ERROR)
        Feeder(trainer, int(sys.argv[2]), settings).run()


if __name__ == "__main__":
    run_and_exit(main)
