"""The agreement of a job's launchers on its outcome: all hosts learn of a failure on any host in about a second.

Without this agreement, the scripts on the other hosts would hang in a collective until NCCL's timeout (30 minutes). The
launcher on the main host is the hub. Every other launcher asks the hub for the state of the job twice a second, and
reports the outcome of its own script. The hub answers with the consequence: the outcome of the job, or a restart of all
scripts.

A job can run without this agreement: if a launcher never appears (the stock toolkit, mpirun, a host that starts late)
or the port is taken, each host exits as it would alone. Connections from untrusted clients are closed. But a trainer
host that has asked once must keep asking: if it is silent for longer than ``Timings.lost_s``, the job fails.
"""
