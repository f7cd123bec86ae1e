"""A launcher's connection to the job's other launchers, for reporting outcomes and learning the state of the job.

A thread does the communication, in a ``Hub`` on the main host and in a ``Client`` on every other host.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence

from lightning_sm.job.outcomes import JobOutcome, Outcome
from lightning_sm.launcher import timeline
from lightning_sm.launcher.peers.messages import Answer
from lightning_sm.launcher.peers.outcome import Restart, Timings

_LOG = logging.getLogger(__name__)


class Peers:
    """The other launchers of a job, as a context manager. This base class is for a host that connects to no others.

    Args:
        own: Name of this host.
        timings: The limits and intervals of the communication.

    Attributes:
        job_outcome: The outcome of the job; None until this host knows it.
        order: The last restart that was ordered; None if there was none.
        is_alone: Whether this launcher never connects to others.
        is_decided: Whether all hosts know the job's outcome; the main host also allows late hosts some time to learn
            it.
        is_done: Whether there is nothing more to learn: the script of each trainer host has exited or the host is
            lost, or nobody answers.
        is_main_host_there: Whether the main host's launcher answers; always False on the main host.
        awaited: The hosts that this one is waiting for, named in messages.
    """

    def __init__(self, own: str, timings: Timings) -> None:
        self.job_outcome: JobOutcome | None = None
        self.order: Restart | None = None
        self.is_alone = self.is_done = True
        self.is_decided = self.is_main_host_there = False
        self.awaited: Sequence[str] = ()
        self._own = own
        self._timings = timings
        self._report: tuple[int, Outcome] | None = None
        self._reported_at = math.inf
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peers", daemon=True)

    def __enter__(self) -> Peers:
        if not self.is_done:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def report(self, outcome: Outcome, attempt: int) -> None:
        """Report the outcome of this host's script to the other hosts.

        Only the first report of each attempt counts, unless this host is told to stop while it waits for a restart.

        Args:
            outcome: The outcome.
            attempt: How many restarts of the job preceded this start of the script.
        """
        self._report, self._reported_at = (attempt, outcome), time.monotonic()

    def close(self) -> None:
        """Send the last report if there is a connection, then release the port and close all connections."""
        self._closing.set()
        if self._thread.is_alive():
            # A thread that is resolving a name cannot be interrupted. Abandon it: daemon threads end with the process.
            self._thread.join(timeline.LAST_REPORT_S)

    def _run(self) -> None:
        try:
            self._communicate()
        except Exception:  # noqa: BLE001 - without this thread, the script still runs
            _LOG.exception("The launcher of this host failed to communicate with the others. The script continues.")
        finally:
            self.is_main_host_there = False
            self.is_done = True

    def _communicate(self) -> None:
        """Communicate with the others until ``close`` is called."""

    def _learn(self, answer: Answer) -> None:
        self.order = answer.restart or self.order
        self.job_outcome = self.job_outcome or answer.job_outcome
