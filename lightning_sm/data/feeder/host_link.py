"""The connection of one trainer rank to one data host: stays in touch, opens loaders, sends requests, hears answers."""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import grpc

from lightning_sm.data.feeder.agreement import Problem
from lightning_sm.data.protocol import calls, grpc_transport
from lightning_sm.data.protocol.frames import FrameKind, frame, frames
from lightning_sm.data.protocol.tls import closed_hint, fatal_hint
from lightning_sm.data.settings import Credentials
from lightning_sm.errors import WireError

logger = logging.getLogger(__name__)

# A host that does not answer two beats is not asked any more; its requests go to others. One late answer is load.
_BEAT_PERIOD_S, _BEAT_TIMEOUT_S, _MAX_SILENT = 0.5, 1.0, 2
# A host on which the user's code failed is asked again, as its disk may be mended; but setup() may cost much.
_PROBLEM_PERIOD_S = 10.0
# The server answers "not yet" after 5 s.
_CALL_TIMEOUT_S = 15.0
_FINISH_TIMEOUT_S = 3.0

# Answers that no further try can change.
_FATAL = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT)


class Owner(Protocol):
    """Who hears of a link's events; called from the link's threads."""

    def link_up(self, link: HostLink) -> None:
        """The host is there and has opened everything that was asked for."""

    def link_lost(self, link: HostLink, why: str, *, is_silent: bool) -> None:
        """The host does not answer (silent), or cannot be reached."""

    def link_opened(self, link: HostLink, opening: str, reply: dict[str, Any]) -> str:
        """The host has opened loaders, or failed to; returns why it cannot be used, or nothing."""

    def link_refused(self, link: HostLink, problem: Problem) -> None:
        """The host will never do what is asked."""

    def link_frame(self, link: HostLink, request_id: int, kind: int, value: int, payload: memoryview) -> None:
        """Part of an answer came."""


