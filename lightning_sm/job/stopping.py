"""The contract of a stop between launcher, ranks and data hosts: signals, their schedule, exit codes."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_sm.errors import JobConfigError
from lightning_sm.job.variables import seconds

# Asks a training to save a checkpoint and leave. Not SIGTERM, on which Lightning makes a collective call that deadlocks
# unless all ranks get the signal at the same moment (Lightning issue 20806).
GENTLE_SIGNAL = signal.SIGUSR2
# What was interrupted did not succeed: Lightning's own 0 would make the job "Completed".
INTERRUPTED_EXIT_CODE = 128 + signal.SIGTERM
_SCHEDULE_VARIABLE = "LIGHTNING_SM_STOP_SCHEDULE"


@dataclass(frozen=True)
class StopSchedule:
    """What follows when the job is stopped, in seconds since the SIGTERM of the service.

    The gentle signal comes at once, to the processes that handle it. Where none does, SIGTERM comes at once.

    Attributes:
        term_s: SIGTERM for what is still there. The service sends SIGKILL to everything after 120 s.
        kill_s: SIGKILL.
    """

    term_s: float = 95.0
    kill_s: float = 110.0

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> StopSchedule:
        """Read ``LIGHTNING_SM_STOP_SCHEDULE``, two numbers of seconds such as ``95,110``.

        Args:
            env: Environment variables.

        Raises:
            JobConfigError: It is something else.
        """
        text = env.get(_SCHEDULE_VARIABLE, "")
        if not text:
            return cls()
        try:
            term_s, kill_s = map(seconds, text.split(","))
        except ValueError:
            term_s, kill_s = 1.0, 0.0
        if term_s > kill_s:
            raise JobConfigError(
                f"{_SCHEDULE_VARIABLE}={text!r}: expected the seconds from the stop signal to SIGTERM and to SIGKILL, "
                "the latter not smaller, such as 95,110."
            )
        return cls(term_s, kill_s)
