"""A launcher's connection to the other launchers of its job: it reports to them, and waits for the job's outcome.

All communication runs in a thread of its own: on the main host as the ``Hub``, on all others as a ``Client``. A job of
one host that may not restart has neither.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from lightning_sm._linux import SIGNAL_POLL_S
from lightning_sm.job.stopping import JobOutcome, Outcome
from lightning_sm.job.variables import MAIN_PORT
from lightning_sm.launcher import timeline
from lightning_sm.launcher.peers.client import Client
from lightning_sm.launcher.peers.connection import Timings
from lightning_sm.launcher.peers.hub import Hub
from lightning_sm.launcher.peers.messages import Report
from lightning_sm.launcher.peers.outcome import Restart

_LOG = logging.getLogger(__name__)


class Peers:
    """The other launchers of the job, as seen from one of them. A context manager.

    Args:
        key: The key of the job's launchers, ``peers_key``.
        own: Name of this host.
        trainers: Names of all trainer hosts.
        data_hosts: Names of all data hosts.
        main_host: The trainer host whose launcher is the hub.
        addresses: IP addresses of hosts that cannot be resolved by name.
        port: Port of the hub, ``Topology.peers_port``.
        bind: Address on which the hub listens.
        on_job_outcome: Called once, from the thread of this object, as soon as the job's outcome is known, even if this
            host failed. It must not block.
        on_restart: Called once for each restart that is ordered, from the same thread. It must not block either.
        max_restarts: How often the scripts of the trainer hosts may be restarted.
        timings: How long things may take. Default: values for the hosts of a cluster.
    """

    def __init__(
        self,
        *,
        key: bytes,
        own: str,
        trainers: Sequence[str],
        data_hosts: Sequence[str],
        main_host: str,
        addresses: Mapping[str, str],
        port: int,
        bind: str,
        on_job_outcome: Callable[[JobOutcome], None],
        on_restart: Callable[[Restart], None] = lambda _: None,
        max_restarts: int = 0,
        timings: Timings | None = None,
    ) -> None:
        self._key = key
        self._own = own
        self._main_host = main_host
        self._trainers = tuple(trainers)
        self._data_hosts = tuple(data_hosts)
        self._is_only_host = {*trainers, *data_hosts} <= {own}
        self._hub_address = (addresses.get(main_host, main_host), port)
        self._bind = (bind, port)
        self._on_job_outcome = on_job_outcome
        self._on_restart = on_restart
        self._max_restarts = max_restarts
        self._timings = timings or Timings()
        self._job_outcome: JobOutcome | None = None
        self._restart: Restart | None = None
        self._attempt = 0
        self._report: Report | None = None
        self._must_not_wait = False
        self._is_closing = False
        self._is_done = False
        self._news = threading.Event()  # for the one thread that waits
        self._end: Hub | Client | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._has_news = asyncio.Event()  # for the thread of the loop

    @property
    def is_alone(self) -> bool:
        """Whether this launcher never connects to others: there are none, or the hub cannot listen."""
        return self._end is None or self._is_only_host

    @property
    def job_outcome(self) -> JobOutcome | None:
        """How the job ends; None until this host knows it."""
        return self._job_outcome

    @property
    def attempt(self) -> int:
        """The number of the last restart in which this host took part; 0 before the first."""
        return self._attempt

    @property
    def restart(self) -> Restart | None:
        """The next restart in which the script of this host must take part; None if there is none."""
        restart = self._restart
        is_ahead = restart is not None and restart.number > self._attempt and self._own in self._trainers
        return restart if is_ahead else None

    def __enter__(self) -> Peers:
        self._end = self._make_end()
        if self._end is None:
            self._is_done = True
            return self
        self._thread = threading.Thread(target=self._run, args=(self._end,), name="peers", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def report(self, outcome: Outcome) -> None:
        """Report the outcome of this host's script to the other hosts.

        Only the first report of each attempt counts, unless this host is told to stop while it waits for a restart.
        """
        self._report = Report(self._attempt, outcome)
        self._wake()

    def wait_for_peers(self, timeout_s: float | None = None) -> JobOutcome | None:
        """Wait, after ``report``, until all trainer hosts have ended or are lost, or until a restart is ordered.

        The wait lasts as long as the scripts of connected hosts run; after a failure, at most ``after_failure_s``. For
        hosts that never connected, it lasts ``peers_timeout_s``.

        Args:
            timeout_s: The longest wait, in seconds; None for no further limit.

        Returns:
            The job's outcome; None if it is not known: a restart was ordered, the main host never answered, there is
            no other host and no restart, the time is up, or ``stop_waiting`` was called.
        """
        if self._report is not None:
            self._wait(lambda: self.restart is not None, timeout_s)
        return self._job_outcome

    def wait_for_decision(self, timeout_s: float) -> JobOutcome | None:
        """Wait, for at most some seconds, until the job's outcome is known or a restart is ordered."""
        self._wait(lambda: self._job_outcome is not None or self.restart is not None, timeout_s)
        return self._job_outcome

    def wait_for_absent_hosts(self, timeout_s: float) -> None:
        """Wait until all hosts have connected, and so know the job's outcome; only the main host waits.

        Args:
            timeout_s: The longest wait, in seconds.
        """
        end = self._end
        if isinstance(end, Hub):
            self._wait(lambda: not end.absent or self.restart is not None, timeout_s)

    def wait_for_start(self) -> bool:
        """Wait, after ``report`` and the order to restart, until the scripts of all hosts have exited.

        Returns:
            Whether the script of this host may start again; False if the job ends, or if this host is told to stop.
        """
        self._wait(lambda: self._job_outcome is not None or self._may_start)
        restart = self.restart
        if restart is None or self._job_outcome is not None or not self._may_start:
            return False
        self._report = None
        # If another restart was ordered meanwhile, this host has missed a start: it must take part in the new one, too.
        self._attempt = restart.number if restart.may_start else restart.number - 1
        return True

    def wait_until_main_host_leaves(self, timeout_s: float) -> None:
        """Wait until the main host's launcher has closed its connections; on the main host, return at once."""
        deadline = time.monotonic() + timeout_s
        while isinstance(self._end, Client) and self._end.is_connected and not self._must_not_wait:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return
            self._news.wait(min(SIGNAL_POLL_S, remaining_s))
            self._news.clear()

    def stop_waiting(self) -> None:
        """Make all current and later waits return at once. A signal handler may call this."""
        self._must_not_wait = True
        self._wake()

    def close(self) -> None:
        """Send the last report, if there is a connection; then release the port and all connections."""
        self._is_closing = True
        self._wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            # A thread that resolves a name cannot be interrupted: leave it then. As a daemon it ends with the process.
            self._thread.join(timeline.LAST_REPORT_S)

    @property
    def _may_start(self) -> bool:
        restart = self.restart
        return restart is not None and (restart.may_start or restart.number > self._attempt + 1)

    def _wait(self, is_known: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Wait until ``is_known`` returns true, or until nothing more can be learned."""
        now = time.monotonic()
        next_log = now + self._timings.log_s
        deadline = math.inf if timeout_s is None else now + timeout_s
        while self._end is not None and not self._is_done and not is_known():
            now = time.monotonic()
            if now >= deadline:
                return
            if now >= next_log:
                next_log += self._timings.log_s
                if self._end.awaited:
                    _LOG.info("The script on this host has exited. Waiting for: %s.", ", ".join(self._end.awaited))
            # No longer than this, because signal handlers run only between two waits.
            self._news.wait(min(SIGNAL_POLL_S, deadline - now))
            self._news.clear()

    def _make_end(self) -> Hub | Client | None:
        if self._is_only_host and self._max_restarts == 0:
            return None
        now = time.monotonic()
        if self._own != self._main_host:
            return Client(
                now,
                own=self._own,
                main_host=self._main_host,
                address=self._hub_address,
                key=self._key,
                timings=self._timings,
                on_news=self._has_news.set,
            )
        try:
            return Hub(
                now,
                own=self._own,
                trainers=self._trainers,
                data_hosts=self._data_hosts,
                address=None if self._is_only_host else self._bind,
                key=self._key,
                timings=self._timings,
                max_restarts=self._max_restarts,
                on_news=self._has_news.set,
            )
        except OSError as error:
            _LOG.warning(
                "The launcher of this host cannot listen on %s:%d (%s). The hosts will not learn of each other's "
                "failures: when one fails, the others may hang until their collectives time out, and no script is "
                "restarted. Set %s to use other ports.",
                *self._bind,
                os.strerror(error.errno or 0),
                MAIN_PORT.name,
            )
            return None

    def _run(self, end: Hub | Client) -> None:
        try:
            asyncio.run(self._communicate(end))
        except Exception:  # noqa: BLE001 - without this thread, the script still runs
            _LOG.exception("The launcher of this host failed to communicate with the others. The script continues.")
        finally:
            self._is_done = True
            self._news.set()

    async def _communicate(self, end: Hub | Client) -> None:
        self._loop = asyncio.get_running_loop()
        await end.open()
        try:
            is_closing = False
            while not is_closing:
                # Read the clock before the pause, during which messages arrive: a launcher that was itself suspended
                # must read the others' heartbeats before it considers them silent.
                now = time.monotonic()
                is_closing = self._is_closing  # read before the last round, which sends the last report
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._has_news.wait(), 0 if is_closing else self._timings.tick_s)
                self._has_news.clear()
                end.tick(now, self._report)
                self._announce(end.job_outcome, end.restart)
                if end.is_done(now) or self._must_not_wait:
                    self._is_done = True
                    self._news.set()
        finally:
            await end.close()

    def _announce(self, job_outcome: JobOutcome | None, restart: Restart | None) -> None:
        if restart is not None and restart != self._restart:
            # First of all, so that whoever waits here knows it by the end of the wait.
            if self._restart is None or restart.number > self._restart.number:
                self._call(partial(self._on_restart, restart), restart)
            self._restart = restart
            self._news.set()
        if job_outcome is not None and self._job_outcome is None:
            self._call(partial(self._on_job_outcome, job_outcome), job_outcome)
            self._job_outcome = job_outcome
            self._news.set()

    def _call(self, callback: Callable[[], None], news: object) -> None:
        try:
            callback()
        except Exception:  # noqa: BLE001 - this thread must go on: the other hosts need it
            _LOG.exception("The launcher could not act on %s.", news)

    def _wake(self) -> None:
        if self._loop is not None:  # else the loop has not started yet, and reads everything when it does
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._has_news.set)
