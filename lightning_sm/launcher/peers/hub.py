"""The hub on the main host, which receives the reports of all hosts and answers with the job's outcome."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import socket
import time
from collections.abc import Sequence

import msgspec

from lightning_sm._text import listed
from lightning_sm.job.outcomes import OutcomeKind
from lightning_sm.launcher import timeline
from lightning_sm.launcher.peers.messages import MAX_LINE_BYTES, Answer, Question, from_line, mac_of, to_line
from lightning_sm.launcher.peers.outcome import JobOutcomeTracker, Timings
from lightning_sm.launcher.peers.peers import Peers

_LOG = logging.getLogger(__name__)

# A connection that has been silent for this long is closed. Hosts ask much more often, and reconnect.
_SILENCE_S = 15.0
_LOOK_S = 0.1
# Time between the last answer to other hosts and the end of ``Peers.close``.
_CLOSE_S = 0.5
_MAX_LOGGED_STRANGERS = 64
# Maximum length of the reason in a log line about an untrusted client, which may influence its text.
_MAX_WHY_CHARS = 300


class Hub(Peers):
    """The hub of a job. All methods defined here, except the constructor, run in the base class's thread.

    Args:
        own: Name of this host.
        trainers: Names of all trainer hosts.
        data_hosts: Names of all data hosts.
        address: Where to listen; None if there are no other hosts.
        key: The job's key.
        timings: The limits and intervals of the communication.
        max_restarts: How often the scripts of the trainer hosts may be restarted.

    Raises:
        OSError: The hub cannot listen on the address.
    """

    def __init__(
        self,
        own: str,
        trainers: Sequence[str],
        data_hosts: Sequence[str],
        *,
        address: tuple[str, int] | None,
        key: bytes,
        timings: Timings,
        max_restarts: int,
    ) -> None:
        super().__init__(own, timings)
        self.is_alone, self.is_done = address is None, False
        self._key = key
        self._data_hosts = frozenset(data_hosts)
        self._tracker = JobOutcomeTracker(trainers, data_hosts, timings, max_restarts)
        self._answers: dict[str, Answer] = {}  # the last answer to each host
        self._connections: dict[str, asyncio.StreamWriter] = {}  # the latest connection of each host
        self._decided_at = self._over_at = math.inf
        self._unreached_at = time.monotonic() + timings.unreached_s
        self._logged_strangers: set[tuple[str, str]] = set()
        self._is_closed = False
        # Large enough for all hosts of a job, which may connect at the same time.
        self._backlog = 64 + len(trainers) + len(data_hosts)
        self._socket = None if address is None else socket.create_server(address, backlog=self._backlog)

    def _communicate(self) -> None:
        asyncio.run(self._listen())

    async def _listen(self) -> None:
        server = None
        if self._socket is not None:
            server = await asyncio.start_server(
                self._serve, sock=self._socket, limit=MAX_LINE_BYTES, backlog=self._backlog
            )
        try:
            while not self._closing.is_set():
                self._look()
                await asyncio.sleep(min(_LOOK_S, self._timings.poll_s))
            leave_at = time.monotonic() + timeline.LAST_REPORT_S - _CLOSE_S
            self._look()  # process the last report
            while self._uninformed() and time.monotonic() < leave_at:
                await asyncio.sleep(min(_LOOK_S, self._timings.poll_s))
        finally:
            self._is_closed = True
            if server is not None:
                server.close()

    def _look(self) -> None:
        """Process this host's report and the time limits that have expired."""
        now, tracker = time.monotonic(), self._tracker
        tracker.heard(self._own, now)
        if self._report is not None:
            attempt, outcome = self._report
            tracker.reported(self._own, outcome, now, attempt)
        tracker.update(now)
        if now >= self._unreached_at:
            self._unreached_at = math.inf
            self._say_who_is_missing()
        answer = self._answer()
        self._learn(answer)
        if self.job_outcome is not None:
            self._decided_at = min(self._decided_at, now)
        if answer.is_over:
            self._over_at = min(self._over_at, now)
        uninformed, limit_s = self._uninformed(), self._timings.peers_timeout_s
        self.awaited = uninformed if answer.is_over else tracker.awaited
        self.is_decided = now - self._decided_at >= (limit_s if uninformed or tracker.absent else 0.0)
        self.is_done = now - self._over_at >= (limit_s if uninformed else 0.0)

    def _answer(self) -> Answer:
        tracker = self._tracker
        return Answer(tracker.restart, tracker.job_outcome, tracker.is_over)

    def _uninformed(self) -> list[str]:
        """Return the connected hosts that do not know the current answer."""
        answer = self._answer()
        return sorted(host for host in self._connections if self._answers[host] != answer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host = ""
        try:
            challenge = secrets.token_hex(16).encode() + b"\n"
            writer.write(challenge)
            while not self._is_closed:
                line = await asyncio.wait_for(reader.readline(), _SILENCE_S)
                request = from_line(line, Question, self._key, challenge)
                self._note(request)
                host = request.host
                self._connections[host] = writer
                self._answers[host] = answer = self._answer()
                self._look()
                answer = msgspec.structs.replace(answer, is_known=not self._uninformed())
                writer.write(to_line(answer, self._key, mac_of(line)))
        except asyncio.CancelledError:
            pass  # raised when the event loop ends; asyncio in Python 3.11 would log the error with a traceback
        except Exception as error:  # noqa: BLE001 - bad input must end only this connection
            if not host:
                address = str((writer.get_extra_info("peername") or ["a closed connection"])[0])
                # Connection errors have a message, but timeouts do not.
                self._log_stranger(address, str(error) or f"it sent no line within {_SILENCE_S:g} s")
        finally:
            if self._connections.get(host) is writer:
                del self._connections[host]
            writer.transport.abort()

    def _note(self, request: Question) -> None:
        host, outcome, now, tracker = request.host, request.outcome, time.monotonic(), self._tracker
        if host == self._own or not tracker.has(host):
            raise ValueError(f"it calls itself {host!r}, which is not another host of this job")
        if host not in self._answers:
            _LOG.debug("Host %s joined.", host)
        tracker.heard(host, now)
        if outcome is None:
            return
        is_first_report = not tracker.has_ended(host)
        tracker.reported(host, outcome, now, request.attempt)
        is_lost_without_harm = host in self._data_hosts and tracker.job_outcome is None
        if is_lost_without_harm and is_first_report and outcome.kind is not OutcomeKind.SUCCESS:
            _LOG.warning(
                "The script on data host %s failed with exit code %d. Training continues without it. Cause: %s",
                host,
                outcome.exit_code,
                outcome.reason.headline,
            )

    def _say_who_is_missing(self) -> None:
        missing = self._tracker.absent
        if missing and self.job_outcome is None:
            _LOG.warning(
                "For %g s, no launcher has connected from: %s. The job continues, but does not notice failures there: "
                "scripts that need these hosts wait until their own timeouts (30 minutes with torch). The logs of "
                "these hosts may say why. They must run lightning-sm train, and be able to connect to %s.",
                self._timings.unreached_s,
                listed(missing),
                self._own,
            )

    def _log_stranger(self, address: str, why: str) -> None:
        line = address, why[:_MAX_WHY_CHARS]
        if line not in self._logged_strangers and len(self._logged_strangers) < _MAX_LOGGED_STRANGERS:
            self._logged_strangers.add(line)
            _LOG.info("Closed a connection from %s: %s.", *line)
