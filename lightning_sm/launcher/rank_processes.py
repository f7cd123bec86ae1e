"""The process that starts the ranks of a host, and ends them all when one fails.

A program of its own, so that the launcher has one child however many ranks there are. It runs without the package
(``python -I``), and therefore imports the standard library only.

Usage: rank_processes.py NUMBER FILE WAIT_S GRACE_S COMMAND...
FILE is made before ranks are ended because another one has failed, WAIT_S seconds ago; GRACE_S later they are killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

_POLL_S = 0.05
# Exit code of a rank that has saved a checkpoint because the job is stopped. Ranks may need different times for that.
_INTERRUPTED = 128 + signal.SIGTERM


def main(argv: Sequence[str]) -> NoReturn:
    """Run a command as each rank of this host, and exit as the first rank that failed.

    Stop signals reach the ranks without this process, which shares a process group with them.
    """
    stopped: list[int] = []
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda signum, _: stopped.append(signum))
    number, peers_gone, wait_s, grace_s, *command = argv
    first = int(os.environ["GROUP_RANK"]) * int(number)
    ranks = [
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "LOCAL_RANK": str(local), "RANK": str(first + local)},
        )
        for local in range(int(number))
    ]
    exit_code = _wait(ranks, first, stopped, Path(peers_gone), (float(wait_s), float(grace_s)))
    sys.stderr.flush()
    os._exit(exit_code)  # before anything destroys the list: subprocess would reap the ranks, see _exit_code


def _wait(
    ranks: Sequence[subprocess.Popen[bytes]],
    first: int,
    stopped: Sequence[int],
    peers_gone: Path,
    seconds: tuple[float, float],
) -> int:
    stages: list[tuple[float, signal.Signals]] = []
    exit_code = 0
    while True:
        codes = [_exit_code(process) for process in ranks]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed and not exit_code:
            code = codes[failed[0]] or 0
            exit_code = 128 - code if code < 0 else code
            if exit_code != _INTERRUPTED and not stopped and None in codes:
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
                sys.stderr.write(
                    f"lightning-sm: rank {first + failed[0]} {how}. Ending the other ranks of this host.\n"
                )
                now = time.monotonic()
                stages = [(now + seconds[0], signal.SIGTERM), (now + sum(seconds), signal.SIGKILL)]
        if None not in codes:
            return exit_code
        if stages and stages[0][0] <= time.monotonic():
            _, signum = stages.pop(0)
            peers_gone.touch()
            for process, status in zip(ranks, codes, strict=True):
                if status is None:
                    os.kill(process.pid, signum)  # not by Popen, which would reap a rank that has just exited
        time.sleep(_POLL_S)  # subprocess cannot wait for several processes at once


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """Return the exit code of a rank, -n for signal n; None while it runs.

    The launcher, which adopts ranks when this process exits, learns their exit codes only if nobody reaps them before.
    """
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        return process.poll()
    ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


if __name__ == "__main__":
    main(sys.argv[1:])
