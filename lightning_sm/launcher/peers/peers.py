"""The other launchers of a job, as seen from one of them: it reports to them, and learns how the job stands.

A thread talks to them: on the main host that of the ``Hub``, on all others that of a ``Client``.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence

from lightning_sm.job.stopping import JobOutcome, Outcome
from lightning_sm.launcher import timeline
from lightning_sm.launcher.peers.messages import Answer
from lightning_sm.launcher.peers.outcome import Restart, Timings

_LOG = logging.getLogger(__name__)


class Peers:
    """The other launchers of a job. A context manager. This class itself is for a host that has none.

    Args:
        own: Name of this host.
        timings: How long things may take.

    Attributes:
        job_outcome: How the job ends; None until this host knows it.
        order: The last restart of the job that was ordered; None if there was none.
        is_alone: Whether this launcher never connects to others.
        is_decided: Whether all hosts know how the job ends; on the main host also those that are still to come, which
            have some time for it.
        is_done: Whether there is nothing more to learn: all trainer hosts have ended or are lost, or nobody answers.
        is_main_host_there: Whether this is another host than the main one, whose launcher answers.
        awaited: Hosts that hold this one up, for people.
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
            attempt: After how many restarts of the job the script was started.
        """
        self._report, self._reported_at = (attempt, outcome), time.monotonic()

    def close(self) -> None:
        """Send the last report, if there is a connection; then release the port and all connections."""
        self._closing.set()
        if self._thread.is_alive():
            # A thread that resolves a name cannot be interrupted: leave it then. As a daemon it ends with the process.
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
        """Talk to the others until ``close`` is called."""

    def _learn(self, answer: Answer) -> None:
        self.order = answer.restart or self.order
        self.job_outcome = self.job_outcome or answer.job_outcome
