"""The main host's end of the star: it hears every launcher, decides how the job ends, and tells all of them."""

from __future__ import annotations

import logging
import selectors
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial

from lightning_sm.launcher.peers.connection import Link, Message, Timings
from lightning_sm.launcher.peers.outcome import Endings, Outcome, Verdict

_LOG = logging.getLogger(__name__)

# Connections that have not said yet who they are, besides one for each host: port scanners must not lock hosts out.
_MAX_STRANGERS = 64
# Of hosts in one message, which must fit into a line.
_MAX_NAMES = 20


class Hub:
    """The hub of a job, driven by one thread.

    Args:
        selector: Where connections are registered; the data of a key is called with the time.
        now: The time, in seconds of the clock that all times here come from.
        own: Name of this host.
        trainers: Names of all trainer hosts.
        data_hosts: Names of all data hosts.
        address: Where to listen.
        key: The key of the job.
        timings: How long things may take.

    Attributes:
        awaited: Hosts that the end of this host waits for.

    Raises:
        OSError: The address cannot be listened on.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        now: float,
        *,
        own: str,
        trainers: Sequence[str],
        data_hosts: Sequence[str],
        address: tuple[str, int],
        key: bytes,
        timings: Timings,
    ) -> None:
        self.awaited: list[str] = []
        self._selector, self._own, self._key, self._timings = selector, own, key, timings
        self._data_hosts = frozenset(data_hosts)
        self._endings = Endings(
            trainers,
            data_hosts,
            return_s=timings.return_s,
            absent_s=timings.farewell_s,
            ending_s=timings.ending_s,
        )
        self._endings.joined(own, now)
        self._max_links = len(trainers) + len(data_hosts) + _MAX_STRANGERS
        self._links: list[Link] = []
        self._told: Message | None = None
        self._over_at = 0.0
        self._unheard: set[str] = set()
        self._noted: set[str] = set()
        self._server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._server.bind(address)
            self._server.listen(self._max_links)
        except OSError:
            self._server.close()
            raise
        self._server.setblocking(False)
        selector.register(self._server, selectors.EVENT_READ, self._accept)

    @property
    def verdict(self) -> Verdict | None:
        """How the job ends, once that is known."""
        return self._endings.verdict

    def is_done(self, now: float) -> bool:
        """Whether this host may end: the job is over, and all connected launchers know, or do not listen.

        Args:
            now: The time.
        """
        if not self._endings.is_over:
            return False
        return not self._unheard or now - self._over_at >= self._timings.farewell_s

    def tick(self, now: float, outcome: Outcome | None) -> None:
        """Do what is due.

        Args:
            now: The time.
            outcome: How the script of this host ended, once it has.
        """
        if outcome is not None:
            self._endings.reported(self._own, outcome, now)
        ping = {"type": "ping", "awaited": self._endings.awaited[:_MAX_NAMES]}
        for link in list(self._links):
            self._attempt(link, partial(link.keep, now, self._timings, ping), now)
        self._endings.settle(now)
        self._tell_all(now)
        self.awaited = sorted(self._unheard) if self._endings.is_over else self._endings.awaited

    def close(self) -> None:
        """Release the port and all connections."""
        for link in self._links:
            link.finish()
        for sock in (self._server, *(link.sock for link in self._links)):
            self._selector.unregister(sock)
            sock.close()
        self._links.clear()

    def _accept(self, now: float) -> None:
        for _ in range(_MAX_STRANGERS):
            try:
                sock, (address, _port) = self._server.accept()
            except OSError:  # none waits, or the one that did is gone
                return
            if len(self._links) >= self._max_links:
                strangers = [link for link in self._links if not link.is_known]
                self._drop(strangers[0], "too many connections have not introduced themselves", now)
            link = Link(sock, self._key, now)
            link.host = address
            self._links.append(link)
            self._selector.register(sock, selectors.EVENT_READ, partial(self._read, link))

    def _read(self, link: Link, now: float) -> None:
        if link in self._links:  # else it was closed since the selector saw it
            self._attempt(link, partial(self._receive, link, now), now)

    def _attempt(self, link: Link, action: Callable[[], None], now: float) -> None:
        try:
            action()
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            self._drop(link, str(error) or type(error).__name__, now)

    def _receive(self, link: Link, now: float) -> None:
        for message in link.receive(now):
            self._handle(link, message, now)

    def _handle(self, link: Link, message: Message, now: float) -> None:
        kind = message["type"]
        if not link.is_known:
            self._welcome(link, message, now)
        elif kind == "report":
            self._note_report(link.host, Outcome(int(message["exit_code"]), str(message["reason"])), now)
        elif kind == "heard":
            self._unheard.discard(link.host)
        elif kind != "ping":
            raise ValueError(f"it sent a message of the unknown type {kind!r}")

    def _welcome(self, link: Link, message: Message, now: float) -> None:
        host = message["host"]
        if message["type"] != "hello" or host == self._own or not self._endings.has(host):
            raise ValueError(f"it introduced itself as {host!r}, which is no other host of this job")
        for other in [other for other in self._links if other.is_known and other.host == host]:
            self._forget(other)  # half open: a host connects again when its end is gone
        link.is_known, link.host = True, host
        self._endings.joined(host, now)
        _LOG.debug("Host %s joined.", host)
        link.send({"type": "welcome"})
        if self._told is not None:
            self._tell(link, self._told)

    def _note_report(self, host: str, outcome: Outcome, now: float) -> None:
        is_news = not self._endings.has_ended(host)
        self._endings.reported(host, outcome, now)
        if host in self._data_hosts and outcome.exit_code != 0 and is_news and self.verdict is None:
            _LOG.warning(
                "The script on data host %s ended with exit code %d; the training goes on without it. %s",
                host,
                outcome.exit_code,
                outcome.reason,
            )

    def _tell_all(self, now: float) -> None:
        if self.verdict is None:
            return
        state = {"type": "verdict", **asdict(self.verdict), "is_over": self._endings.is_over}
        if state != self._told:
            self._told, self._over_at = state, now
            for link in [link for link in self._links if link.is_known]:
                self._attempt(link, partial(self._tell, link, state), now)

    def _tell(self, link: Link, state: Message) -> None:
        if state["is_over"]:
            self._unheard.add(link.host)
        link.send(state)

    def _drop(self, link: Link, why: str, now: float) -> None:
        """Close a connection and note what that means."""
        self._forget(link)
        if link.is_known:
            self._unheard.discard(link.host)
            if link.host in self._data_hosts and not self._endings.has_ended(link.host) and self.verdict is None:
                _LOG.warning("Data host %s is gone (%s).", link.host, why)
            self._endings.left(link.host, now, why)
        elif link.host not in self._noted and len(self._noted) < _MAX_STRANGERS:
            self._noted.add(link.host)
            _LOG.info("A connection from %s was closed: %s.", link.host, why)

    def _forget(self, link: Link) -> None:
        if link in self._links:
            self._links.remove(link)
            self._selector.unregister(link.sock)
            link.sock.close()
