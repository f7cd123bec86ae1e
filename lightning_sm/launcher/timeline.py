"""The seconds of a host's end, in the order in which they pass: after a stop signal, and after a failure.

Whatever stop schedule a user sets, a launcher has exited when SageMaker kills its container (``SERVICE_GRACE_S``).
"""

from __future__ import annotations

from lightning_sm.job.stopping import StopSchedule

# ---- After a stop signal. See ``StopSchedule`` for SIGTERM and SIGKILL.

# How long before SIGKILL the stacks of the processes that still run are saved.
STACKS_BEFORE_KILL_S = 6.0
# How long processes may take to write their stacks: faulthandler takes milliseconds.
STACKS_S = 5.0
# For the agent to notice the first checkpoint of a job; there are no markers before.
FIRST_MARKER_S = 10.0
# For the report of the run. Its time ends early enough for what follows it.
REPORT_LIMIT_WHEN_STOPPED_S = 10.0
AFTER_THE_REPORT_S = 5.0

# ---- After a failure on this host.

# A process that has raised an exception exits within moments, unless its loggers hang or the script caught it. After
# this time, it hangs.
EXIT_AFTER_EXCEPTION_S = 120.0
# Where the launcher starts the ranks: a rank that fails because another one did may exit first. Leave that one this
# time to print its traceback.
CONSEQUENCE_S = 3.0
# When a rank dies, other ranks of the host can fail before it has exited: wait this long for it.
OWN_CAUSE_S = 5.0
# A launcher is lost after this silence, in which it tries to connect again: a reset, and a packet that is lost at every
# attempt to connect, cost seconds.
LOST_S = 15.0
# When a rank dies, ranks on other hosts can fail seconds before its own launcher sees the exit. Wait this long for the
# real cause, which may be a host that is lost.
CAUSE_ELSEWHERE_S = LOST_S + 2.0
# For hosts that have never connected, which would otherwise be stopped without learning why. A setting.
ABSENT_HOSTS_S = 10.0
# The host that failed first must exit first, so that SageMaker shows its exit code and reason as the job's. Its
# interpreter needs some tens of milliseconds to exit: all other hosts wait this long.
MAIN_HOST_LEAVES_LATER_S = 1.0

# ---- After a failure on another host.

# For the scripts that still run. SageMaker gives a stopped job 120 s.
AFTER_FAILURE_S = 150.0

# Between SIGTERM and SIGKILL for a script or rank, so that it can log its state.
END_GRACE_S = 15.0

# ---- When the script has ended.

# After a success, for processes that are not ranks: helpers of loggers still send what they have.
LEFTOVERS_GRACE_S = 10.0
# Between SIGTERM and SIGKILL for processes that outlive the script, and then until they must be gone.
KILL_GRACE_S = 2.0
# For passing on what the pipe of stderr still holds (64 KiB on Linux), to whoever reads that of the launcher: Docker's
# client, or an emulator of many hosts on few CPUs. After a stop, at least the second.
DRAIN_S = 30.0
DRAIN_WHEN_STOPPED_S = 1.0
# For the last report to the other launchers.
LAST_REPORT_S = 2.0


def last_exit_s(schedule: StopSchedule) -> float:
    """Return how many seconds after a stop signal this launcher has exited at the latest.

    At ``kill_s`` all waiting ends: for ranks, for the upload of a checkpoint, for other hosts, for the report. What
    follows is bounded by itself. Where nothing of the script is left, it takes no time.

    Args:
        schedule: The stop schedule.
    """
    return schedule.kill_s + 2 * KILL_GRACE_S + DRAIN_WHEN_STOPPED_S + LAST_REPORT_S
