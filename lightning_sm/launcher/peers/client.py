"""The end of the star on all other hosts, which connects to the hub, reports to it and receives the job's outcome."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import time
from collections.abc import Callable

from lightning_sm.job.stopping import JobOutcome
from lightning_sm.launcher.peers.connection import MAX_LINE_BYTES, Connection, Timings
from lightning_sm.launcher.peers.messages import (
    Acknowledge,
    AnyMessage,
    JobEnd,
    OrderRestart,
    Report,
    StillThere,
)
from lightning_sm.launcher.peers.outcome import Restart

_LOG = logging.getLogger(__name__)

_CANCEL_AGAIN_S = 1.0


class Client:
    """The connection to the hub, which is made again whenever it is lost. Driven by one thread.

    Args:
        now: The time, in seconds of ``time.monotonic``.
        own: Name of this host.
        main_host: Name of the hub's host.
        address: Host name or IP address, and port, of the hub.
        key: The key of the job.
        timings: How long things may take.
        on_news: Called when ``tick`` has something to do.

    Attributes:
        job_outcome: The job's outcome; None until it is known.
        restart: The last restart that was ordered; None if there was none.
        awaited: The host that says when this one may exit.
    """

    def __init__(
        self,
        now: float,
        *,
        own: str,
        main_host: str,
        address: tuple[str, int],
        key: bytes,
        timings: Timings,
        on_news: Callable[[], None],
    ) -> None:
        self.job_outcome: JobOutcome | None = None
        self.restart: Restart | None = None
        self.awaited = [main_host]
        self._own = own
        self._main_host = main_host
        self._address = address
        self._key = key
        self._timings = timings
        self._on_news = on_news
        self._task: asyncio.Task[None] | None = None
        self._connection: Connection | None = None  # once the hub has welcomed this host
        self._reported: tuple[Connection, Report] | None = None
        self._ended_at: float | None = None
        self._lost: tuple[float, str] | None = None  # when, and why
        self._was_welcomed = False
        self._is_job_over = False
        self._has_given_up = False
        self._has_logged_stranger = False
        self._unreached_at = now + timings.unreached_s
        self._why = "no answer yet"  # why there is no connection

    @property
    def is_connected(self) -> bool:
        """Whether the hub has welcomed this host, and the connection is not closed."""
        return self._connection is not None

    def is_done(self, now: float) -> bool:
        """Return whether this host may exit: the job is over, or the hub is lost or never appeared."""
        if self._is_job_over or self._has_given_up:
            return True
        if self._was_welcomed or self._ended_at is None:
            return False
        return now - self._ended_at >= self._timings.peers_timeout_s

    async def open(self) -> None:
        """Connect, and reconnect from now on whenever the connection is lost."""
        self._task = asyncio.create_task(self._stay_connected())

    def tick(self, now: float, report: Report | None) -> None:
        """Do what is due.

        Args:
            now: The time.
            report: The outcome of this host's script; None while it runs.
        """
        if report is None:
            self._ended_at = None
        elif self._ended_at is None:
            self._ended_at = now
        connection = self._connection
        if connection is not None:
            if report is not None and self._reported != (connection, report):
                self._reported = connection, report
                connection.send(report)
            connection.keep_alive(now, self._timings)
        self._give_up_lost_hub(now)
        self._say_if_unreached(now)

    async def close(self) -> None:
        """Close the connection."""
        while self._task is not None and not self._task.done():
            self._task.cancel()
            # Cancel repeatedly, because before Python 3.12 ``wait_for`` may swallow it (CPython issue 86296).
            await asyncio.wait([self._task], timeout=_CANCEL_AGAIN_S)

    async def _stay_connected(self) -> None:
        retry_s = self._timings.first_retry_s
        while not (self._is_job_over or self._has_given_up):
            try:
                # This may block in the resolver, but without a connection, this thread has nothing else to do.
                address = socket.gethostbyname(self._address[0])
                opening = asyncio.open_connection(address, self._address[1], limit=MAX_LINE_BYTES)
                streams = await asyncio.wait_for(opening, self._timings.hello_s)
            except asyncio.TimeoutError:
                self._why = f"no connection within {self._timings.hello_s:g} s"
            except OSError as error:  # the host has no name yet, there is no route to it, or the hub does not listen
                # asyncio replaces the system's text with "Connect call failed": look it up by its number. A resolver's
                # numbers are negative, and have a text of their own.
                number = error.errno or 0
                self._why = os.strerror(number) if number > 0 else error.strerror or str(error)
            else:
                if await self._talk(Connection(*streams, self._key, self._timings.hello_s)):
                    retry_s = self._timings.first_retry_s
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, self._timings.longest_retry_s)

    async def _talk(self, connection: Connection) -> bool:
        """Exchange messages until the connection is lost. Return whether the hub welcomed this host."""
        try:
            await connection.introduce(self._own)
            self._connection = connection
            self._was_welcomed = True
            self._lost = None
            _LOG.debug("Host %s was welcomed.", self._own)
            self._on_news()
            while True:
                self._handle(connection, await connection.receive())
        except Exception as error:  # noqa: BLE001 - whatever a message causes, this task must go on and reconnect
            self._why = str(error) or type(error).__name__
            self._note_loss()
        finally:
            was_known, self._connection = self._connection is not None, None
            await connection.close()
        return was_known

    def _note_loss(self) -> None:
        if self._connection is not None:
            self._lost = time.monotonic(), self._why
            if self.job_outcome is None:  # else the loss was to be expected, and the log has said why
                _LOG.info("Lost connection to the launcher on %s: %s. Reconnecting.", self._main_host, self._why)
        elif not self._has_logged_stranger:
            self._has_logged_stranger = True
            _LOG.info("No launcher of this job answers on %s (%s) yet: %s. Retrying.", *self._place, self._why)

    def _handle(self, connection: Connection, message: AnyMessage) -> None:
        match message:
            case StillThere():
                return
            case JobEnd(outcome, is_over):
                self.job_outcome = self.job_outcome or outcome
                if is_over:
                    self._is_job_over = True
                    connection.send(Acknowledge())
            case OrderRestart(restart):
                self.restart = restart
            case _:
                raise ValueError(f"it sent {type(message).__name__}, which the main host does not send")
        self._on_news()

    @property
    def _place(self) -> tuple[str, str]:
        return "{}:{}".format(*self._address), self._main_host

    def _say_if_unreached(self, now: float) -> None:
        if self._was_welcomed or now < self._unreached_at:
            return
        self._unreached_at = math.inf
        _LOG.warning(
            "No launcher of this job has answered on %s (%s) for %g s: %s. Until one does, this host and the "
            "others do not learn of each other's failures: when one fails, the others may hang until their collectives "
            "time out. The main host must run lightning-sm train, and let the hosts of the job connect to this port.",
            *self._place,
            self._timings.unreached_s,
            self._why,
        )

    def _give_up_lost_hub(self, now: float) -> None:
        if self._lost is None or self._is_job_over or self._has_given_up:
            return
        lost_at, why = self._lost
        if now - lost_at >= self._timings.reconnect_s:
            self._has_given_up = True
            self.job_outcome = self.job_outcome or JobOutcome.lost(self._main_host, why)
