"""The agreement of a job's launchers on its outcome: a failure on one host reaches all others in about a second.

Without it, the scripts on the other hosts would hang in a collective until NCCL's timeout (30 minutes). The launcher on
the main host is the hub. Each other launcher asks it for the state of the job twice a second, and reports the outcome
of its script. The hub answers with the consequence for the job: its outcome, or a restart of all scripts.

A job can run without this: if a launcher never appears (the stock toolkit, mpirun, a host that starts late), a port is
taken, or strangers connect, each host exits as it would alone. But a trainer host that has asked once must keep asking:
if it is silent for longer than ``Timings.lost_s``, the job fails.
"""
