"""The connection from one trainer rank to one data host: heartbeats, openings, requests and answers."""

from __future__ import annotations

import logging
import mmap
import random
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from lightning_sm.data.feeder.scheduler import Liveness
from lightning_sm.data.protocol.calls import HeartbeatRequest, HostReport
from lightning_sm.data.protocol.frames import FrameReader
from lightning_sm.data.protocol.grpc_call import Call
from lightning_sm.data.protocol.grpc_client import GrpcChannel
from lightning_sm.data.protocol.grpc_status import CallError, CallStatus
from lightning_sm.data.protocol.message_codec import decode
from lightning_sm.data.protocol.openings import Opening, OpeningsReply, OpeningsRequest
from lightning_sm.data.protocol.probe import diagnose
from lightning_sm.data.protocol.spec import CHUNK_BYTES
from lightning_sm.data.protocol.tls import certificate_hint
from lightning_sm.data.settings import Credentials
from lightning_sm.errors import DataHostMismatchError, DataServiceError, WireError

if TYPE_CHECKING:
    from lightning_sm.data.feeder.process import Feeder

logger = logging.getLogger(__name__)

_HEARTBEAT_PERIOD_S = 0.5
# Limit on the heartbeats that a data host gets from all ranks together. At this rate, they take 10% of a core in the
# host's server process (benchmarks/many_feeders.py).
_MAX_HEARTBEATS_PER_S = 128
_HEARTBEAT_TIMEOUT_S = 1.0
# Move a host's requests to other hosts after this many unanswered heartbeats. A single late answer may be due to load.
_MAX_SILENT = 2
# Retry a host on which the user's code failed, because the cause may be gone, but not often: setup() may be slow.
_FAILED_PERIOD_S = 10.0
# Longer than the 5 s after which the server answers "not yet".
_CALL_TIMEOUT_S = 15.0
_FINISH_TIMEOUT_S = 3.0
_SNAPSHOT_TIMEOUT_S = 900.0
# Log the transfer of a snapshot of at least this size.
_LARGE_SNAPSHOT_BYTES = 256_000_000

# Refuse a host if a probe still finds the same problem after this time. Until then, it may just be shutting down.
_CONFIRM_S = 3.0


