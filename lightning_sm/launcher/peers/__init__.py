"""How the launchers of a job agree on its outcome: one host's failure reaches all others within about a second.

Without it each launcher would know its own script only, and the scripts on the other hosts would hang in a collective
until NCCL's timeout (30 minutes). The launcher on the main host is the hub of a star: it listens, and all others stay
connected to it while they run. They report how their scripts ended, and it sends them what that means for the job:
how it ends, or that all scripts start again.

A job does not need this: if a launcher never appears (the stock toolkit, mpirun, a host that starts late), a port is
taken, or strangers connect, each host ends as it would alone. But once connected, a trainer host must stay: if its
connection is lost for longer than ``Timings.reconnect_s``, the job fails.
"""
