"""The signals that stop a host, and their schedule."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_sm.job.variables import STOP_SCHEDULE

# Asks a training script to save a checkpoint and exit. On SIGTERM, Lightning would instead make a collective call that
# deadlocks unless all ranks get the signal at the same moment (Lightning issue 20806).
GENTLE_SIGNAL = signal.SIGUSR2


@dataclass(frozen=True)
class StopSchedule:
    """The launcher's schedule of signals when SageMaker stops the job, in seconds since SageMaker's SIGTERM.

    At 0 s, the processes that handle the gentle signal receive it. If none does, all receive SIGTERM at 0 s. The
    launcher's ``ChildProcess`` sends the signals.

    Attributes:
        term_s: When the remaining processes receive SIGTERM. SageMaker itself sends SIGKILL after 120 s.
        kill_s: When the remaining processes receive SIGKILL.
    """

    term_s: float
    kill_s: float

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> StopSchedule:
        """Read ``LIGHTNING_SM_STOP_SCHEDULE``.

        Raises:
            JobConfigError: The value is not two numbers in nondecreasing order, or the second exceeds 112.
        """
        return cls(*STOP_SCHEDULE.read(env))
