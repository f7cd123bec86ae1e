"""``lightning-sm top`` beside an emulated job whose processes write what training would, without torch."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest

from tests.integration.emulators import command, in_background, job_dir, local, until

TIMEOUT_S = 60

# A trainer that has done 40 steps, and a data host whose server is the real one; both run until there is a file.
_SCRIPT = """
import os, sys, time
from dataclasses import asdict
from pathlib import Path
from lightning_sm.data.ipc.host_messages import Serve
from lightning_sm.data.ipc.processes import start_module
from lightning_sm.data.settings import Credentials, DataServiceSettings, HostSettings
from lightning_sm.record import events
from lightning_sm.job.control_folder import Phase, announce
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.rendezvous import own_address
from lightning_sm.job.topology import Role, Topology

job = SageMakerJob.from_environment()
topology = Topology.from_job(job)
process = announce()
if topology.role is Role.DATA:
    server, main = start_module("lightning_sm.data.server.process")
    address = f"{own_address(job)}:{topology.data_port}"
    credentials = Credentials.of(DataServiceSettings(), job.name)
    settings = HostSettings(address, 3, 1 << 20, None, None, job.current_host, credentials)
    main.send(Serve(settings))
    main.receive(30.0)
    process.beat(phase=Phase.SERVING)
else:
    rank = topology.node_rank
    lines = events.open_record(job, f"rank-{rank}")
    lines.append(events.head_of(job, f"rank-{rank}", lines.path, rank=rank, world_size=2))
    parts = {"data_wait": 0.5, "forward": 1.5}
    lines.append(events.Steps(time.time(), step=40, n=40, wall_s=2.0, longest_s=0.1, samples=320, parts=parts))
    lines.append(events.Metrics(time.time(), 40, 1, {"loss": 0.25}))
    lines.event("resumed", "from step 20")
while not Path(sys.argv[1]).exists():
    if topology.role is Role.TRAINER:
        process.beat(rank, 40, 1, Phase.TRAINING)
    time.sleep(0.1)
if topology.role is Role.DATA:
    main.close()
    server.wait(30)
"""


def top(*options, **variables):
    """Run the command to its end, which must be good."""
    call = [sys.executable, "-m", "lightning_sm", "top", *options]
    env = {**os.environ, "COLUMNS": "130", **variables}
    ended = subprocess.run(call, env=env, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def is_complete(name):
    """Whether all that the processes show can be seen."""
    call = [sys.executable, "-m", "lightning_sm", "top", name, "--once", "--json"]
    ended = subprocess.run(call, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    if ended.returncode:
        return False
    rows = json.loads(ended.stdout)["hosts"]
    return all(row["workers"] if row["role"] == "data" else row["steps_per_s"] for row in rows)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Name of a job with two trainers and a data host, and the file that ends it."""
    folder = tmp_path_factory.mktemp("top")
    script, end = folder / "train.py", folder / "end"
    script.write_text(_SCRIPT)
    groups = ("--group", "trainer=2", "--group", "data=1", "--checkpoints", str(folder / "ck"))
    with in_background(folder / "jobs", folder, *groups, "--", str(script), str(end)) as emulator:
        until((folder / "jobs").exists, "the job's folder", TIMEOUT_S)
        until(lambda: any((folder / "jobs").glob("local-*")), "the job's folder", TIMEOUT_S)
        name = job_dir(folder / "jobs").name
        until(lambda: is_complete(name), "all hosts show what they do", TIMEOUT_S)
        yield name, end
        end.touch()
        output, _ = emulator.communicate(timeout=TIMEOUT_S)
    assert emulator.returncode == 0, output


