"""The feeder process of one trainer rank: requests batches from data hosts, and fills the training process's ring.

It has an interpreter of its own, so that receiving and the training loop never wait for each other.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from msgspec.structs import replace

from lightning_sm.data.feeder.agreement import LoaderAgreements
from lightning_sm.data.feeder.answer import Piece
from lightning_sm.data.feeder.batch_difference import BatchDifference
from lightning_sm.data.feeder.equal_shards import EqualShards
from lightning_sm.data.feeder.host_link import HostLink, LinkState
from lightning_sm.data.feeder.iterator_buffer import IteratorBuffer
from lightning_sm.data.feeder.pass_buffer import LoaderKey, PassBuffer
from lightning_sm.data.feeder.range_buffer import InFlightRange
from lightning_sm.data.feeder.sampler_orders import SamplerOrderClient, length_of, plan_pass
from lightning_sm.data.feeder.scheduler import Retry, Scheduler, StepRequest
from lightning_sm.data.feeder.source_openings import SourceOpenings
from lightning_sm.data.feeder.status import RETRIES, explain, host_snapshot, pass_snapshot, rank_figures
from lightning_sm.data.feeder.verification import MISSING, BatchCheck, Verifier
from lightning_sm.data.ipc import feeder_messages as kinds
from lightning_sm.data.ipc.messages import RELEASE, Message, MessageSocket, Released
from lightning_sm.data.ipc.processes import connection_to_parent, run_and_exit
from lightning_sm.data.ipc.ring import Ring
from lightning_sm.data.plan.shards import ShardSteps
from lightning_sm.data.protocol.calls import Loaders, Problem, SetUp
from lightning_sm.data.protocol.failures import LOST_WORKERS, Failure, first_line
from lightning_sm.data.protocol.figures import RankFigures
from lightning_sm.data.protocol.frames import FrameKind, StepRangeHeader, frame, parse_failure
from lightning_sm.data.protocol.openings import CallResult
from lightning_sm.errors import BatchTooLargeError, DataServiceError, WireError

logger = logging.getLogger(__name__)

# While an answer is in transit, its worker needs another request: send a host one more than it has workers.
_EXTRA_CREDITS = 1


class Feeder:
    """The link between a training process and all data hosts.

    Args:
        trainer: Connection to the training process.
        releases: Pipe through which the training process releases slots.
        settings: The first message.
    """

    def __init__(self, trainer: MessageSocket, releases: int, settings: kinds.Configure) -> None:
        self._trainer = trainer
        self._releases = releases
        self._num_ranks = settings.client.world_size
        self._lock = threading.RLock()
        self._scheduler = Scheduler(settings.hedge_factor)
        self._verifier = Verifier(settings.verify, settings.verify_share, lambda address: self._links[address].name)
        self._equal_shards = EqualShards(settings.verify)
        self._rings: dict[int, tuple[Ring, list[int]]] = {}
        self._buffers: dict[int, PassBuffer | IteratorBuffer] = {}
        # Bytes of the largest batch by loader: the window of a later pass is right from its first request.
        self._largest: dict[LoaderKey | str, int] = {}
        self._closed_early: set[int] = set()
        # Local workers start later than the data hosts: do not wait for them.
        num_hosts = sum(not kinds.is_local(address) for address in settings.addresses)
        self._agreements = LoaderAgreements(num_hosts, lambda name, reply: self._notify(kinds.Opened(name, reply)))
        self._after_first: dict[str, kinds.OpenLoaders] = {}
        self._snapshots: dict[str, tuple[int, int]] = {}  # by digest: descriptor and size
        self._links: dict[str, HostLink] = {}
        self._openings = SourceOpenings(self._links, self._notify, self._drop_snapshot)
        # Sent with heartbeats. Threads of the links read it, so it is replaced as a whole.
        self.figures: RankFigures | None = None
        self._transfers: dict[str, float] = dict.fromkeys(settings.addresses, 0.0)
        self._is_running = True
        for address in settings.addresses:
            self._links[address] = HostLink(address, settings.credentials, settings.client, self)
        self._sampler_orders = SamplerOrderClient(self._links, lambda error: self._fail(None, error))

    def run(self) -> None:
        """Serve the training process until it closes the connection, or exits."""
        with selectors.DefaultSelector() as selector:
            self._handle(self._trainer.buffered())
            selector.register(self._trainer, selectors.EVENT_READ, self._receive)
            selector.register(self._releases, selectors.EVENT_READ, self._take_releases)
            # EOF on the socket is not enough: a fork of the training process may hold its end open.
            parent = os.pidfd_open(os.getppid())
            selector.register(parent, selectors.EVENT_READ, lambda: self._finish("the training process exited"))
            while self._is_running:
                with self._lock:
                    wakeup = self._scheduler.next_wakeup(time.monotonic())
                wait_s = 0.5 if wakeup is None else min(0.5, max(0.0, wakeup - time.monotonic()))
                for key, _ in selector.select(wait_s):
                    key.data()
                try:
                    with self._lock:
                        self._agreements.tick(time.monotonic())
                except DataServiceError as error:
                    self._fail(None, error)
                with self._lock:
                    self._openings.tick(time.monotonic())
                self._send_requests()
                self._deliver_all()
            os.close(parent)

    # Messages from the training process

    def _receive(self) -> None:
        self._handle(self._trainer.pending())
        if self._trainer.is_at_end:
            self._finish("the training process exited")

    def _handle(self, messages: list[Message]) -> None:
        for message in messages:
            match message:
                case kinds.ShareSnapshot():
                    with self._lock:
                        self._snapshots[message.digest] = message.fds[0], message.num_bytes
                case kinds.OpenLoaders():
                    self._open(message)
                case kinds.ShareRing():
                    ring = Ring(message.fds[0], message.num_slots, message.slot_bytes)
                    self._rings[message.number] = (ring, list(range(ring.num_slots)))
                # Data hosts may have to run the user's sampler first: wait for that in threads.
                case kinds.StartPass():
                    threading.Thread(target=self._start, args=(message,), name="start", daemon=True).start()
                case kinds.MeasurePass():
                    threading.Thread(target=self._measure, args=(message,), name="measure", daemon=True).start()
                case kinds.AskSnapshot():
                    self._notify(self._snapshot())
                case kinds.ShareFigures():
                    self.figures = message.figures
                case kinds.Finish():
                    self._finish(message.outcome, is_success=message.is_success)
                case _:
                    self._handle_iterators(message)

    def _handle_iterators(self, message: Message) -> None:
        match message:
            case kinds.OpenSource(opening):
                with self._lock:
                    self._openings.open(opening)
            case kinds.CloseSource(name):
                with self._lock:
                    self._openings.close(name)
            case kinds.StartIterator():
                self._start_iterator(message)
            case kinds.SupplyIndices():
                self._supply(message)

    def _open(self, loaders: kinds.OpenLoaders) -> None:
        request = loaders.request
        with self._lock:
            if not request.loaders:  # a new run of the Trainer, for which hosts need no other snapshots
                for digest in self._snapshots.keys() - loaders.snapshots:
                    os.close(self._snapshots.pop(digest)[0])
            self._agreements.request(request.opening)
        links = list(self._links.values())
        if not loaders.prepares_everywhere:
            # Set this before asking the first host: its thread may get the reply at once.
            self._after_first[request.opening] = loaders
            links = links[:1]
        for link in links:
            link.want(request.opening, loaders.request_to(link.address))

    def _open_others(self, name: str) -> None:
        """Let the other hosts open loaders, now that the first has run prepare_data(), which may write shared files."""
        loaders = self._after_first.pop(name, None)
        if loaders is not None:
            for link in list(self._links.values())[1:]:
                link.want(name, replace(loaders.request_to(link.address), prepares=False))

    def _start(self, request: kinds.StartPass) -> None:
        pass_id, place = request.pass_id, request.place
        try:
            self._check_is_kept(request)
            plan, tail = plan_pass(request, self._sampler_orders)
        except (DataServiceError, ValueError) as error:
            self._fail(pass_id, error)
            return
        ring, free = self._rings[request.ring]
        loader = place.request_name, place.index
        buffer = PassBuffer(request, ring, free, plan, tail, largest=self._largest.get(loader, 0))
        shard_of = plan.shard if isinstance(plan, ShardSteps) else None
        self._begin(buffer, max_ranges=place.window_batches, loader=(place.stage, place.index), shard_of=shard_of)

    def _begin(self, buffer: PassBuffer | IteratorBuffer, **options: Any) -> None:
        """Begin to request the batches of a pass, unless it was closed before this thread came to it.

        Args:
            buffer: The pass.
            **options: Those of ``Scheduler.open_pass``.
        """
        pass_id = buffer.pass_id
        with self._lock:
            if pass_id in self._closed_early:
                self._closed_early.remove(pass_id)
                return
            self._buffers[pass_id] = buffer
            self._scheduler.open_pass(pass_id, buffer.next_step, buffer.stop_step, buffer.window, **options)
            self._deliver(buffer)
        self._send_requests()

    def _start_iterator(self, request: kinds.StartIterator) -> None:
        ring, free = self._rings[request.ring]
        self._begin(
            buffer := IteratorBuffer(request, ring, free, largest=self._largest.get(request.source, 0)),
            max_ranges=request.window_batches,
            loader=request.loader,
            known=buffer.known,
            shard_of=(lambda _: 0) if request.is_stream else None,
            can_take=lambda host: self._links[host].has_source(request.opening),
        )

    def _supply(self, message: kinds.SupplyIndices) -> None:
        with self._lock:
            buffer = self._buffers.get(message.pass_id)
            if not isinstance(buffer, IteratorBuffer):  # the iterator was closed meanwhile
                return
            buffer.supply(message.indices, is_end=message.is_end)
            self._scheduler.set_known(buffer.pass_id, buffer.known)
            if message.is_end:
                self._scheduler.set_stop(buffer.pass_id, buffer.stop_step)
                self._deliver(buffer)
        self._send_requests()

    def _measure(self, request: kinds.MeasurePass) -> None:
        try:
            self._check_is_kept(request)
            self._notify(length_of(request, self._sampler_orders))
        except (DataServiceError, ValueError) as error:
            self._fail(request.pass_id, error)

    def _check_is_kept(self, request: kinds.PassRequest) -> None:
        """Check that the loaders of a pass have not been replaced.

        Raises:
            DataServiceError: They have.
        """
        if not any(link.wants(request.place.request_name) for link in self._links.values()):
            raise DataServiceError(_replaced(request.loader.name))

    def _take_releases(self) -> None:
        data = os.read(self._releases, RELEASE.size << 10)
        with self._lock:
            for kind, number, value in RELEASE.iter_unpack(data):
                if kind == Released.SLOT:
                    self._rings[number][1].append(value)
                elif kind == Released.PASS:
                    self._close(number)
                elif number in self._buffers:
                    self._scheduler.advance(number, self._buffers[number].take(value))

    def _close(self, pass_id: int) -> None:
        if pass_id not in self._buffers:  # it has no plan yet, or the pipe was faster than the message that starts it
            self._closed_early.add(pass_id)
            return
        self._cancel(self._scheduler.close_pass(pass_id))
        buffer = self._buffers.pop(pass_id)
        buffer.free.extend(run.slot for run in buffer.ready.values())
        self._send_requests()

    def _finish(self, outcome: str, *, is_success: bool = False) -> None:
        if not self._is_running:
            return
        self._is_running = False
        self._sampler_orders.close()
        with ThreadPoolExecutor(max(1, len(self._links))) as pool:
            list(pool.map(lambda link: link.finish(outcome, is_success=is_success), self._links.values()))

    # Messages to the training process

    def _notify(self, message: Message) -> None:
        with self._unless_gone():
            self._trainer.send(message)

    @contextlib.contextmanager
    def _unless_gone(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            logger.debug("The training process has exited; this process exits, too.")

    def _fail(self, pass_id: int | None, error: Exception) -> None:
        self._notify(kinds.Failed(pass_id, type(error).__name__, str(error)))

    def _deliver(self, buffer: PassBuffer | IteratorBuffer) -> None:
        messages = (
            buffer.deliveries(holds_end=self._verifier.holds(buffer, time.monotonic()))
            if isinstance(buffer, PassBuffer)
            else buffer.deliveries()
        )
        for message in messages:
            self._notify(message)

    def _deliver_all(self) -> None:
        """Deliver what was held back until the check of a batch has ended, or takes too long."""
        with self._lock:
            for buffer in self._buffers.values():
                self._deliver(buffer)

    def _snapshot(self) -> kinds.FeederSnapshot:
        now = time.monotonic()
        with self._lock:
            known = {status.host: status for status in self._scheduler.hosts()}
            passes = [pass_snapshot(status, now) for status in self._scheduler.passes()]
            transfers = dict(self._transfers)
        hosts = [host_snapshot(link, known.get(address), transfers[address]) for address, link in self._links.items()]
        return kinds.FeederSnapshot(hosts, passes, rank_figures(self._links.values()))

    # Events of links

    def link_up(self, link: HostLink) -> None:
        """Request batches from the host from now on."""
        workers = max(1, link.report.workers if link.report is not None else 0)
        num_credits = -(-workers // self._num_ranks) + _EXTRA_CREDITS
        with self._lock:
            self._scheduler.host_up(link.address, num_credits)
        self._send_requests()

    def link_lost(self, link: HostLink) -> None:
        """Send the host's requests to others."""
        with self._lock:
            self._cancel(self._scheduler.host_lost(link.address, is_silent=link.state is LinkState.SILENT))
            self._openings.host_lost(link)
            check = self._verifier.check
            if check is not None and check.second_host == link.address and not check.second.is_complete:
                self._give_up_check(check, "the connection to the second host was lost")
        self._send_requests()

    def link_opened(self, link: HostLink, name: str, reply: SetUp | Loaders | Problem) -> str:
        """Compare the reply with those of the other hosts."""
        try:
            with self._lock:
                self._agreements.add_reply(name, link.name, reply, time.monotonic())
        except DataServiceError as error:
            self._fail(None, error)
        else:
            if isinstance(reply, Problem):
                what = first_line(reply.text)
                logger.warning("Continuing without data host %s: %s: %s", link.name, reply.where, what)
        if isinstance(reply, Problem):
            return f"failed in {reply.where}"
        if link is next(iter(self._links.values())):
            self._open_others(name)
        return ""

    def snapshot(self, digest: str) -> tuple[int, int] | None:
        """Return a copy of the descriptor of a snapshot, and its size."""
        with self._lock:
            found = self._snapshots.get(digest)
            return None if found is None else (os.dup(found[0]), found[1])

    def link_opened_source(self, link: HostLink, name: str, outcome: Problem | CallResult | None) -> None:
        """Request batches of the source from the host from now on, or take note that it has none."""
        try:
            with self._lock:
                self._openings.opened(link, name, outcome)
        except DataServiceError as error:
            self._fail(None, error)
        self._send_requests()

    def _drop_snapshot(self, digest: str) -> None:
        if digest in self._snapshots:
            os.close(self._snapshots.pop(digest)[0])

    def link_refused(self, error: DataServiceError) -> None:
        """Fail: the host does not belong to this job, or violates the protocol."""
        self._fail(None, error)

    def link_frame(self, link: HostLink, request_id: int, kind: int, value: int, payload: memoryview) -> None:
        """Receive a part of an answer."""
        with self._lock:
            check = self._verifier.awaited(request_id, link.address)
            if check is not None:
                self._receive_second_build(check, kind, value, payload)
                return
            request = self._scheduler.request(request_id, link.address)
            if request is None:
                return
            buffer = self._buffers[request.pass_id]
            try:
                self._receive_frame(buffer, request, kind, value, payload)
            except BatchTooLargeError as error:
                self._fail(buffer.pass_id, error)
            except WireError as error:
                raise _about(request, error) from error

    def link_piece(self, link: HostLink, request_id: int, kind: int, value: int, num_bytes: int) -> Piece | None:
        """Return where a piece of a batch goes."""
        is_compressed = kind == FrameKind.COMPRESSED
        with self._lock:
            check = self._verifier.awaited(request_id, link.address)
            if check is not None:
                ended = partial(self._second_piece_ended, check)
                return check.second.begin_piece(value, num_bytes, is_compressed=is_compressed, ended=ended)
            request = self._scheduler.request(request_id, link.address)
            if request is None:
                return None
            buffer = self._buffers[request.pass_id]
            answer = buffer.in_flight[request_id]
            ended = partial(self._piece_ended, request, buffer, answer)
            try:
                return answer.begin_piece(value, num_bytes, is_compressed=is_compressed, ended=ended)
            except WireError as error:
                raise _about(request, error) from error

    def _piece_ended(
        self,
        request: StepRequest,
        buffer: PassBuffer | IteratorBuffer,
        answer: InFlightRange,
        piece: Piece,
        is_complete: bool,
    ) -> None:
        is_written = False
        try:
            if is_complete:
                # Without the lock, so that other hosts' answers arrive and released slots are used meanwhile.
                piece.decompress()
                is_written = True
        except WireError as error:
            raise _about(request, error) from error
        finally:
            with self._lock:
                buffer.end_piece(answer, piece, is_complete=is_written)
                if answer.is_dropped:
                    self._send_requests()
                elif answer.is_complete:
                    self._complete(buffer, request)

    def _receive_frame(
        self, buffer: PassBuffer | IteratorBuffer, request: StepRequest, kind: int, value: int, payload: memoryview
    ) -> None:
        if kind == FrameKind.FAILURE:
            self._request_failed(buffer, request, parse_failure(payload))
        elif kind == FrameKind.ENDED:
            self._skip(buffer, request, value - 1 if value else None)
        elif kind == FrameKind.HEADER:
            self._take_header(buffer, request, StepRangeHeader.decode(payload))
            if buffer.in_flight[request.request_id].is_complete:  # it has no bytes
                self._complete(buffer, request)
        else:
            raise WireError(f"a frame of kind {kind}")

    def _take_header(self, buffer: PassBuffer | IteratorBuffer, request: StepRequest, header: StepRangeHeader) -> None:
        before = buffer.largest
        buffer.take_header(request.request_id, header)
        if buffer.largest != before:
            self._largest[buffer.loader] = max(self._largest.get(buffer.loader, 0), buffer.largest)
            self._scheduler.set_window(buffer.pass_id, buffer.window, buffer.range_length)
            self._send_requests()

    def _complete(self, buffer: PassBuffer | IteratorBuffer, request: StepRequest) -> None:
        now = time.monotonic()
        answer = buffer.accept(request.request_id, now - request.sent_at)
        superfluous = self._scheduler.completed(request.request_id, now, answer.header.produce_s)
        if isinstance(buffer, PassBuffer):
            self._verifier.offer(buffer, answer, request.host, self._scheduler.up(), now)
            error = self._equal_shards.offer(buffer, answer)
            if error is not None:
                self._fail(buffer.pass_id, error)
        self._transfers[request.host] += answer.transfer_s
        self._cancel(superfluous or ())
        if answer.step_range != request.step_range:  # its shard has ended
            self._move_stop(buffer)
        self._scheduler.set_window(buffer.pass_id, buffer.window, buffer.range_length)
        self._deliver(buffer)
        self._send_requests()

    def _skip(self, buffer: PassBuffer | IteratorBuffer, request: StepRequest, end: int | None) -> None:
        """Continue without steps whose shard has ended, or without a step that only probed its shard."""
        self._cancel(self._scheduler.completed(request.request_id, time.monotonic()) or ())
        buffer.skip(request.request_id, end)
        self._move_stop(buffer)
        self._deliver(buffer)
        self._scheduler.advance(buffer.pass_id, buffer.take(0))
        self._send_requests()

    def _move_stop(self, buffer: PassBuffer | IteratorBuffer) -> None:
        """Move the end of the pass, now that the end of a shard is known."""
        self._cancel(self._scheduler.set_stop(buffer.pass_id, buffer.stop_step))

    def _request_failed(self, buffer: PassBuffer | IteratorBuffer, request: StepRequest, failure: Failure) -> None:
        link = self._links[request.host]
        if failure.error == "NotOpen" and isinstance(buffer, IteratorBuffer):
            if not self._openings.is_wanted(buffer.request.opening):  # the end of the iterator is still on its way
                self._scheduler.failed(request.request_id, time.monotonic(), retry=Retry.ELSEWHERE)
                buffer.drop(request.request_id)
                return
            link.reopen_source(buffer.request.opening)
        if request.step_range.num_steps == 1:
            steps = f"batch of step {request.first_step}"
        else:
            steps = f"batches of steps {request.first_step} to {request.step_range.stop - 1}"
        place = ", ".join(filter(None, (f"data host {link.name}", failure.where, steps)))
        is_lost = failure.error in LOST_WORKERS
        reason = f"{failure.text} on data host {link.name}" if is_lost else failure.at(place)
        retry = RETRIES.get(failure.error, Retry.NEVER)
        is_missing = failure.error == "NotOpen" and isinstance(buffer, PassBuffer)
        if is_missing and isinstance(buffer, PassBuffer) and not link.wants(buffer.spec.opening):
            retry, reason = Retry.NEVER, _replaced(buffer.name)
        decision = self._scheduler.failed(request.request_id, time.monotonic(), retry=retry, reason=reason)
        buffer.drop(request.request_id)
        if decision.is_fatal:
            self._cancel(decision.cancel)
            self._fail(
                buffer.pass_id, explain(failure.error, request.first_step, decision, buffer.keys(request.first_step))
            )
            return
        if is_missing:
            link.reopen()
        # A failed range is requested again step by step, and the step that fails again is reported.
        if request.step_range.num_steps == 1:
            logger.warning("Requesting a batch again that failed on %s: %s", place, first_line(failure.text))
        self._send_requests()

    # Requests to data hosts

    def _send_requests(self) -> None:
        fetches: dict[str, list[bytes]] = {}
        with self._lock:
            now = time.monotonic()
            self._request_second_build(now, fetches, is_urgent=True)
            for request in self._scheduler.next_requests(now):
                encoded_spec = self._buffers[request.pass_id].reserve(request.request_id, request.step_range)
                if encoded_spec is None:  # all slots are taken; releasing one calls this method again
                    self._scheduler.withdraw(request)
                    continue
                fetches.setdefault(request.host, []).append(
                    frame(request.request_id, FrameKind.FETCH, len(encoded_spec)) + encoded_spec
                )
            self._request_second_build(now, fetches, is_urgent=False)
            for host, messages in fetches.items():
                self._links[host].send(b"".join(messages))

    def _cancel(self, requests: tuple[StepRequest, ...]) -> None:
        for request in requests:
            self._buffers[request.pass_id].drop(request.request_id)
            self._links[request.host].send(frame(request.request_id, FrameKind.CANCEL))

    # Second builds of batches, which are compared with the first ones

    def _request_second_build(self, now: float, fetches: dict[str, list[bytes]], *, is_urgent: bool) -> None:
        check = self._verifier.check
        if check is not None and self._verifier.is_late(now):
            self._give_up_check(check, "it takes too long")
        elif check is not None and self._verifier.is_waiting(now, is_urgent=is_urgent):
            lent = self._scheduler.lend_credit(check.candidates, now)
            if lent is not None:
                request_id, host = lent
                encoded_spec = self._verifier.request(check, request_id, host)
                message = frame(request_id, FrameKind.FETCH, len(encoded_spec)) + encoded_spec
                fetches.setdefault(host, []).append(message)

    def _give_up_check(self, check: BatchCheck, why: str) -> None:
        if check.request_id is not None:
            self._scheduler.return_credit(check.second_host)
            self._links[check.second_host].send(frame(check.request_id, FrameKind.CANCEL))
        self._verifier.give_up(check, why)
        self._deliver_all()

    def _receive_second_build(self, check: BatchCheck, kind: int, value: int, payload: memoryview) -> None:
        if kind == FrameKind.HEADER:
            check.take_header(StepRangeHeader.decode(payload))
        elif kind == FrameKind.FAILURE:
            failure = parse_failure(payload)
            self._scheduler.return_credit(check.second_host)
            self._verifier.failed(check, failure)
            self._deliver_all()
        elif kind == FrameKind.ENDED and check.is_shard:
            self._scheduler.return_credit(check.second_host)
            self._end_check(check, MISSING)
        else:
            raise WireError(f"a frame of kind {kind}")
        self._compare_if_complete(check)

    def _second_piece_ended(self, check: BatchCheck, piece: Piece, is_complete: bool) -> None:
        if is_complete:
            piece.decompress()
            with self._lock:
                if self._verifier.check is check:
                    check.second.end_piece(piece)
                    self._compare_if_complete(check)

    def _compare_if_complete(self, check: BatchCheck) -> None:
        if check.second.is_complete:
            self._scheduler.return_credit(check.second_host)
            threading.Thread(target=self._compare, args=(check,), name="compare", daemon=True).start()
        self._send_requests()

    def _compare(self, check: BatchCheck) -> None:
        try:
            found = check.difference()
        except WireError as error:
            self._fail(None, error)
            return
        with self._lock:
            self._end_check(check, found)

    def _end_check(self, check: BatchCheck, found: BatchDifference | None) -> None:
        error = self._verifier.compared(check, found)
        if error is not None:
            self._fail(None, error)
        self._deliver_all()


def _about(request: StepRequest, error: WireError) -> WireError:
    return WireError(f"the answer for step {request.first_step}: {error}")


def _replaced(name: str) -> str:
    return (
        f"The data hosts no longer have this {name}: they keep the loaders of the newest two calls of a hook. Use the "
        "loaders that the last call returned, or call trainer.datamodule.*_dataloader() again."
    )


def main() -> None:
    """Run the feeder. The arguments are the descriptors of the connection and of the pipe of released slots."""
    trainer = connection_to_parent()
    settings = trainer.receive()
    if isinstance(settings, kinds.Configure):
        if settings.is_quiet:
            logging.getLogger("lightning_sm").setLevel(logging.ERROR)
        Feeder(trainer, int(sys.argv[2]), settings).run()


if __name__ == "__main__":
    run_and_exit(main)
