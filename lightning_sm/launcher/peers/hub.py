"""The main host's end of the star, which receives all reports, decides the job's outcome, and sends it to all hosts."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time
from collections.abc import Callable, Sequence

from lightning_sm._text import listed
from lightning_sm.job.stopping import JobOutcome, OutcomeKind
from lightning_sm.launcher.peers.connection import MAX_LINE_BYTES, Connection, Timings
from lightning_sm.launcher.peers.messages import (
    Acknowledge,
    AnyMessage,
    JobEnd,
    OrderRestart,
    Report,
    StillThere,
)
from lightning_sm.launcher.peers.outcome import JobOutcomeTracker, Restart

_LOG = logging.getLogger(__name__)

# Connections that have not introduced themselves. At the limit the oldest is dropped, so that port scanners cannot lock
# hosts out.
_MAX_STRANGERS = 64
# The most that a stranger can make this host log, in one line.
_MAX_WHY_CHARS = 300


class Hub:
    """The hub of a job, driven by one thread.

    Args:
        now: The time, in seconds of ``time.monotonic``.
        own: Name of this host.
        trainers: Names of all trainer hosts.
        data_hosts: Names of all data hosts.
        address: Where to listen; None if there is no other host.
        key: The key of the job.
        timings: How long things may take.
        max_restarts: How often the scripts of the trainer hosts may be restarted.
        on_news: Called when ``tick`` has something to do.

    Attributes:
        awaited: Hosts that must exit, or acknowledge the job's outcome, before this host may exit.
        absent: Hosts that have never connected.

    Raises:
        OSError: The hub cannot listen on the address.
    """

    def __init__(
        self,
        now: float,
        *,
        own: str,
        trainers: Sequence[str],
        data_hosts: Sequence[str],
        address: tuple[str, int] | None,
        key: bytes,
        timings: Timings,
        max_restarts: int,
        on_news: Callable[[], None],
    ) -> None:
        self.awaited: list[str] = []
        self._own = own
        self._key = key
        self._timings = timings
        self._data_hosts = frozenset(data_hosts)
        self._tracker = JobOutcomeTracker(
            trainers,
            data_hosts,
            reconnect_s=timings.reconnect_s,
            absent_s=timings.peers_timeout_s,
            after_failure_s=timings.after_failure_s,
            max_restarts=max_restarts,
        )
        self._tracker.joined(own, now)
        self.absent = self._tracker.absent
        self._on_news = on_news
        self._backlog = len(trainers) + len(data_hosts) + _MAX_STRANGERS
        self._tasks: set[asyncio.Task[None]] = set()
        self._strangers: dict[Connection, None] = {}
        self._hosts: dict[str, Connection] = {}
        self._unreached_at = now + timings.unreached_s
        self._told: dict[type[AnyMessage], AnyMessage] = {}  # the last message to all, by its kind
        self._told_at = 0.0
        self._unacknowledged: set[str] = set()
        self._logged_strangers: set[tuple[str, str]] = set()
        self._socket = None if address is None else socket.create_server(address, backlog=self._backlog)
        self._server: asyncio.Server | None = None
        self._is_closed = False

    @property
    def job_outcome(self) -> JobOutcome | None:
        """The job's outcome; None until it is known."""
        return self._tracker.job_outcome

    @property
    def restart(self) -> Restart | None:
        """The last restart that was ordered; None if there was none."""
        return self._tracker.restart

    def is_done(self, now: float) -> bool:
        """Return whether this host may exit: the job is over, and all connected launchers know it or do not answer."""
        if not self._tracker.is_over:
            return False
        return not self._unacknowledged or now - self._told_at >= self._timings.peers_timeout_s

    async def open(self) -> None:
        """Accept connections from now on."""
        if self._socket is not None:
            self._server = await asyncio.start_server(
                self._accept, sock=self._socket, limit=MAX_LINE_BYTES, backlog=self._backlog
            )

    def tick(self, now: float, report: Report | None) -> None:
        """Do what is due.

        Args:
            now: The time.
            report: The outcome of this host's script; None while it runs.
        """
        if report is not None:
            self._tracker.reported(self._own, report.outcome, now, report.attempt)
        for connection in self._hosts.values():
            connection.keep_alive(now, self._timings)
        self._tracker.update(now)
        if now >= self._unreached_at and self.job_outcome is None:
            self._unreached_at = math.inf
            self._say_who_is_missing()
        if self.restart is not None:
            self._tell_all(OrderRestart(self.restart), now)
        if self.job_outcome is not None:
            self._tell_all(JobEnd(self.job_outcome, self._tracker.is_over), now)
        self.absent = self._tracker.absent
        self.awaited = sorted(self._unacknowledged) if self._tracker.is_over else self._tracker.awaited

    async def close(self) -> None:
        """Release the port and all connections."""
        self._is_closed = True
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for connection in self._strangers:  # a task that is cancelled before it starts closes nothing
            connection.drop("this host is exiting")

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_closed:  # asyncio accepted the connection before ``close``
            writer.transport.abort()
            return
        if len(self._strangers) >= _MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.drop("too many connections have not introduced themselves")
        connection = Connection(reader, writer, self._key, self._timings.hello_s)
        self._strangers[connection] = None
        task = asyncio.create_task(self._serve(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: Connection) -> None:
        host = ""
        try:
            host = await self._admit(connection)
            while True:
                self._handle(host, await connection.receive())
        except Exception as error:  # noqa: BLE001 - whatever a message causes, its host is lost, or it would be awaited
            self._lost(connection, host, str(error) or type(error).__name__)
        finally:
            await connection.close()
            self._strangers.pop(connection, None)

    async def _admit(self, connection: Connection) -> str:
        host = await connection.admit(lambda name: name != self._own and self._tracker.has(name))
        if host in self._hosts:  # half open, as a host reconnects only after its own end has closed
            self._hosts[host].drop("the host has connected again")
        self._strangers.pop(connection, None)
        self._hosts[host] = connection
        self._tracker.joined(host, time.monotonic())
        _LOG.debug("Host %s joined.", host)
        for message in self._told.values():
            self._tell(host, message)
        return host

    def _handle(self, host: str, message: AnyMessage) -> None:
        match message:
            case StillThere():
                return
            case Report():
                self._note_report(host, message)
            case Acknowledge():
                self._unacknowledged.discard(host)
            case _:
                raise ValueError(f"it sent {type(message).__name__}, which only the main host sends")
        self._on_news()

    def _say_who_is_missing(self) -> None:
        if missing := self._tracker.name_missing():
            _LOG.warning(
                "For %g s, no launcher has connected from: %s. The job continues, but does not notice failures there: "
                "scripts that need these hosts wait until their own timeouts (30 minutes with torch). The logs of "
                "these hosts may say why. They must run lightning-sm train, and be able to connect to %s.",
                self._timings.unreached_s,
                listed(missing),
                self._own,
            )

    def _note_report(self, host: str, report: Report) -> None:
        outcome = report.outcome
        is_first_report = not self._tracker.has_ended(host)
        self._tracker.reported(host, outcome, time.monotonic(), report.attempt)
        if (
            host in self._data_hosts
            and outcome.kind is not OutcomeKind.SUCCESS
            and is_first_report
            and self.job_outcome is None
        ):
            _LOG.warning(
                "The script on data host %s failed with exit code %d. Training continues without it. Cause: %s",
                host,
                outcome.exit_code,
                outcome.reason.headline,
            )

    def _tell_all(self, message: AnyMessage, now: float) -> None:
        if message != self._told.get(type(message)):
            self._told[type(message)] = message
            self._told_at = now
            for host in self._hosts:
                self._tell(host, message)

    def _tell(self, host: str, message: AnyMessage) -> None:
        if isinstance(message, JobEnd) and message.is_over:
            self._unacknowledged.add(host)
        self._hosts[host].send(message)

    def _lost(self, connection: Connection, host: str, why: str) -> None:
        """Record the loss of a connection for its host."""
        if not host:
            line = connection.address, why[:_MAX_WHY_CHARS]
            if line not in self._logged_strangers and len(self._logged_strangers) < _MAX_STRANGERS:
                self._logged_strangers.add(line)
                _LOG.info("Closed a connection from %s: %s.", *line)
            return
        if self._hosts.get(host) is not connection:
            return  # the host has connected again
        del self._hosts[host]
        self._unacknowledged.discard(host)
        if host in self._data_hosts and not self._tracker.has_ended(host) and self.job_outcome is None:
            _LOG.warning("Lost connection to the launcher on data host %s: %s.", host, why)
        self._tracker.left(host, time.monotonic(), why)
        self._on_news()
