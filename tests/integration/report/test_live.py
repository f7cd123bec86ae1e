"""``lightning-sm report --live`` on an emulated job whose processes write a training's record without torch."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys

import pytest

from tests.integration.emulators import command, in_background, job_dir, local, until
from tests.integration.terminals import read_terminal

TIMEOUT_S = 60

# Trainers that have done 40 steps, and a data host that has built 50 batches. All run until a file exists.
_SCRIPT = """
import sys, time
from pathlib import Path
from lightning_sm.record import events
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.topology import Role, Topology

job = SageMakerJob.from_environment()
topology = Topology.from_job(job)
if topology.role is Role.TRAINER:
    rank = topology.node_rank
    lines = events.open_record(job, f"rank-{rank}")
    lines.append(events.head_of(job, f"rank-{rank}", rank=rank, world_size=2))
    parts = {"data_wait": 0.5, "forward": 1.5}
    lines.append(events.Steps(time.time(), step=40, n=40, samples=320, parts=parts))
    lines.append(events.Metrics(time.time(), 40, 1, {"loss": 0.25}))
    lines.append(events.Event(time.time(), "resumed", "from step 20"))
    if rank == 0:
        for t, built in ((0.0, 0), (5.0, 50)):
            host = {"name": topology.data_hosts[0], "num_built": built}
            lines.append(events.DataService(time.time() + t, [host], {}))
while not Path(sys.argv[1]).exists():
    time.sleep(0.1)
"""


def watch(*options):
    """Build the command that watches a job."""
    return [sys.executable, "-m", "lightning_sm", "report", "--live", *map(str, options)]


def shown(*options):
    """Run the command, which must succeed, and return its output."""
    ended = subprocess.run(watch(*options), capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def is_complete(folder):
    """Check whether every host's progress is visible."""
    call = watch(folder, "--once", "--json")
    ended = subprocess.run(call, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    rows = json.loads(ended.stdout)["hosts"] if ended.returncode == 0 else [{}]
    return all(row.get("num_built") or row.get("step") for row in rows)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The folder of a job with two trainer hosts and a data host, and the file that makes the job end."""
    folder = tmp_path_factory.mktemp("live")
    script, end = folder / "train.py", folder / "end"
    script.write_text(_SCRIPT)
    groups = ("--group", "trainer=2", "--group", "data=1", "--checkpoints", str(folder / "ck"))
    with in_background(folder / "jobs", folder, *groups, "--", str(script), str(end)) as emulator:
        until((folder / "jobs").exists, "the job's folder", TIMEOUT_S)
        until(lambda: any((folder / "jobs").glob("local-*")), "the job's folder", TIMEOUT_S)
        run = job_dir(folder / "jobs")
        until(lambda: is_complete(run), "all hosts show what they do", TIMEOUT_S)
        yield run, end
        end.touch()
        output, _ = emulator.communicate(timeout=TIMEOUT_S)
    assert emulator.returncode == 0, output


def test_what_scripts_get(job):
    """``--once --json`` prints the job's progress and the state of every host."""
    folder, _ = job
    found = json.loads(shown(folder, "--once", "--json"))
    assert (found["job"], found["attempt"], found["step"]) == (folder.name, 1, 40)
    assert (found["steps_per_s"], found["samples_per_s"], found["waiting"]) == (20.0, 320.0, 0.25)
    assert found["metrics"] == {"loss": 0.25}
    *trainers, data = found["hosts"]
    assert [row["role"] for row in found["hosts"]] == ["trainer", "trainer", "data"]
    assert {row["state"] for row in trainers} == {"training"}
    assert (data["state"], data["num_built"]) == ("up", 50)
    assert [event["text"] for event in found["events"] if event["what"] == "resumed"] == ["from step 20"] * 2


def test_ctrl_c_leaves_a_terminal_as_it_was(job):
    """Ctrl-C exits with 0 and leaves the last output on the screen."""
    folder, _ = job
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color"}
    call = watch(folder)
    with subprocess.Popen(call, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        text = read_terminal(ours, lambda text: text.count(b"  training  ") >= 4)
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 0
        text += read_terminal(ours)
    os.close(ours)
    assert b"Traceback" not in text
    assert set(re.findall(rb"\x1b\[[^A-Za-z]*[A-Za-z]", text)) == {b"\x1b[H", b"\x1b[2J"}


def test_the_emulator_says_how_to_watch_its_job(jobs, work):
    """The emulator prints the command to watch its job, but only in a terminal."""
    (work / "train.py").write_text("")
    ours, theirs = pty.openpty()
    with subprocess.Popen(command(jobs, ["--", "train.py"]), cwd=work, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        text = read_terminal(ours).decode()
        assert process.wait(TIMEOUT_S) == 0
    os.close(ours)
    folder = job_dir(jobs)
    assert f"Job {folder.name}. To watch it in another terminal: lightning-sm report --live {folder}" in text
    assert "--live" not in local(jobs, work, "--", "train.py").stdout


def test_it_ends_with_the_job(job):
    """The live report exits when the job ends. This must be the last test, because it ends the job."""
    folder, end = job
    call = watch(folder)
    with subprocess.Popen(call, stdout=subprocess.PIPE, text=True) as process:
        assert f"job {folder.name}" in process.stdout.readline()
        end.touch()
        output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0
    assert "succeeded" in output
