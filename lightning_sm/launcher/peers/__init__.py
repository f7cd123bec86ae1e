"""The agreement of a job's launchers on its outcome: one host's failure reaches all others within about a second.

Without it, each launcher would know only its own script, and the scripts on the other hosts would hang in a collective
until NCCL's timeout (30 minutes). The launcher on the main host is the hub of a star: it listens, and all others stay
connected to it while they run. They report the outcomes of their scripts, and the hub replies with the consequence for
the job: its outcome, or a restart of all scripts.

A job can do without this: if a launcher never appears (the stock toolkit, mpirun, a host that starts late), a port is
taken, or strangers connect, each host exits as it would alone. But once connected, a trainer host must stay connected:
if its connection is lost for longer than ``Timings.reconnect_s``, the job fails.
"""
