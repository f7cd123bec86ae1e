"""``Peers``: what the launcher of a host knows of, and says to, the launchers of the other hosts of the job."""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from lightning_sm.launcher.peers.client import Client
from lightning_sm.launcher.peers.connection import Timings, job_key
from lightning_sm.launcher.peers.hub import Hub
from lightning_sm.launcher.peers.outcome import Outcome, Verdict

logger = logging.getLogger(__name__)

# A thread that resolves a name cannot be interrupted; it ends with the process.
_JOIN_S = 2.0


class Peers:
    """The other launchers of the job, as seen from one of them. A context manager.

    Args:
        job_identity: What tells this job from all others: its ARN or name, the same on every host.
        own: Name of this host.
        trainers: Names of all trainer hosts.
        data_hosts: Names of all data hosts.
        main_host: The trainer host whose launcher is the hub.
        addresses: IP addresses of hosts that no resolver knows.
        port: Port of the hub, ``Topology.peers_port``.
        bind: Address on which the hub listens.
        on_verdict: Called once, from a thread of this object, as soon as it is known how the job ends; also when it
            is this host that failed. It must not block.
        timings: How long things may take. Default: what suits the hosts of a cluster.
    """

    def __init__(
        self,
        *,
        job_identity: str,
        own: str,
        trainers: Sequence[str],
        data_hosts: Sequence[str],
        main_host: str,
        addresses: Mapping[str, str],
        port: int,
        bind: str,
        on_verdict: Callable[[Verdict], None],
        timings: Timings | None = None,
    ) -> None:
        self._key = job_key(job_identity)
        self._own, self._main_host = own, main_host
        self._trainers, self._data_hosts = tuple(trainers), tuple(data_hosts)
        self._hub_address, self._bind = (addresses.get(main_host, main_host), port), (bind, port)
        self._on_verdict = on_verdict
        self._timings = timings or Timings()
        self._verdict: Verdict | None = None
        self._outcome: Outcome | None = None
        self._is_leaving = self._is_closing = False
        self._done = threading.Event()
        self._end: Hub | Client | None = None
        self._thread: threading.Thread | None = None
        self._waker: socket.socket | None = None

    @property
    def is_alone(self) -> bool:
        """Whether no other host is ever heard: there is none, or the hub cannot listen."""
        return self._end is None

    @property
    def verdict(self) -> Verdict | None:
        """How the job ends, as far as that is known here."""
        return self._verdict

    def __enter__(self) -> Peers:
        selector = selectors.DefaultSelector()
        self._end = self._make_end(selector)
        if self._end is None:
            selector.close()
            self._done.set()
            return self
        self._waker, woken = socket.socketpair()
        self._waker.setblocking(False)
        woken.setblocking(False)
        selector.register(woken, selectors.EVENT_READ, lambda _now: woken.recv(4096))
        self._thread = threading.Thread(target=self._run, args=(self._end, selector, woken), name="peers", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def report(self, outcome: Outcome) -> None:
        """Tell the other hosts how the script of this host ended. Only the first report counts.

        Args:
            outcome: How it ended.
        """
        if self._outcome is None:
            self._outcome = outcome
            self._wake()

    def farewell(self) -> Verdict | None:
        """Wait, after ``report``, until all trainer hosts have ended or are gone.

        Hosts whose launchers live are waited for as long as their scripts run; after a failure, for ``ending_s`` at
        most. Hosts that were never heard of are waited for ``farewell_s``.

        Returns:
            How the job ends; None if nothing was heard of the main host, or if there is no other host.
        """
        while self._end is not None and self._outcome is not None and not self._done.wait(self._timings.log_s):
            logger.info("The script of this host has ended; waiting for hosts %s.", ", ".join(self._end.awaited))
        return self._verdict

    def leave(self) -> None:
        """Make ``farewell`` return at once, now or later. A signal handler may call it."""
        self._is_leaving = True
        self._wake()

    def close(self) -> None:
        """Release the port and all connections. What was reported is sent before, if there is a connection."""
        self._is_closing = True
        self._wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)
            if self._waker is not None:
                self._waker.close()

    def _make_end(self, selector: selectors.BaseSelector) -> Hub | Client | None:
        if {*self._trainers, *self._data_hosts} <= {self._own}:
            return None
        now = time.monotonic()
        if self._own != self._main_host:
            return Client(
                selector,
                now,
                own=self._own,
                main_host=self._main_host,
                address=self._hub_address,
                key=self._key,
                timings=self._timings,
            )
        try:
            return Hub(
                selector,
                now,
                own=self._own,
                trainers=self._trainers,
                data_hosts=self._data_hosts,
                address=self._bind,
                key=self._key,
                timings=self._timings,
            )
        except OSError as error:
            logger.warning(
                "The launcher of this host cannot listen on %s:%d (%s). The hosts will not hear of each other's "
                "failures: when one fails, the others may hang until their collectives time out. "
                "LIGHTNING_SM_MAIN_PORT moves this port, too.",
                *self._bind,
                error.strerror,
            )
            return None

    def _run(self, end: Hub | Client, selector: selectors.BaseSelector, woken: socket.socket) -> None:
        try:
            is_closing = False
            while not is_closing:
                is_closing = self._is_closing  # before the last round, which sends what was reported
                selector.select(0 if is_closing else self._timings.tick_s)
                # The clock is read after the pause, and before what came is: a launcher that was itself stopped for
                # a while must hear the others before it calls them silent. (What came is asked for once more, as
                # select returns nothing when SIGCONT interrupts it.)
                now = time.monotonic()
                for key, _ in selector.select(0):
                    key.data(now)
                end.tick(now, self._outcome)
                self._announce(end.verdict)
                if end.is_done(now) or self._is_leaving:
                    self._done.set()
        except Exception:  # the script goes on: it is worth more than what this thread is for
            logger.exception("The launchers of the other hosts are not heard any more.")
        finally:
            self._done.set()
            end.close()
            selector.close()
            woken.close()

    def _announce(self, verdict: Verdict | None) -> None:
        if self._verdict is not None or verdict is None:
            return
        self._verdict = verdict
        try:
            self._on_verdict(verdict)
        except Exception:
            logger.exception("The launcher could not act on %s.", verdict)

    def _wake(self) -> None:
        if self._waker is not None:
            try:
                self._waker.send(b"\0")
            except OSError:  # it has been woken often enough, or has ended
                return
