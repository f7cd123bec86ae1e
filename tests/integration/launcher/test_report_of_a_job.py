"""The report of a job that succeeds or fails. The scripts do not use torch."""

from __future__ import annotations

import re

from tests.integration.emulators import job_dir, local

# Writes the record of a training process. With an argument, the rank of that number fails.
_SCRIPT = """
import os, sys, time
from pathlib import Path
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.record.events import Loader, Steps, head_of, open_record
from lightning_sm.job.topology import Topology

job = SageMakerJob.from_environment()
topology = Topology.from_job(job)
rank = topology.node_rank
record = open_record(job, f"rank-{rank}")
record.append(head_of(job, f"rank-{rank}", rank=rank, world_size=2))
record.append(Loader(time.time(), workers=2))
record.append(Steps(time.time(), 10, 10, 320, {"data_wait": 0.3, "forward": 0.2}))
record.close()
if sys.argv[1:]:
    Path(f"ready-{rank}").touch()
    deadline = time.monotonic() + 60
    while len(list(Path().glob("ready-*"))) < 2:
        if time.monotonic() > deadline:
            raise TimeoutError("the other host is not ready after 60 s")
        time.sleep(0.01)
    if rank == int(sys.argv[1]):
        sys.exit(7)
    time.sleep(60)
"""
_GROUPS = ("--group", "trainer=2", "--seed", "1")


def _reports(jobs):
    return list(job_dir(jobs).glob("algo-*/output/data/report.html"))


def test_a_main_host_that_fails_writes_a_report_and_still_ends_first(jobs, work):
    """A failed main host sets the job's exit code and reason, although its report delays its exit by seconds."""
    (work / "train.py").write_text(_SCRIPT)
    ended = local(jobs, work, *_GROUPS, "--", "train.py", "0", LIGHTNING_SM_REPORT_S="60")
    assert ended.returncode == 7, ended.stdout
    assert "exit code 7" in ended.stdout.rpartition("The job failed:\n")[2]
    (report,) = _reports(jobs)
    text = report.read_text()
    assert "Failed after" in text
    assert "10 steps: too few for a verdict" in text
    assert f"report of the run: {job_dir(jobs)}/ml/" in ended.stdout
    assert (job_dir(jobs) / "ml" / "output" / "data" / "report.html").samefile(report)


def test_the_page_of_the_main_host_says_why_another_host_failed(jobs, work):
    """The main host's report, the only one that SageMaker uploads, names the host that failed first."""
    (work / "train.py").write_text(_SCRIPT)
    ended = local(jobs, work, *_GROUPS, "--", "train.py", "1", LIGHTNING_SM_REPORT_S="60")
    assert ended.returncode == 7, ended.stdout
    (report,) = _reports(jobs)
    assert report.parts[-4] == "algo-1"
    assert re.search(r"<strong>Failed after [^<]* exit code 7 on trainer host algo-2", report.read_text())


def test_a_report_that_cannot_be_written_changes_nothing(jobs, work):
    """The job succeeds even if the report takes too long to write, and the log mentions the missing report."""
    (work / "train.py").write_text(_SCRIPT)
    ended = local(jobs, work, *_GROUPS, "--", "train.py", LIGHTNING_SM_REPORT_S="0.01")
    assert ended.returncode == 0, ended.stdout
    assert "the report of the run was not written within" in ended.stdout
    assert _reports(jobs) == []
