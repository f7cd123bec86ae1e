"""Hangs that the launcher of one host detects. The scripts do not use torch."""

from __future__ import annotations

import re
import signal

from tests.integration.emulators import job_dir, local, processes_of
from tests.integration.launching import failure, started, train

# The rank on the main host reports nothing after its second step. The other processes are in phases without a limit.
_SCRIPT = """
import time
from pathlib import Path
from lightning_sm.job.control_folder import Phase, announce
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.topology import Topology

job = SageMakerJob.from_environment()
topology = Topology.from_job(job)
process = announce()

def stuck_here():
    time.sleep(120)

if topology.role.value == "data":
    process.beat(phase=Phase.SERVING)
elif topology.node_rank:
    process.beat(1, 2, 0, Phase.SAVING)
Path(f"ready-{job.current_host}").touch()
if topology.role.value == "trainer" and topology.node_rank == 0:
    while len(list(Path().glob("ready-*"))) < 3:
        time.sleep(0.01)
    process.beat(0, 1, 0, Phase.TRAINING)
    process.beat(0, 2, 0, Phase.TRAINING)
stuck_here()
"""


def test_all_hosts_save_their_stacks_when_one_hangs(jobs, work):
    """The reason names the rank that made no progress, and all three hosts save their stacks."""
    (work / "train.py").write_text(_SCRIPT)
    groups = ["--group", "trainer=2", "--group", "data=1", "--seed", "1", "--env", "LIGHTNING_SM_HANG_S=1"]
    ended = local(jobs, work, *groups, "--", "train.py")
    assert ended.returncode == 1, ended.stdout
    reason = ended.stdout.rpartition("The job failed:\n")[2]
    assert reason.startswith("The training hangs: no progress on host algo-")
    assert "Last seen: rank 0 at step 2, training (" in reason
    # The other two hosts log where they saved their stacks.
    said = r"^(algo-\d) \| .*last seen: .* s ago\)\. Stacks: /"
    assert len(set(re.findall(said, ended.stdout, re.MULTILINE))) == 2
    saved = sorted(job_dir(jobs).glob("algo-*/output/data/**/stacks-*.txt"))
    assert len(saved) == 3, ended.stdout
    assert all(" in stuck_here\n" in path.read_text() for path in saved)
    assert not processes_of(jobs)


# Simulates a rank in a collective call, whose handlers for SIGUSR2 and SIGTERM never get to run.
_STUCK = """
import signal, time
from lightning_sm.job.control_folder import Phase, announce

process = announce()
signal.signal(signal.SIGUSR2, lambda *_: None)
signal.signal(signal.SIGTERM, lambda *_: None)
process.beat(0, 7, 0, Phase.TRAINING)
print("ready", flush=True)

def stuck_here():
    while True:
        time.sleep(60)

stuck_here()
"""


def test_a_rank_that_hangs_when_the_job_is_stopped_leaves_its_stacks(base, work):
    """Stacks are saved before SIGKILL; the host exits with 143, and the reason has the rank's last step."""
    (work / "train.py").write_text(_STUCK)
    with started(base, work, "train.py", LIGHTNING_SM_STOP_SCHEDULE="0.5,2") as running:
        running.wait_for("ready")
        running.process.send_signal(signal.SIGTERM)
        assert running.exit_code() == 143
    reason = failure(base)
    start = (
        "The job was stopped or interrupted (SIGTERM). The script did not exit within 2 s and was killed. Last seen: "
    )
    assert reason.startswith(f"{start}rank 0 at step 7, training (")
    (stacks,) = base.glob("output/data/**/stacks-rank0.txt")
    assert str(stacks) in reason
    assert " in stuck_here\n" in stacks.read_text()


def test_a_rank_whose_exit_hangs_after_an_exception_has_failed_with_it(alone, work):
    """The exception is the reason, although the launcher kills the rank because it hangs."""
    (work / "train.py").write_text(
        "import atexit, time\nfrom lightning_sm.job.control_folder import Phase, announce\n"
        "from lightning_sm.job.failure_file import report_failures\n"
        "report_failures()\nprocess = announce()\nprocess.beat(0, 1, 0, Phase.TRAINING)\n"
        "process.beat(0, 2, 0, Phase.TRAINING)\natexit.register(time.sleep, 60)\nraise ValueError('a bad sample')\n"
    )
    ended = train(alone, work, "train.py", LIGHTNING_SM_HANG_S="1")
    assert ended.returncode == 1
    assert failure(alone).startswith("ValueError: a bad sample\non trainer host algo-1, rank 0 (exit code 1)\n")
    assert "The training hangs: no progress on host algo-1." in ended.stderr