class HostLink:
    """A data host, as seen from a trainer rank.

    Args:
        address: Where it listens.
        credentials: Job, token, TLS.
        client: Facts about this rank that go with every beat.
        owner: Who hears of events.
    """

    def __init__(self, address: str, credentials: Credentials, client: Mapping[str, Any], owner: Owner) -> None:
        self.address = address
        self.state: dict[str, Any] = {}
        self.why = "not reached yet"
        self._client = dict(client)
        self._owner = owner
        self._metadata = grpc_transport.metadata(credentials)
        self._channel = grpc_transport.open_channel(address, credentials)
        self._wanted: dict[str, dict[str, Any]] = {}
        self._opened: set[str] = set()
        self._is_stale = False
        self._num_losses = self._num_silent = 0
        self._period_s = _BEAT_PERIOD_S
        self._lock = threading.Lock()
        self._requests: queue.SimpleQueue[bytes | None] | None = None
        self._call: Any = None
        self._is_up = False
        # Held while the owner is told that the host comes or goes, so that it hears of both in this order.
        self._turning = threading.RLock()
        self._nudge = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._stay_in_touch, name=f"link {address}", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        """Name of the host, with its address."""
        name = self.state.get("name")
        return f"{name} ({self.address})" if name and name != self.address else self.address

    def want(self, opening: str, request: dict[str, Any]) -> None:
        """Ask for loaders to be opened, now and whenever the host comes back.

        Args:
            opening: Name of the opening.
            request: What to open.
        """
        with self._lock:
            # A new run of the Trainer makes the loaders of the one before useless.
            self._wanted = {name: old for name, old in self._wanted.items() if old["run"] == request["run"]}
            self._opened &= set(self._wanted)
            self._wanted[opening] = request
        self._nudge.set()

    def send(self, message: bytes) -> None:
        """Send frames; if the stream is broken they are lost, as ``link_lost`` tells.

        Args:
            message: The frames.
        """
        requests = self._requests
        if requests is not None:
            requests.put(message)

    def reopen(self) -> None:
        """Note that the host lacks what it had opened: another process may have taken its place unnoticed."""
        self._is_stale = True
        self._nudge.set()

    def call(self, name: str, facts: Mapping[str, Any], timeout_s: float) -> bytes:
        """Make a short call.

        Args:
            name: Method.
            facts: JSON values.
            timeout_s: Seconds to wait.

        Raises:
            grpc.RpcError: It failed.
        """
        method = self._channel.unary_unary(grpc_transport.method(name))
        answer: bytes = method(json.dumps(facts).encode(), metadata=self._metadata, timeout=timeout_s)
        return answer

    def listing(self, request: Mapping[str, Any]) -> bytes:
        """Fetch the order that a sampler of the user's gives, as JSON line and raw int64.

        Args:
            request: Which sampler, seed, epoch and pass.

        Raises:
            grpc.RpcError: The call failed.
        """
        method = self._channel.stream_stream(grpc_transport.method("List"))
        answer = method(iter([json.dumps(request).encode()]), metadata=self._metadata, timeout=60 * _CALL_TIMEOUT_S)
        return b"".join(answer)

    def finish(self, outcome: str) -> None:
        """Tell the host that this rank needs it no longer; it may be gone already.

        Args:
            outcome: How the training ended.
        """
        self._closed.set()
        self._nudge.set()
        try:
            self.call("Finish", {**self._client, "outcome": outcome}, _FINISH_TIMEOUT_S)
        except grpc.RpcError as error:
            logger.debug("Data host %s was not told that the training ended: %s", self.name, _text(error))
        self._break_stream()
        self._channel.close()

    def _stay_in_touch(self) -> None:
        while not self._closed.is_set():
            began = time.monotonic()
            try:
                self.state = calls.heartbeat_reply(self.call("Heartbeat", self._client, _BEAT_TIMEOUT_S))
                self._num_silent = 0
                self._open_wanted()
            except grpc.RpcError as error:
                self._failed(error)
            except Exception as error:  # a thread must not die in silence: the training would wait for ever
                if self._closed.is_set():  # gRPC refuses calls on a channel that was closed meanwhile
                    return
                if not isinstance(error, WireError):
                    logger.exception("Data host %s", self.name)
                self._owner.link_refused(self, Problem("WireError", f"data host {self.name}: {error}"))
                return
            self._nudge.wait(max(0.0, began + self._period_s - time.monotonic()))
            self._nudge.clear()

    def _failed(self, error: Any) -> None:
        code, details = error.code(), str(error.details())
        hint = "" if self.state else fatal_hint(details)
        if code in _FATAL or hint:
            self._closed.set()
            self._owner.link_refused(self, Problem("DataHostMismatchError", f"{details}{hint}"))
            return
        is_silent = code is grpc.StatusCode.DEADLINE_EXCEEDED
        self._num_silent += is_silent
        if not self._closed.is_set() and not (self._is_up and is_silent and self._num_silent < _MAX_SILENT):
            self.lose(_text(error) + ("" if self.state else closed_hint(details)), is_silent=is_silent)

    def _open_wanted(self) -> None:
        """Open what was asked for and is not open yet; the host can be used when nothing is missing."""
        if self._is_stale:
            self._is_stale = False
            self.lose("it does not have the loaders any more", is_silent=False)
        num_losses = self._num_losses
        for opening, request in list(self._wanted.items()):
            if opening in self._opened:
                continue
            reply = calls.open_reply(self.call("Open", request, _CALL_TIMEOUT_S))
            if reply.get("state") == "opening":
                self.why = f"{request['loaders'] or 'setup'} is still being opened"
                self._nudge.set()
                return
            self.why = self._owner.link_opened(self, opening, reply)
            self._period_s = _PROBLEM_PERIOD_S if self.why else _BEAT_PERIOD_S
            if self.why:
                return
            with self._lock:
                if self._num_losses != num_losses:
                    return
                self._opened.add(opening)
        if not self._is_up and self._wanted:
            self._rise()

    def _rise(self) -> None:
        call = self._start_stream()
        with self._turning:
            if call is self._call:  # else it is broken already
                self._is_up, self.why = True, ""
                self._owner.link_up(self)

    def _start_stream(self) -> Any:
        requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        method = self._channel.stream_stream(grpc_transport.method("Fetch"))
        call = method(iter(requests.get, None), metadata=self._metadata)
        with self._lock:
            self._requests, self._call = requests, call
        threading.Thread(target=self._hear, args=(call,), name=f"stream {self.address}", daemon=True).start()
        return call

    def _hear(self, call: Iterator[bytes]) -> None:
        why = "the data host closed the stream"
        try:
            for message in call:
                for request_id, kind, value, payload in frames(message):
                    self._owner.link_frame(self, request_id, kind, value, payload)
        except grpc.RpcError as error:
            why = _text(error)
            if "larger than max" in why:  # it would come again and again
                self._owner.link_refused(self, Problem("WireError", f"data host {self.name}: {why}"))
        except Exception as error:  # a thread must not die in silence: the training would wait for ever
            if not isinstance(error, WireError):
                logger.exception("Data host %s", self.name)
            self._owner.link_refused(self, Problem("WireError", f"data host {self.name}: {error}"))
        with self._turning:
            if call is self._call and not self._closed.is_set():
                self.lose(why, is_silent=False)

    def lose(self, why: str, *, is_silent: bool) -> None:
        """Take the host for gone until it has answered again and has opened everything anew.

        Args:
            why: What happened.
            is_silent: Whether it did not answer, rather than could not be reached.
        """
        with self._turning:
            self._break_stream()
            with self._lock:
                was_up, self._is_up, self.why = self._is_up, False, why
                # Another process may be there next time, which has nothing open.
                self._opened.clear()
                self._num_losses += 1
            if was_up:
                logger.warning("Data host %s: %s", self.name, why)
            self._owner.link_lost(self, why, is_silent=is_silent)

    def _break_stream(self) -> None:
        with self._lock:
            requests, self._requests = self._requests, None
            call, self._call = self._call, None
        if requests is not None:
            requests.put(None)
        if call is not None:
            call.cancel()


def fetch(request_id: int, spec: bytes) -> bytes:
    """Return the message that asks for a batch.

    Args:
        request_id: Number of the request.
        spec: The encoded ``BatchSpec``.
    """
    return frame(request_id, FrameKind.FETCH, len(spec)) + spec


def _text(error: Any) -> str:
    code = error.code()
    return f"{code.name.lower().replace('_', ' ')} ({error.details()})"
