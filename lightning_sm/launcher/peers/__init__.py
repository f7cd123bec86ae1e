"""How the launchers of a job agree on its end: one host's failure reaches all others within about a second.

Without it each launcher knows its own script only, and the scripts of the other hosts hang in a collective until the
timeout of NCCL (30 minutes). The launcher of the main host is the hub of a star: it listens, all others connect to it
for as long as they run, tell it how their scripts ended, and hear from it what that means for the job.

Nothing here can fail a job that would have succeeded: a launcher that never appears (the stock toolkit, mpirun, a
host that starts late), a port that is taken, or rubbish from the network leave each host as it would be alone.
"""
