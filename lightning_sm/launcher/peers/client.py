"""The hub's client on every host except the main one, which asks for the state of the job and reports outcomes."""

from __future__ import annotations

import logging
import math
import secrets
import socket
import time
from typing import BinaryIO

from lightning_sm.job.outcomes import JobOutcome, Outcome
from lightning_sm.launcher.peers.messages import MAX_LINE_BYTES, Answer, Question, from_line, mac_of, to_line
from lightning_sm.launcher.peers.outcome import Timings
from lightning_sm.launcher.peers.peers import Peers

_LOG = logging.getLogger(__name__)

# Time for the hub to accept a connection, and to send each answer.
_ANSWER_S = 10.0


class Client(Peers):
    """The connection to the hub, which is reopened whenever it is lost.

    Args:
        own: Name of this host.
        main_host: Name of the hub's host.
        address: Host name or IP address, and port, of the hub.
        key: The job's key.
        timings: The limits and intervals of the communication.
    """

    def __init__(self, own: str, *, main_host: str, address: tuple[str, int], key: bytes, timings: Timings) -> None:
        super().__init__(own, timings)
        self.is_alone = self.is_done = False
        self.awaited = (main_host,)
        self._main_host = main_host
        self._address = address
        self._key = key
        self._was_reached = False
        self._unreached_at = time.monotonic() + timings.unreached_s
        self._lost_at = math.inf

    def _communicate(self) -> None:
        while not self._closing.is_set():
            try:
                opening = socket.create_connection(self._address, timeout=_ANSWER_S)
                with opening as connection, connection.makefile("rb") as lines:
                    self._talk(connection, lines)
            except Exception as error:  # noqa: BLE001 - whatever the other end sends, this thread must connect again
                self._note_failure(getattr(error, "strerror", None) or str(error))
            self._closing.wait(self._timings.poll_s)

    def _talk(self, connection: socket.socket, lines: BinaryIO) -> None:
        """Ask the hub repeatedly, until the connection is lost or ``close`` is called."""
        challenge = lines.readline(MAX_LINE_BYTES)
        report: tuple[int, Outcome] | None = None  # not sent until an answer proves that the hub has the key
        is_last = False
        while True:
            attempt, outcome = report or (0, None)
            request = to_line(Question(self._own, secrets.token_hex(16), attempt, outcome), self._key, challenge)
            connection.sendall(request)
            answer = from_line(lines.readline(MAX_LINE_BYTES), Answer, self._key, mac_of(request))
            if not self.is_main_host_there:
                _LOG.debug("Host %s was accepted.", self._own)
            self.is_main_host_there = self._was_reached = True
            self._lost_at = math.inf
            self._learn(answer)
            self.is_decided = answer.job_outcome is not None and answer.is_known
            self.is_done |= answer.is_over
            if is_last:
                return
            if outcome is not None or self._report is None:
                self._closing.wait(self._timings.poll_s)
            is_last = self._closing.is_set()  # read before the report, so the last request contains the last report
            report = self._report

    def _note_failure(self, why: str) -> None:
        now = time.monotonic()
        if self.is_main_host_there:
            self.is_main_host_there = False
            self._lost_at = now + self._timings.lost_s
            if self.job_outcome is None:  # otherwise, the loss is expected
                _LOG.info("Lost connection to the launcher on %s: %s. Reconnecting.", self._main_host, why)
        elif now >= self._lost_at:
            self.job_outcome = self.job_outcome or JobOutcome.lost(self._main_host, why)
            self.is_decided = self.is_done = True
        elif not self._was_reached and now >= self._reported_at + self._timings.peers_timeout_s:
            self.is_done = True
        elif not self._was_reached and now >= self._unreached_at:
            self._unreached_at = math.inf
            _LOG.warning(
                "No launcher of this job has answered on %s:%d (%s) for %g s: %s. Until one does, this host and the "
                "others do not learn of each other's failures: when one fails, the others may hang until their "
                "collectives time out. The main host must run lightning-sm train, and allow the job's hosts to connect "
                "to this port.",
                *self._address,
                self._main_host,
                self._timings.unreached_s,
                why,
            )