def test_what_scripts_get(job):
    """Trainers from the record and their own word, data hosts by the call of the data service, with its secret."""
    name, _ = job
    shown = json.loads(top(name, "--once", "--json"))
    assert (shown["job"], shown["attempt"], shown["step"], shown["epoch"]) == (name, 1, 40, 2)
    assert (shown["steps_per_s"], shown["samples_per_s"], shown["wait_share"]) == (20.0, 320.0, 0.25)
    assert shown["metrics"] == {"loss": 0.25}
    *trainers, data = shown["hosts"]
    assert [row["role"] for row in shown["hosts"]] == ["trainer", "trainer", "data"]
    assert {row["state"] for row in trainers} == {"training"}
    assert (data["state"], data["workers"], data["busy"], data["queued"]) == ("idle", 3, 0, 0)
    assert [event["text"] for event in shown["events"] if event["what"] == "resumed"] == ["from step 20"] * 2


def test_what_people_see_elsewhere_than_in_a_terminal(job):
    """One table without codes of terminals; the end of the name is enough."""
    name, _ = job
    text = top(name[-4:], "--once")
    assert f"job {name}, running for" in text
    assert text.count("+ training") == 2
    assert ". idle" in text
    assert "epoch 2, step 40   20 steps/s   320 samples/s   waiting for data 25% of the time" in text
    assert "\x1b" not in text


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param({}, id="terminal"),
        pytest.param({"TERM": "dumb"}, id="dumb"),
        pytest.param({"NO_COLOR": "1"}, id="no colour", marks=pytest.mark.proof),
    ],
)
def test_ctrl_c_leaves_a_terminal_as_it_was(job, variables):
    """The screen beside the terminal's own is left, and what it showed last does not disturb; exit code 0."""
    name, _ = job
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30", **variables}
    call = [sys.executable, "-m", "lightning_sm", "top", name, "--every", "0.5"]
    with subprocess.Popen(call, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        shown = b""
        deadline = time.monotonic() + TIMEOUT_S
        while shown.count(b"+ training") < 4:
            left_s = max(0.0, deadline - time.monotonic())
            assert select.select([ours], [], [], left_s)[0], f"nothing more was shown than {shown[-2000:]!r}"
            assert left_s > 0, f"other states are shown: {shown[-2000:]!r}"
            shown += os.read(ours, 4096)
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 0
        shown += _rest(ours)
    os.close(ours)
    is_dumb = variables.get("TERM") == "dumb"
    assert (b"\x1b[?1049h" in shown, b"\x1b[?1049l" in shown) == (not is_dumb, not is_dumb)
    assert (b"\x1b[32m" in shown) == (not variables)


def test_the_emulator_says_how_to_watch_its_job(jobs, work):
    """In a terminal, where somebody is there to watch it."""
    (work / "train.py").write_text("")
    ours, theirs = pty.openpty()
    with subprocess.Popen(command(jobs, ["--", "train.py"]), cwd=work, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = _rest(ours).decode()
        assert process.wait(TIMEOUT_S) == 0
    os.close(ours)
    assert f"Job {job_dir(jobs).name}. To watch it in another terminal: lightning-sm top" in shown
    assert "lightning-sm top" not in local(jobs, work, "--", "train.py").stdout


def test_a_job_that_does_not_run_here():
    """The answer says which jobs it would show."""
    call = [sys.executable, "-m", "lightning_sm", "top", "local-never", "--once"]
    ended = subprocess.run(call, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "No job " in ended.stderr


def _rest(terminal):
    """What a process writes until it ends."""
    found = b""
    while True:
        assert select.select([terminal], [], [], TIMEOUT_S)[0], f"nothing more came than {found[-2000:]!r}"
        try:
            data = os.read(terminal, 4096)
        except OSError:  # Linux says so at the end
            return found
        if not data:
            return found
        found += data


def test_it_ends_with_the_job(job):
    """The last test: it lets the job end, and so does the one who watched it."""
    name, end = job
    call = [sys.executable, "-m", "lightning_sm", "top", name, "--every", "0.2"]
    with subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert f"job {name}" in process.stdout.readline()
        end.touch()
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0
    assert f"Job {name} has ended" in errors
