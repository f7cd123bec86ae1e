"""The time limits for a host's exit, in chronological order: after a stop signal, and after a failure.

With any stop schedule that a user may set, the launcher exits before SageMaker kills its container
(``SERVICE_GRACE_S``).
"""

from __future__ import annotations

# ---- After a stop signal. See ``StopSchedule`` for SIGTERM and SIGKILL.

# How long before SIGKILL to save the stacks of processes still running.
STACKS_BEFORE_KILL_S = 6.0
# How long processes may take to write their stacks: faulthandler takes milliseconds.
STACKS_S = 5.0
# Time for the upload agent to notice a job's first checkpoint; until then, there are no markers.
FIRST_MARKER_S = 10.0
# Time for the run report, and then for the steps that follow.
REPORT_LIMIT_WHEN_STOPPED_S = 10.0
AFTER_THE_REPORT_S = 5.0

# ---- After a failure on this host.

# A process that has raised an exception exits within moments, unless its loggers hang or the script catches the
# exception. After this time, the process counts as hanging.
EXIT_AFTER_EXCEPTION_S = 120.0
# If the launcher starts the ranks, a rank that fails because of another may exit first. The other one then has this
# long to print its traceback.
CONSEQUENCE_S = 3.0
# A dying rank can make others on its host fail before it has exited itself. Wait this long for its exit.
OWN_CAUSE_S = 5.0
# A launcher that is silent for this long is lost. It needs time to reconnect: a reset, and a lost packet at each
# attempt to connect, cost seconds.
LOST_S = 15.0
# When a rank dies, ranks on other hosts can fail seconds before its launcher sees the exit. Wait this long for the real
# cause, which may be a lost host.
CAUSE_ELSEWHERE_S = LOST_S + 2.0
# Time to wait for hosts that have not connected yet, which would otherwise be stopped without learning why. Also
# the default of ``LIGHTNING_SM_PEERS_TIMEOUT_S``.
ABSENT_HOSTS_S = 10.0
# The host that failed first must exit first, so that SageMaker shows its exit code and reason as the job's. Its exit
# takes tens of milliseconds, so all other hosts wait this long.
MAIN_HOST_LEAVES_LATER_S = 1.0

# ---- After a failure on another host.

# Time to wait for scripts still running. SageMaker gives a stopped job 120 s.
AFTER_FAILURE_S = 150.0

# Time from SIGTERM to SIGKILL, in which a script or rank can log its state.
END_GRACE_S = 15.0

# ---- When the script has exited.

# After a success, time to wait for processes that are not ranks, such as helpers of loggers that are still sending
# data.
LEFTOVERS_GRACE_S = 10.0
# For processes that outlive the script, the time between SIGTERM and SIGKILL, and again after SIGKILL.
KILL_GRACE_S = 2.0
# Time for copying the rest of the script's stderr pipe (64 KiB on Linux) to the reader of the launcher's stderr, such
# as Docker's client, or an emulator of many hosts on few CPUs. After a stop, the second value is the minimum.
DRAIN_S = 30.0
DRAIN_WHEN_STOPPED_S = 1.0
# Time for the last report to the other launchers.
LAST_REPORT_S = 2.0
