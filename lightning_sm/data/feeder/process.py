"""The feeder process of one trainer rank: asks data hosts for batches and fills the ring of the training process.

It has an interpreter of its own, so that receiving never waits for the training loop and never slows it down.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from lightning_sm._log import show_log_lines
from lightning_sm.data.feeder.agreement import Openings, Problem
from lightning_sm.data.feeder.host_link import HostLink, fetch
from lightning_sm.data.feeder.pass_buffer import Intake, StepPlan
from lightning_sm.data.feeder.sampler_orders import (
    Listing,
    Listings,
    lengths,
    listing_request,
    needs_listing,
    step_plan,
)
from lightning_sm.data.feeder.scheduler import Request, Retry, Scheduler
from lightning_sm.data.feeder.status import RETRIES, explain, host_state, pass_state
from lightning_sm.data.ipc.messages import RELEASE, Message, MessageSocket, Released
from lightning_sm.data.ipc.processes import exit_when_a_thread_fails, run_and_exit
from lightning_sm.data.ipc.ring import Ring
from lightning_sm.data.plan.shards import ShardSteps
from lightning_sm.data.protocol.frames import FrameKind, frame, parse_failure, parse_header
from lightning_sm.data.protocol.spec import BatchSpec
from lightning_sm.data.settings import Credentials
from lightning_sm.errors import BatchTooLargeError, DataServiceError, WireError

logger = logging.getLogger(__name__)

# One batch more than its workers keeps a host busy while an answer travels.
_EXTRA_CREDITS = 1


class Feeder:
    """Everything between the training process and the data hosts.

    Args:
        trainer: Connection to the training process.
        releases: Pipe on which the training process gives slots back.
        settings: Addresses, credentials, client facts, hedging.
    """

    def __init__(self, trainer: MessageSocket, releases: int, settings: dict[str, Any]) -> None:
        self._trainer = trainer
        self._releases = releases
        self._num_ranks = int(settings["client"]["world_size"])
        self._lock = threading.RLock()
        self._scheduler = Scheduler(hedge_factor=settings["hedge_factor"])
        self._rings: dict[int, tuple[Ring, list[int]]] = {}
        self._intakes: dict[int, Intake] = {}
        self._requests: dict[int, Request] = {}
        self._ended: set[int] = set()
        self._openings = Openings(len(settings["addresses"]), self._answer_opening)
        self._is_running = True
        credentials = Credentials(**settings["credentials"])
        self._links = {
            address: HostLink(address, credentials, settings["client"], self) for address in settings["addresses"]
        }
        self._listings = Listings(self._links, lambda error: self._fail(None, type(error).__name__, str(error)))

    def run(self) -> None:
        """Serve the training process until it closes the connection, or is gone."""
        with selectors.DefaultSelector() as selector:
            self._obey(self._trainer.buffered())
            selector.register(self._trainer, selectors.EVENT_READ, self._hear)
            selector.register(self._releases, selectors.EVENT_READ, self._take_releases)
            # The socket alone does not tell: a child that the training process forked holds a copy of its end.
            parent = os.pidfd_open(os.getppid())
            selector.register(parent, selectors.EVENT_READ, lambda: self._finish("the training process is gone"))
            while self._is_running:
                with self._lock:
                    wakeup = self._scheduler.next_wakeup(time.monotonic())
                wait = 0.5 if wakeup is None else min(0.5, max(0.0, wakeup - time.monotonic()))
                for key, _ in selector.select(wait):
                    key.data()
                with self._lock:
                    problem = self._openings.tick(time.monotonic())
                if problem is not None:
                    self._fail(None, problem.error, problem.text)
                self._ask()
            os.close(parent)

    # What the training process says

    def _hear(self) -> None:
        self._obey(self._trainer.pending())
        if self._trainer.is_at_end:
            self._finish("the training process is gone")

    def _obey(self, messages: list[Message]) -> None:
        for message in messages:
            if message.kind == "open":
                self._open(message.facts)
            elif message.kind == "ring":
                ring = Ring(message.fds[0], message.facts["num_slots"], message.facts["slot_bytes"])
                self._rings[message.facts["ring"]] = (ring, list(range(ring.num_slots)))
            elif message.kind == "start":
                self._start(message)
            elif message.kind == "measure":
                self._measure(message.facts)
            elif message.kind == "state":
                self._trainer.send("state", **self._state())
            elif message.kind == "finish":
                self._finish(message.facts["outcome"])

    def _finish(self, outcome: str) -> None:
        if not self._is_running:
            return
        self._is_running = False
        self._listings.close()
        with ThreadPoolExecutor(max(1, len(self._links))) as pool:
            list(pool.map(lambda link: link.finish(outcome), self._links.values()))

    def _open(self, request: dict[str, Any]) -> None:
        with self._lock:
            self._openings.ask(request["opening"])
        for link in self._links.values():
            link.want(request["opening"], request)

    def _answer_opening(self, opening: str, reply: dict[str, Any]) -> None:
        self._tell("opened", opening=opening, **reply)

    def _start(self, message: Message) -> None:
        facts = message.facts
        ring, free = self._rings[facts["ring"]]
        template = BatchSpec(keys=np.empty(0, np.int64), step=0, **facts["template"])
        intake = Intake(
            pass_id=facts["pass_id"],
            ring=ring,
            ring_number=facts["ring"],
            free=free,
            template=template,
            plan=None,
            next_step=facts["first_step"],
            stop_step=facts["stop_step"],
            window_batches=facts["window_batches"],
            window_bytes=facts["window_bytes"],
        )
        with self._lock:
            if intake.pass_id in self._ended:
                self._ended.remove(intake.pass_id)
                return
            self._intakes[intake.pass_id] = intake
        self._with_listing(
            facts,
            needs_listing(facts["order"]),
            lambda listing: self._planned(intake, step_plan(facts, listing)),
            lambda error: self._fail(intake.pass_id, type(error).__name__, str(error)),
        )

    def _with_listing(
        self,
        facts: dict[str, Any],
        is_needed: bool,
        use: Callable[[Listing | None], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Go on with a pass; where code of the user's decides, once the data hosts have run it."""

        def listed(listing: Future[Listing] | None) -> None:
            if listing is not None and listing.cancelled():
                return
            try:
                use(None if listing is None else listing.result())
            except (DataServiceError, ValueError) as error:
                failed(error)

        if is_needed:
            self._listings.get(listing_request(facts)).add_done_callback(listed)
        else:
            listed(None)

    def _measure(self, facts: dict[str, Any]) -> None:
        self._with_listing(
            facts,
            facts["order"] == "shards" or needs_listing(facts["order"]),
            lambda listing: self._tell("length", number=facts["number"], **lengths(facts, listing)),
            lambda error: self._tell("length", number=facts["number"], error=type(error).__name__, text=str(error)),
        )

    def _planned(self, intake: Intake, plan: StepPlan) -> None:
        with self._lock:
            if intake.pass_id not in self._intakes:
                return
            intake.begin_plan(plan)
            shard_of = plan.shard if isinstance(plan, ShardSteps) else None
            self._scheduler.open_pass(intake.pass_id, intake.next_step, intake.stop_step, intake.window, shard_of)
            self._end_if_done(intake)
        self._ask()

    def _close(self, pass_id: int) -> None:
        with self._lock:
            intake = self._intakes.pop(pass_id, None)
            if intake is None:  # the end came before the beginning, by another way
                self._ended.add(pass_id)
            self._cancel(self._scheduler.close_pass(pass_id), intake)
            if intake is not None:
                intake.free.extend(arrival.slot for arrival in intake.ready.values())
        self._ask()

    def _take_releases(self) -> None:
        data = os.read(self._releases, RELEASE.size << 10)
        with self._lock:
            for kind, number, value in RELEASE.iter_unpack(data):
                if kind == Released.SLOT:
                    self._rings[number][1].append(value)
                elif kind == Released.PASS:
                    self._close(number)
                elif number in self._intakes:
                    self._scheduler.advance(number, self._intakes[number].take(value))

    # What links say

    def link_up(self, link: HostLink) -> None:
        """Ask the host for batches from now on."""
        workers = max(1, int(link.state["workers"]))
        num_credits = -(-workers // self._num_ranks) + _EXTRA_CREDITS
        with self._lock:
            self._scheduler.host_up(link.address, num_credits)
        self._ask()

    def link_lost(self, link: HostLink, why: str, *, is_silent: bool) -> None:
        """Ask others for what was asked of this host."""
        leave = self._scheduler.host_suspect if is_silent else self._scheduler.host_down
        with self._lock:
            self._cancel(leave(link.address), None, tell=False)
        self._ask()

    def link_opened(self, link: HostLink, opening: str, reply: dict[str, Any]) -> str:
        """Compare what the hosts serve, and tell the training process."""
        with self._lock:
            problem = self._openings.opened(opening, link.name, reply, time.monotonic())
        if problem is not None:
            self._fail(None, problem.error, problem.text)
        if "error" not in reply:
            return ""
        # The others go on without it.
        logger.warning("Data host %s cannot be used: it failed in %s:\n%s", link.name, reply["where"], reply["text"])
        return f"it failed in {reply['where']}"

    def link_refused(self, link: HostLink, problem: Problem) -> None:
        """Give up: the host is not one of this job."""
        self._fail(None, problem.error, f"{problem.text} (asked at {link.address})")

    def link_frame(self, link: HostLink, request_id: int, kind: int, value: int, payload: memoryview) -> None:
        """Take part of an answer."""
        with self._lock:
            request = self._requests.get(request_id)
            intake = None if request is None else self._intakes.get(request.pass_id)
            if request is None or intake is None or request.host != link.address:
                return
            try:
                self._take(intake, request, kind, value, payload)
            except BatchTooLargeError as error:
                self._fail(intake.pass_id, "BatchTooLargeError", str(error))
            except WireError as error:
                raise WireError(f"the answer for step {request.step}: {error}") from error

    def _take(self, intake: Intake, request: Request, kind: int, value: int, payload: memoryview) -> None:
        if kind == FrameKind.FAILURE:
            self._take_failure(intake, request, parse_failure(payload))
            return
        if kind == FrameKind.HEADER:
            num_bytes, queue_s, produce_s, header = parse_header(payload)
            intake.take_header(request.request_id, num_bytes, (queue_s, produce_s), header)
        elif kind == FrameKind.DATA:
            intake.take_data(request.request_id, value, payload)
        elif kind == FrameKind.COMPRESSED:
            intake.take_compressed(request.request_id, value, payload)
        else:
            raise WireError(f"a frame of kind {kind}")
        if intake.arrivals[request.request_id].is_complete:
            self._complete(intake, request)

    def _complete(self, intake: Intake, request: Request) -> None:
        completion = self._scheduler.completed(request.request_id, time.monotonic())
        del self._requests[request.request_id]
        if not completion.is_accepted:
            intake.drop(request.request_id)
            return
        intake.accept(request.request_id)
        self._cancel(completion.cancel, intake)
        self._scheduler.set_window(intake.pass_id, intake.window)
        self._deliver(intake)

    def _pass_over(self, intake: Intake, request: Request, facts: dict[str, str]) -> None:
        """Go on without a step: its shard has ended before, or was only asked how far it goes."""
        completion = self._scheduler.completed(request.request_id, time.monotonic())
        del self._requests[request.request_id]
        self._cancel(completion.cancel, intake)
        intake.pass_over(request.request_id, int(facts["text"]) if facts["text"].isdecimal() else None)
        if intake.stop_step is not None:
            self._cancel(self._scheduler.set_stop(intake.pass_id, intake.stop_step), intake)
        self._deliver(intake)
        self._scheduler.advance(intake.pass_id, intake.take(0))
        self._ask()

    def _deliver(self, intake: Intake) -> None:
        for arrival in intake.deliverable():
            self._tell("batch", arrival.header, ready=len(intake.ready), **intake.facts(arrival))
        self._end_if_done(intake)
        self._ask()

    def _end_if_done(self, intake: Intake) -> None:
        if intake.stop_step is not None and intake.next_step >= intake.stop_step:
            self._tell("end", pass_id=intake.pass_id, num_batches=intake.num_batches)

    def _take_failure(self, intake: Intake, request: Request, facts: dict[str, str]) -> None:
        if facts["error"] == "ShardEnded":
            self._pass_over(intake, request, facts)
            return
        host = self._links[request.host].name
        retry = RETRIES.get(facts["error"], Retry.NEVER)
        reason = f"{facts['where']}\n{facts['text']}" if facts["where"] else facts["text"]
        decision = self._scheduler.failed(request.request_id, time.monotonic(), retry=retry, reason=reason)
        self._requests.pop(request.request_id, None)
        intake.drop(request.request_id)
        if not decision.is_fatal:
            if facts["error"] == "NotOpen":
                self._links[request.host].reopen()
            logger.warning("Data host %s could not make the batch of step %d: %s", host, request.step, reason)
            self._ask()
            return
        self._cancel(decision.cancel, intake)
        self._fail(intake.pass_id, *explain(facts["error"], request.step, decision, intake.keys(request.step)))

    # What is asked for

    def _ask(self) -> None:
        fetches: dict[str, list[bytes]] = {}
        with self._lock:
            for request in self._scheduler.next_requests(time.monotonic()):
                intake = self._intakes[request.pass_id]
                self._requests[request.request_id] = request
                if intake.begin(request.request_id, request.step):
                    message = fetch(request.request_id, intake.spec(request.step))
                    fetches.setdefault(request.host, []).append(message)
                else:  # only a hedge can find all slots taken
                    del self._requests[request.request_id]
                    self._scheduler.failed(request.request_id, time.monotonic(), retry=Retry.ELSEWHERE)
            for host, messages in fetches.items():
                self._links[host].send(b"".join(messages))

    def _cancel(self, requests: tuple[Request, ...], intake: Intake | None, *, tell: bool = True) -> None:
        for request in requests:
            self._requests.pop(request.request_id, None)
            owner = intake or self._intakes.get(request.pass_id)
            if owner is not None:
                owner.drop(request.request_id)
            if tell:
                self._links[request.host].send(frame(request.request_id, FrameKind.CANCEL))

    def _fail(self, pass_id: int | None, error: str, text: str) -> None:
        self._tell("error", pass_id=pass_id, error=error, text=text)

    def _tell(self, kind: str, payload: bytes = b"", **facts: Any) -> None:
        try:
            self._trainer.send(kind, payload, **facts)
        except OSError:
            logger.debug("The training process is gone; this one ends with it.")

    def _state(self) -> dict[str, Any]:
        with self._lock:
            snapshot = self._scheduler.snapshot()
        now = time.monotonic()
        known = {status.host: status for status in snapshot.hosts}
        hosts = [host_state(link, known.get(address)) for address, link in self._links.items()]
        passes = [pass_state(status, now) for status in snapshot.passes]
        return {"hosts": hosts, "passes": passes, "duplicates": snapshot.num_duplicates}


def main() -> None:
    """Run the feeder; the arguments are the descriptors of the connection and of the pipe of released slots."""
    # Ctrl-C and SIGTERM go to the whole process group; the training process decides what they mean, and still needs
    # batches until it has. This process ends with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    exit_when_a_thread_fails()
    show_log_lines()
    trainer = MessageSocket(socket.socket(fileno=int(sys.argv[1])))
    message = trainer.receive()
    if message is not None:
        Feeder(trainer, int(sys.argv[2]), message.facts["settings"]).run()


if __name__ == "__main__":
    run_and_exit(main)
