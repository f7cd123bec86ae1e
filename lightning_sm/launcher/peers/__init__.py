"""The agreement of a job's launchers on its outcome: one host's failure reaches all others within about a second.

Without it, each launcher would know only its own script, and the scripts on the other hosts would hang in a collective
until NCCL's timeout (30 minutes). The launcher on the main host is the hub. All others ask it twice a second how the
job stands, and report the outcomes of their scripts. The hub answers with the consequence for the job: its outcome, or
a restart of all scripts.

A job can do without this: if a launcher never appears (the stock toolkit, mpirun, a host that starts late), a port is
taken, or strangers connect, each host exits as it would alone. But once a trainer host has asked, it must go on: if it
is silent for longer than ``Timings.lost_s``, the job fails.
"""
