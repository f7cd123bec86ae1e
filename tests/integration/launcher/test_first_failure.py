"""The launcher names the process that failed first, and why. The scripts do not use torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.integration.launching import failure, train

# Rank 0 starts rank 1. Once both ranks have announced themselves, rank 1 fails, and rank 0 notices that it is gone.
_RANKS = """
import logging, os, subprocess, sys, threading, time
from lightning_sm.job.control_folder import Phase, announce
from lightning_sm.job.failure_file import report_failures

rank = int(os.environ.get("RANK", "0"))
launcher = os.environ.get("LAUNCHER") or str(os.getppid())


def is_watched(pid):
    # The launcher has a descriptor of each process whose exit it would notice.
    for name in os.listdir(f"/proc/{{launcher}}/fdinfo"):
        try:
            with open(f"/proc/{{launcher}}/fdinfo/{{name}}") as file:
                if f"Pid:\\t{{pid}}\\n" in file.read():
                    return True
        except FileNotFoundError:  # closed meanwhile
            pass
    return False


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("what the launcher watches has not changed for 60 s")
        time.sleep(0.01)


report_failures()
announce().beat(rank, 1, 0, Phase.TRAINING)
if rank:
    until(lambda: is_watched(os.getpid()))
    os.write(1, b".")
    sys.stdin.readline()
    {of_rank_1}
    sys.exit(0)
env = {{**os.environ, "RANK": "1", "LAUNCHER": launcher}}
child = subprocess.Popen([sys.executable, *sys.argv], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.read(1)
{of_rank_0}
"""
# With Gloo, the connection breaks as soon as rank 1 exits or begins to exit.
_LOSES_CONNECTION = """
child.stdin.write(b"\\n")
child.stdin.flush()
child.stdout.read()
raise ConnectionResetError("Connection reset by peer")
"""
# Lightning's observer thread, which checks the ranks every 5 s, kills rank 0 like this.
_KILLS_ITSELF = """
child.stdin.write(b"\\n")
child.stdin.flush()
child.stdout.read()
until(lambda: not is_watched(child.pid))  # the launcher has seen how it exited
child.wait()
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize(
    ("of_rank_0", "of_rank_1", "code", "start"),
    [
        (_LOSES_CONNECTION, "os.kill(os.getpid(), 9)", 137, "killed by SIGKILL (exit code 137)"),
        (_LOSES_CONNECTION, "os.close(1); time.sleep(1); os._exit(9)", 9, "exit code 9"),
        (_LOSES_CONNECTION, "os.close(1); time.sleep(1); sys.exit(9)", 9, "exit code 9"),
        (_LOSES_CONNECTION, "raise ValueError('NaN')", 1, "ValueError: NaN"),
        (_KILLS_ITSELF, "os.kill(os.getpid(), 11)", 139, "killed by SIGSEGV (exit code 139)"),
        (_KILLS_ITSELF, "raise ValueError('NaN')", 1, "ValueError: NaN"),
    ],
    ids=[
        "killed",
        "slow os._exit",
        "slow sys.exit",
        "exception",
        "killed, then Lightning",
        "exception, then Lightning",
    ],
)
def test_a_local_rank_that_failed_first_is_named(alone, work, of_rank_0, of_rank_1, code, start):
    """The reason is rank 1's signal, exit code or exception, however rank 0 failed after losing its connection."""
    (work / "train.py").write_text(_RANKS.format(of_rank_0=of_rank_0, of_rank_1=of_rank_1))
    ended = train(alone, work, "train.py")
    reason = failure(alone)
    assert ended.returncode == code, reason
    assert reason.startswith(start)
    assert "on trainer host algo-1, rank 1" in reason


_CAUGHT = """
import logging, os, signal, sys, threading
from pathlib import Path
{imports}
Path("attempts").open("a").write(".")
try:
    import no_such_kernel
except ImportError:
    logging.warning("optional kernel missing", exc_info=True)
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
{death}
"""
_REPORTS = "from lightning_sm.job.failure_file import report_failures; report_failures()"


@pytest.mark.parametrize("imports", ["", _REPORTS], ids=["plain", "reports"])
@pytest.mark.parametrize(
    ("death", "code", "start"),
    [
        ("raise RuntimeError('ECC error')", 1, "RuntimeError: ECC error\non trainer host algo-1"),
        ("print('step 100', file=sys.stderr); sys.exit(1)", 1, "exit code 1 on trainer host algo-1"),
        ("os._exit(9)", 9, "exit code 9 on trainer host algo-1"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL (exit code 137) on trainer host algo-1"),
        ("os.kill(os.getpid(), signal.SIGABRT)", 134, "killed by SIGABRT (exit code 134) on trainer host algo-1"),
    ],
)
def test_what_a_script_survived_is_not_its_failure(alone, work, imports, death, code, start):
    """An exception that was caught, or raised in a thread, is not the reason and does not prevent a restart."""
    (work / "train.py").write_text(_CAUGHT.format(imports=imports, death=death))
    ended = train(alone, work, "train.py", LIGHTNING_SM_MAX_RESTARTS="1")
    assert ended.returncode == code
    reason = failure(alone)
    assert reason.startswith(start), reason
    assert "no_such_kernel" not in reason.partition("last lines of stderr")[0]
    assert (work / "attempts").read_text() == ".."


def test_a_report_that_cannot_be_written_does_not_hide_the_exception(alone, work):
    """Python prints the exception even if the control folder is gone, for example because the launcher has exited."""
    script = f"import os, shutil\n{_REPORTS}\nshutil.rmtree(os.environ['LIGHTNING_SM_CONTROL_DIR'])\n1 / 0\n"
    (work / "train.py").write_text(script)
    ended = train(alone, work, "train.py")
    assert ended.returncode == 1
    assert failure(alone).startswith("ZeroDivisionError: division by zero\n")


_RANKS_OF_TORCHRUN = f"""
import os, signal, time
{_REPORTS}
if os.environ["RANK"] == "1":
    os.mkfifo("own")
    os.replace("own", "pipe")
    open("pipe").close()
    raise ValueError("NaN")
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of torchrun, which may be faster
while not os.path.exists("pipe"):
    time.sleep(0.01)
open("pipe", "w").close()
raise ConnectionResetError("Connection reset by peer")
"""


def test_torchrun_shows_the_exception_of_the_rank_that_failed_first(work):
    """Without our launcher, as in AWS's images, torchrun blames rank 1 even if rank 0 fails in the same second."""
    (work / "train.py").write_text(_RANKS_OF_TORCHRUN)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    ended = subprocess.run(torchrun, cwd=work, capture_output=True, text=True, check=False, timeout=90)
    cause = ended.stderr.partition("Root Cause")[2]
    assert "rank      : 1 " in cause, ended.stderr
    assert "\n  ValueError: NaN\n" in cause