class HostLink:
    """A data host, as seen from a trainer rank.

    Args:
        address: Address of the data host.
        credentials: Job, token, and TLS settings.
        client: This rank's heartbeat, without figures.
        owner: Feeder to notify of events, from the link's threads.

    Attributes:
        report: The last answer to a heartbeat.
        state: State of the connection: SUSPECT if the host is connected, but does not answer heartbeats.
        detail: Why the link is not UP, or what the host lacks before it can build batches, for messages.
        num_lost: How often the connection was lost.
        transfer_s: Total seconds that the host's answers were in transit; counted by the owner.
    """

    def __init__(self, address: str, credentials: Credentials, client: HeartbeatRequest, owner: Feeder) -> None:
        self.address = address
        self.report: HostReport | None = None
        self.num_lost = 0
        self.transfer_s = 0.0
        self._set_state(Liveness.DOWN, "not connected yet")
        self._client = client
        self._owner = owner
        self._credentials = credentials
        self._channel = GrpcChannel(address, credentials)
        self._openings: dict[str, Opening] = {}
        self._told: list[Opening] = []  # what the host was last asked to keep open
        self._open_sources: set[str] = set()
        self._num_silent = 0
        self._diagnosis = ""  # why the first connection fails
        self._diagnosed_at = 0.0
        self._usual_period_s = heartbeat_period_s(client.world_size)
        self._period_s = self._usual_period_s
        self._lock = threading.Lock()
        self._stream: _Stream | None = None
        # Batches use a separate connection: heartbeats must be answered even while the owner accepts no batches.
        self._stream_channel: GrpcChannel | None = None
        # Held while notifying the owner that the host is up or lost, so that notifications stay in order.
        self._notifying = threading.RLock()
        self._nudge = threading.Event()
        # Held during each heartbeat, so that none arrives after the last one: the host would take it for a new run.
        self._beating = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._stay_connected, name=f"link {address}", daemon=True).start()

    @property
    def name(self) -> str:
        """Name of the host, with its address."""
        name = self.report.host.name if self.report is not None else ""
        return f"{name} ({self.address})" if name and name != self.address else self.address

    def want_source(self, opening: Opening) -> None:
        """Open a source on the host, now and after every reconnect."""
        with self._lock:
            self._openings[opening.name] = opening
        self._nudge.set()

    def release_source(self, name: str) -> None:
        """Close a source. The host stops the source's workers unless another rank wants them."""
        with self._lock:
            self._openings.pop(name, None)
            self._open_sources.discard(name)
        self._nudge.set()

    def has_source(self, name: str) -> bool:
        """Return whether the host has workers for an opening."""
        return name in self._open_sources

    def reopen_source(self, name: str) -> None:
        """Reopen a source that the host has lost."""
        with self._lock:
            self._open_sources.discard(name)
        self._nudge.set()

    def send(self, message: bytes) -> None:
        """Send frames. If the stream is broken, the frames are lost, and ``link_lost`` notifies the owner."""
        stream = self._stream
        if stream is not None:
            stream.call.send(message)

    def finish(self) -> None:
        """Tell the host that training has ended, and close the connection."""
        self._closed.set()
        self._nudge.set()
        with self._beating:
            pass
        try:
            self._channel.unary("Heartbeat", replace(self._client, is_last=True).encode(), _FINISH_TIMEOUT_S)
        except CallError as error:
            logger.debug("Could not notify data host %s that the training ended: %s", self.name, error)
        self._break_stream()
        self._channel.close()

    def _set_state(self, state: Liveness, detail: str) -> None:
        self.state = state
        self.detail = detail

    # The connection

    def _stay_connected(self) -> None:
        while not self._closed.is_set():
            began = time.monotonic()
            try:
                request = replace(self._client, figures=self._owner.figures)
                with self._beating:
                    if self._closed.is_set():
                        return
                    answer = self._channel.unary("Heartbeat", request.encode(), _HEARTBEAT_TIMEOUT_S)
                    self.report = HostReport.parse(answer)
                self._num_silent = 0
                self._come_up()
                self._open_wanted_sources()
            except CallError as error:
                self._call_failed(error)
            except Exception as error:  # noqa: BLE001  # _refuse_for reports it
                self._refuse_for(error)
                return
            period_s = self._period_s * random.uniform(0.8, 1.2)  # noqa: S311  # spread the ranks' calls
            self._nudge.wait(max(0.0, began + period_s - time.monotonic()))
            self._nudge.clear()

    def _call_failed(self, error: CallError) -> None:
        was_reached = self.report is not None
        hint = "" if was_reached else certificate_hint(error.__cause__)
        if error.is_final or hint:
            self._closed.set()
            self._refuse(DataHostMismatchError(f"{error.details}{hint} (data host at {self.address})"))
            return
        is_silent = error.code is CallStatus.DEADLINE_EXCEEDED
        self._num_silent += is_silent
        is_tolerated = self._stream is not None and is_silent and self._num_silent < _MAX_SILENT
        if not self._closed.is_set() and not is_tolerated:
            state = Liveness.SUSPECT if is_silent else Liveness.DOWN
            self._lose(state, str(error) + (f"; {self._diagnosis}" if self._diagnosis else ""))
            if not was_reached and not isinstance(error.__cause__, ConnectionRefusedError):
                self._diagnose()

    def _diagnose(self) -> None:
        """Refuse the host if two probes find the same reason why the first connection can never succeed."""
        reason = diagnose(self.address, self._credentials)
        if reason != self._diagnosis:
            self._diagnosis, self._diagnosed_at = reason, time.monotonic()
        elif reason and time.monotonic() - self._diagnosed_at >= _CONFIRM_S and not self._closed.is_set():
            self._closed.set()
            self._refuse(DataHostMismatchError(f"data host at {self.address}: {reason}."))

    def _open_wanted_sources(self) -> None:
        """Open the wanted sources that are not open, and tell the host which ones are no longer wanted."""
        with self._lock:
            wanted = list(self._openings.values())
            num_lost = self.num_lost
            calls_to_know = [one.name for one in wanted if one.is_call and one.name not in self._open_sources]
            if wanted == self._told and self._open_sources.issuperset(self._openings):
                return
        request = OpeningsRequest(self._client.client, wanted, calls_to_know)
        answer = self._channel.unary("OpenSources", request.encode(), _CALL_TIMEOUT_S)
        reply = decode(OpeningsReply, answer, "answer to OpenSources")
        if reply.missing:
            self._send_snapshots(reply.missing)
        with self._lock:
            if self.num_lost != num_lost:
                return
            self._told = wanted
            opened = {name for name in reply.open if name not in calls_to_know or name in reply.results}
            new = (opened & self._openings.keys()) - self._open_sources
            self._open_sources |= new
        for name in sorted(new):
            self._owner.link_opened_source(self, name, reply.results.get(name))
        for name, problem in reply.problems.items():
            self._owner.link_opened_source(self, name, problem)
        self._period_s = _FAILED_PERIOD_S if reply.problems else self._usual_period_s
        if not reply.problems and not self._open_sources.issuperset(self._openings):
            self._nudge.set()

    def _send_snapshots(self, digests: list[str]) -> None:
        """Send the sources that the host needs."""
        for digest in digests:
            snapshot = self._owner.snapshot(digest)
            if snapshot is None:
                self.detail = "the dataset it needs has been closed"
                return
            self._send_snapshot(snapshot)
        self._nudge.set()

    def _send_snapshot(self, snapshot: mmap.mmap) -> None:
        num_bytes = len(snapshot)
        self.detail = f"receiving a dataset ({num_bytes / 1e6:.0f} MB)"
        began = time.monotonic()
        pieces = (snapshot[start : start + CHUNK_BYTES] for start in range(0, num_bytes, CHUNK_BYTES))
        self._channel.stream_unary("Load", pieces, _SNAPSHOT_TIMEOUT_S)
        seconds = time.monotonic() - began
        if num_bytes >= _LARGE_SNAPSHOT_BYTES:
            logger.info(
                "Sent a pickled dataset to data host %s: %.0f MB in %.1f s. With data_service.hooks=data, data hosts "
                "create datasets themselves, and none are sent.",
                self.name,
                num_bytes / 1e6,
                seconds,
            )

    def _come_up(self) -> None:
        with self._notifying:
            is_new = self._stream is None
            if is_new:
                self._start_stream()
            self._set_state(Liveness.UP, "")
            if is_new:
                self._owner.link_up(self)

    def _lose(self, state: Liveness, detail: str) -> None:
        """Treat the host as lost until it answers again."""
        with self._notifying:
            was_up = self._break_stream()
            with self._lock:
                self._set_state(state, detail)
                # The host may have restarted, with nothing open.
                self._open_sources.clear()
                self._told = []
                self.num_lost += was_up
            if was_up:
                logger.warning("Lost connection to data host %s: %s. Reconnecting.", self.name, detail)
            self._owner.link_lost(self)

    # The stream of requests and answers

    def _start_stream(self) -> None:
        channel = self._stream_channel = GrpcChannel(self.address, self._credentials, self._channel.context)
        stream = _Stream(self, self._owner)
        stream.call = channel.open("Fetch", stream, requests=None)
        with self._lock:
            self._stream = stream

    def received(self) -> None:
        """Note that the host is alive, even if it is too busy to answer heartbeats."""
        self._num_silent = 0

    def stream_ended(self, stream: _Stream, error: Exception | None) -> None:
        """Handle the end of the stream, in the connection's thread."""
        if error is not None and not isinstance(error, CallError):
            self._refuse_for(error)
        elif error is not None and error.code is CallStatus.PERMISSION_DENIED:  # the server does not know the token
            self._call_failed(error)
        with self._notifying:
            if stream is self._stream and not self._closed.is_set():
                self._lose(Liveness.DOWN, "the data host closed the stream" if error is None else str(error))

    def _break_stream(self) -> bool:
        """Close the stream, and return whether one was open."""
        with self._lock:
            stream, self._stream = self._stream, None
        if self._stream_channel is not None:
            self._stream_channel.close()
            self._stream_channel = None
        return stream is not None

    def _refuse_for(self, error: Exception) -> None:
        """Report an exception that ends one of the link's threads, because training would otherwise wait forever."""
        if not isinstance(error, WireError):
            logger.error("Internal error in the connection to data host %s", self.name, exc_info=error)
        self._refuse(WireError(f"data host {self.name}: {error}"))

    def _refuse(self, error: DataServiceError) -> None:
        self._set_state(Liveness.DOWN, str(error))
        self._owner.fail(error)


class _Stream(FrameReader):
    """The stream of requests and answers, whose methods run in the connection's thread.

    Args:
        link: Link to the data host.
        owner: Feeder that receives the answers.
    """

    call: Call

    def __init__(self, link: HostLink, owner: Feeder) -> None:
        super().__init__(partial(owner.link_frame, link), partial(owner.link_piece, link))
        self._link = link

    def begin(self, num_bytes: int) -> None:
        """Prepare for a message."""
        self._link.received()
        super().begin(num_bytes)

    def end(self, error: Exception | None) -> None:
        """Reclaim memory that was not filled, before the requests go to other hosts."""
        self.close()
        self._link.stream_ended(self, error)


def heartbeat_period_s(num_ranks: int) -> float:
    """Return the mean interval between a rank's heartbeats to a data host, in seconds."""
    return max(_HEARTBEAT_PERIOD_S, num_ranks / _MAX_HEARTBEATS_PER_S)
