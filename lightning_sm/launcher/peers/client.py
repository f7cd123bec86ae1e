"""The end of the star on all hosts but the main host: it finds the hub, reports to it and hears from it."""

from __future__ import annotations

import logging
import selectors
import socket
import time
from dataclasses import asdict

from lightning_sm.launcher.peers.connection import Link, Message, Timings
from lightning_sm.launcher.peers.outcome import Outcome, Verdict

_LOG = logging.getLogger(__name__)


class Client:
    """One launcher that looks for the hub as long as it runs, driven by one thread.

    Args:
        selector: Where the connection is registered; the data of a key is called with the time.
        now: The time, in seconds of ``time.monotonic``.
        own: Name of this host.
        main_host: Name of the host of the hub.
        address: Host name or IP address, and port, of the hub.
        key: The key of the job.
        timings: How long things may take.

    Attributes:
        verdict: How the job ends, once that is known.
        awaited: Hosts that the end of this host waits for.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        now: float,
        *,
        own: str,
        main_host: str,
        address: tuple[str, int],
        key: bytes,
        timings: Timings,
    ) -> None:
        self.verdict: Verdict | None = None
        self.awaited: list[str] = [main_host]
        self._selector, self._own, self._main_host, self._address = selector, own, main_host, address
        self._key, self._timings = key, timings
        self._link: Link | None = None
        self._retry_at, self._retry_s = now, timings.first_retry_s
        self._reported_to: Link | None = None
        self._ended_at: float | None = None
        self._gone_since: float | None = None
        self._gone_why = ""
        self._was_welcome = self._is_over = self._is_lost = self._has_noted = False

    def is_done(self, now: float) -> bool:
        """Whether this host may end: the job is over, or the hub is gone, or never appeared.

        Args:
            now: The time.
        """
        if self._is_over or self._is_lost:
            return True
        if self._was_welcome or self._ended_at is None:
            return False
        return now - self._ended_at >= self._timings.farewell_s

    def tick(self, now: float, outcome: Outcome | None) -> None:
        """Do what is due.

        Args:
            now: The time.
            outcome: How the script of this host ended, once it has.
        """
        if outcome is not None and self._ended_at is None:
            self._ended_at = now
        if self._link is not None:
            try:
                self._keep(self._link, outcome, now)
            except OSError as error:
                self._drop(self._link, str(error), now)
        elif not (self._is_over or self._is_lost) and now >= self._retry_at:
            self._connect(now)
        self._give_up_lost_hub(now)

    def close(self) -> None:
        """Close the connection."""
        if self._link is not None:
            self._selector.unregister(self._link.sock)
            self._link.sock.close()
            self._link = None

    def _keep(self, link: Link, outcome: Outcome | None, now: float) -> None:
        if link.is_known and outcome is not None and self._reported_to is not link:
            self._reported_to = link
            link.send({"type": "report", **asdict(outcome)})
        link.keep(now, self._timings, {"type": "ping"})

    def _connect(self, now: float) -> None:
        self._retry_at = now + self._retry_s
        self._retry_s = min(2 * self._retry_s, self._timings.longest_retry_s)
        try:
            # Blocks, if the resolver does; nothing else is to be done here without a connection.
            address = socket.gethostbyname(self._address[0])
        except OSError:  # the host has no name yet
            return
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        link = Link(sock, self._key, time.monotonic())
        try:
            sock.connect((address, self._address[1]))
        except BlockingIOError:
            pass
        except OSError:  # no way to it yet
            sock.close()
            return
        self._link = link
        self._selector.register(sock, selectors.EVENT_WRITE, self._introduce)

    def _introduce(self, now: float) -> None:
        link = self._link
        if link is None:
            return
        code = link.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code != 0:
            self.close()  # nobody listens yet
            return
        self._selector.modify(link.sock, selectors.EVENT_READ, self._read)
        try:
            link.send({"type": "hello", "host": self._own})
        except OSError as error:
            self._drop(link, str(error), now)

    def _read(self, now: float) -> None:
        link = self._link
        if link is None:
            return
        try:
            for message in link.receive(now):
                self._handle(link, message)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            self._drop(link, str(error) or type(error).__name__, now)

    def _handle(self, link: Link, message: Message) -> None:
        kind = message["type"]
        if not link.is_known and kind != "welcome":
            raise ValueError("it did not welcome this host")
        if kind == "welcome":
            link.is_known = self._was_welcome = True
            self._gone_since = None
            self._retry_s = self._timings.first_retry_s
            _LOG.debug("Host %s was welcomed.", self._own)
        elif kind == "verdict":
            self.verdict = self.verdict or Verdict.from_message(message)
            if message["is_over"]:
                self._is_over = True
                link.send({"type": "heard"})
        elif kind == "ping":
            self.awaited = [str(host) for host in message["awaited"]] or [self._main_host]
        else:
            raise ValueError(f"it sent a message of the unknown type {kind!r}")

    def _drop(self, link: Link, why: str, now: float) -> None:
        """Close the connection, note what that means, and come back soon."""
        self.close()
        if link.is_known:
            self._gone_since, self._gone_why = now, why
            self._retry_at = now + self._timings.first_retry_s
            self.awaited = [self._main_host]
            if not self._is_over:
                _LOG.info("The launcher of host %s is not heard any more: %s. Trying again.", self._main_host, why)
        elif not self._has_noted:
            self._has_noted = True
            _LOG.info(
                "No launcher of this job answers on %s:%d, host %s, yet: %s.", *self._address, self._main_host, why
            )

    def _give_up_lost_hub(self, now: float) -> None:
        if self._gone_since is None or self._is_over or self._is_lost:
            return
        if now - self._gone_since >= self._timings.hub_return_s:
            self._is_lost = True
            self.verdict = self.verdict or Verdict.lost(self._main_host, self._gone_why)
