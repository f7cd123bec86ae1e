"""A hang that the launcher of one host notices, in a job of several hosts; the scripts need no torch."""

from __future__ import annotations

from tests.integration.emulators import job_dir, local, processes_of

# The rank on the main host says nothing after its second step. All others do something that may take any time.
_SCRIPT = """
import os, time
from pathlib import Path
from lightning_sm.job.control_folder import Phase, announce
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.topology import Topology

job = SageMakerJob.from_environment()
topology = Topology.from_job(job)
base = Path(os.environ["SAGEMAKER_BASE_DIR"])
process = announce()

def stuck_here():
    time.sleep(120)

if topology.role.value == "data":
    process.beat(phase=Phase.SERVING)
elif topology.node_rank:
    process.beat(1, 2, 0, Phase.SAVING)
(base / "ready").touch()
if topology.role.value == "trainer" and topology.node_rank == 0:
    while len(list(base.parent.glob("*/ready"))) < 3:
        time.sleep(0.01)
    process.beat(0, 1, 0, Phase.TRAINING)
    process.beat(0, 2, 0, Phase.TRAINING)
stuck_here()
"""


def test_all_hosts_save_their_stacks_when_one_hangs(jobs, work):
    """The reason names the rank that made no progress; data hosts and ranks that wait for it show where they are."""
    (work / "train.py").write_text(_SCRIPT)
    groups = ["--group", "trainer=2", "--group", "data=1", "--seed", "1", "--env", "LIGHTNING_SM_HANG_S=1"]
    ended = local(jobs, work, *groups, "--", "train.py")
    assert ended.returncode == 1, ended.stdout
    reason = ended.stdout.rpartition("The job failed:\n")[2]
    assert reason.startswith("The training hangs: no progress on host algo-")
    assert "Last seen: rank 0 at step 2, training (" in reason
    saved = sorted(job_dir(jobs).glob("algo-*/output/data/**/stacks-*.txt"))
    assert len(saved) == 3, ended.stdout
    assert all(" in stuck_here\n" in path.read_text() for path in saved)
    assert not processes_of(jobs)
