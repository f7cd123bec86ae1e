"""Faults on request in ``lightning-sm local``, with a training script of a few lines that needs no torch."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from lightning_sm.instance_groups import GroupSpec
from lightning_sm.job import SageMakerJob
from lightning_sm.local.cluster import ClusterSpec, LocalCluster
from lightning_sm.rendezvous import SLOW_NAMES_VARIABLE
from lightning_sm.topology import Topology
from tests.integration.emulators import processes_of, until

_TIMEOUT_S = 40

# Without MODE it counts steps as a training would: all hosts meet first, rank 0 reports the steps and saves at the end
# and on SIGTERM, and all go on from what was saved. MODE names another function to run.
_TRAIN = """
import json, os, signal, sys, threading, time
from pathlib import Path

import psutil

from lightning_sm.job import SageMakerJob
from lightning_sm.topology import Topology

job = SageMakerJob.from_environment()
topology = Topology.from_job(job)
base = Path(os.environ["SAGEMAKER_BASE_DIR"])
mode = os.environ.get("MODE", "")
told = []


def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())


def hear(*_):
    if not told:  # launchers may repeat it
        told.append(time.monotonic())
        say("told", told[0])


signal.signal(signal.SIGTERM, hear)


def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.005)


def report(step):
    if topology.role.value == "trainer" and topology.node_rank == 0:
        with open(os.environ["LIGHTNING_SM_STEP_FILE"], "w") as file:
            file.write(f"{step} {1 + step // 10}")


def meet():
    (base / "left").touch()
    until(lambda: all((base.parent / host / "left").exists() for host in job.hosts))


def train(last=20):
    saved = job.checkpoint_dir / "step" if job.checkpoint_dir else None
    step = int(saved.read_text()) if saved and saved.exists() else 0
    say("starts", step, job.name, topology.main_port, sorted(str(p.relative_to(base)) for p in base.rglob("left")))
    meet()
    while step < last and not told:
        threading.Event().wait(0.005)
        step += 1
        report(step)
    if saved and topology.role.value == "trainer" and topology.node_rank == 0:
        saved.write_text(str(step))
    if step < last:
        sys.exit(143)


def processes(host):
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("SAGEMAKER_BASE_DIR") == str(base.parent / host):
                found.append(process.status())
        except psutil.Error:
            pass
    return found


def wait_for_sigterm():
    until(lambda: told)
    sys.exit(143)


def endless():
    train(10**9)


def deaf():
    meet()
    report(5)
    threading.Event().wait(60)


def stubborn():
    tried = job.checkpoint_dir / "tried"
    if not tried.exists():
        tried.touch()
        report(1)
        threading.Event().wait(60)


def with_daemon():
    # Outside its group and session, its parent gone, deaf to SIGTERM, and never at rest: it starts others.
    import subprocess
    code = "import os, signal, subprocess, sys, threading\\nsignal.signal(15, signal.SIG_IGN)\\n"
    code += "if not os.fork():\\n    while True: subprocess.run(['sleep', '0.01'])"
    subprocess.run([sys.executable, "-c", code], start_new_session=True)
    (base / "ready").touch()
    wait_for_sigterm()


def watch_kill():
    # What the failing host left when SIGTERM comes: nothing, if it vanished as a whole.
    if job.current_host == "algo-2":
        with_daemon()
    until((base.parent / "algo-2" / "ready").exists)
    report(5)
    until(lambda: told)
    say("left of algo-2:", processes("algo-2"))
    sys.exit(143)


def watch_launcher():
    if job.current_host == "algo-2":
        ready_and_wait()
    until((base.parent / "algo-2" / "ready").exists)
    report(10)
    until(lambda: told)
    say("left of algo-2:", len(processes("algo-2")))
    sys.exit(143)


def watch_hang():
    if job.current_host == "algo-2":
        (base / "ready").touch()
        until((base.parent / "thawed").exists)
        return
    until((base.parent / "algo-2" / "ready").exists)
    report(1)
    until(lambda: set(processes("algo-2")) == {"stopped"})
    say("all stopped")
    until(lambda: "stopped" not in processes("algo-2"))
    say("none stopped")
    (base.parent / "thawed").touch()


def fail_beside_frozen():
    if job.current_host == "algo-2":
        ready_and_wait()
    until((base.parent / "algo-2" / "ready").exists)
    report(1)
    until(lambda: set(processes("algo-2")) == {"stopped"})
    sys.exit(3)


def ready_and_wait():
    (base / "ready").touch()
    wait_for_sigterm()


def local_ranks():
    import subprocess
    rank = os.environ.get("LOCAL_RANK", "0")
    if rank != "0":
        # A worker of the rank: it inherits the variable.
        worker = subprocess.Popen(["sleep", "60"])
        (base / "ready").touch()
        worker.wait()
        return
    child = subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "LOCAL_RANK": "1"})
    until((base / "ready").exists)
    report(1)
    say("local rank 1 ended with", child.wait())
    sys.exit(7)


def started():
    say("started", psutil.Process(os.getppid()).create_time())


def names():
    say("names", os.environ.get("LIGHTNING_SM_SLOW_NAMES"), time.monotonic())


globals()[mode or "train"]()
"""


@pytest.fixture
def work(tmp_path):
    """The user's working directory, with the training script."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "train.py").write_text(_TRAIN)
    return folder


@pytest.fixture
def jobs(tmp_path):
    """The folder for ``--base-dir``; it must not exist before."""
    return tmp_path / "jobs"


def _command(jobs, options, mode):
    # Launchers wait for those of hosts that vanished; here in vain.
    variables = ["--env", f"MODE={mode}", "--env", "LIGHTNING_SM_FAREWELL_S=0.5"]
    return [
        *(sys.executable, "-m", "lightning_sm", "local", "--base-dir", str(jobs), "--seed", "1"),
        *(*variables, *options, "--", "train.py"),
    ]


def _local(jobs, work, *options, mode=""):
    ended = subprocess.run(
        _command(jobs, options, mode), cwd=work, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
    )
    assert "Traceback" not in ended.stdout + ended.stderr, ended.stdout + ended.stderr
    return ended


def _row(output, host, attempt=None):
    """What the table says of a host: group, role, exit code and seconds, and seconds from signal to exit."""
    prefix = rf"{attempt} +" if attempt else ""
    (row,) = re.findall(rf"^ *{prefix}{host} +(\S+ +(?:trainer|data) +\d+ .*)$", output, re.MULTILINE)
    return row.split()


def _said(output, word):
    """What each host said after a word."""
    return re.findall(rf"^(algo-\d) \| {word} (.*)$", output, re.MULTILINE)


@contextmanager
def _started(jobs, work, *options, mode):
    process = subprocess.Popen(
        _command(jobs, options, mode), cwd=work, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        for left in processes_of(jobs):
            left.kill()
        process.communicate(timeout=_TIMEOUT_S)


def _line(emulator, start):
    """Read up to a line of the emulator."""
    while not (line := emulator.stdout.readline()).startswith(start):
        assert line, f"the output ended before {start!r}"
    return line


def test_killed_host_vanishes_as_a_whole(jobs, work):
    """Nothing of a killed host is left, also not what daemonised, and the job fails with its exit code."""
    ended = _local(jobs, work, "--group", "trainer=2", "--fault", "kill:algo-2@step=5", mode="watch_kill")
    assert ended.returncode == 137
    assert re.search(r"^Fault kill:algo-2@step=5: algo-2 at step \d+, epoch \d+, \d+\.\d s\.$", ended.stdout, re.M)
    assert "Host algo-2 (group trainer) failed with exit code 137." in ended.stdout
    assert _said(ended.stdout, "left of algo-2:") == [("algo-1", "[]")]
    assert _row(ended.stdout, "algo-2")[:3] == ["trainer", "trainer", "137"]


def test_killed_training_process_is_reported_by_its_launcher(jobs, work):
    """Without a local rank the script itself is killed; its launcher lives, and leaves a reason."""
    options = ["--group", "trainer=1", "--group", "data=1", "--fault", "kill-rank:trainer-1@step=5"]
    ended = _local(jobs, work, *options, mode="endless")
    (trainer,) = re.findall(r"^Fault kill-rank:trainer-1@step=5: (algo-\d) at ", ended.stdout, re.M)
    assert ended.returncode == 137
    assert f"Reason ({trainer})" in ended.stdout


def test_killed_local_rank(jobs, work):
    """The named local rank is killed, and neither its worker nor local rank 0."""
    options = ["--devices", "2", "--fault", "kill-rank:algo-1/1@step=1"]
    ended = _local(jobs, work, *options, mode="local_ranks")
    assert "algo-1 | local rank 1 ended with -9" in ended.stdout
    assert ended.returncode == 7


def test_killed_launcher_leaves_its_script(jobs, work):
    """Only the launcher is killed; what it started runs on until the job ends."""
    options = ["--group", "trainer=2", "--fault", "kill-launcher:algo-2@step=10"]
    ended = _local(jobs, work, *options, mode="watch_launcher")
    assert ended.returncode == 137
    assert "algo-2 left no reason" in ended.stdout
    assert int(dict(_said(ended.stdout, "left of algo-2:"))["algo-1"]) >= 1
    assert not processes_of(jobs)


def test_hanging_host_goes_on_after_its_time(jobs, work):
    """All processes of the host stand still, launcher included, and go on together."""
    options = ["--group", "trainer=2", "--fault", "hang:algo-2,for=1@step=1"]
    ended = _local(jobs, work, *options, mode="watch_hang")
    assert ended.returncode == 0, ended.stdout
    lines = [line for line in ended.stdout.splitlines() if "stopped" in line or line.startswith(("Fault", "Host"))]
    assert lines[0].startswith("Fault hang:algo-2,for=1@step=1: algo-2 at step 1")
    assert sorted(lines[1:]) == ["Host algo-2 goes on.", "algo-1 | all stopped", "algo-1 | none stopped"]


def test_frozen_host_ends_with_a_killed_emulator(jobs, work):
    """A frozen process could not act on any other signal than SIGKILL: it gets that."""
    with _started(jobs, work, "--fault", "hang:algo-1@after=0", mode="ready_and_wait") as emulator:
        _line(emulator, "Fault hang")
        assert processes_of(jobs)
        emulator.kill()
        until(lambda: not processes_of(jobs), "no process is left", _TIMEOUT_S)


def test_frozen_host_ends_with_the_job(jobs, work):
    """A host that hangs for good is killed when another one has failed."""
    options = ["--group", "trainer=2", "--fault", "hang:algo-2@step=1"]
    ended = _local(jobs, work, *options, mode="fail_beside_frozen")
    assert ended.returncode == 3
    assert ended.stderr == ""
    assert _row(ended.stdout, "algo-2")[2] == "137"
    assert not processes_of(jobs)


def test_frozen_host_ends_with_ctrl_c(jobs, work):
    """Whoever presses Ctrl-C does not wait for a host that cannot hear it."""
    with _started(jobs, work, "--fault", "hang:algo-1@start", mode="ready_and_wait") as emulator:
        _line(emulator, "Fault hang")
        emulator.send_signal(signal.SIGINT)
        assert emulator.wait(_TIMEOUT_S) == 130
        assert not processes_of(jobs)


def test_interrupted_job_goes_on_from_its_checkpoint(jobs, work):
    """The second attempt has the job's name, port and checkpoints, and nothing else of the first."""
    options = ["--group", "trainer=2", "--group", "data=1", "--keep", "--fault", "interrupt@step=8"]
    ended = _local(jobs, work, *options)
    assert ended.returncode == 0, ended.stdout
    first, second = ended.stdout.split("Attempt 2 of 2\n")
    starts = [[text.split(maxsplit=3) for _, text in _said(output, "starts")] for output in (first, second)]
    assert [len(hosts) for hosts in starts] == [3, 3]
    assert {hosts[0] for hosts in starts[0]} == {"0"}
    assert all(8 <= int(hosts[0]) < 20 for hosts in starts[1])
    ((name, _port),) = {(hosts[1], hosts[2]) for hosts in starts[0] + starts[1]}
    assert {hosts[3] for hosts in starts[0] + starts[1]} == {"[]"}
    assert first.startswith(f"Checkpoint folder of all attempts: {jobs / name / 'checkpoints'}\nAttempt 1 of 2\n")
    assert (jobs / name / "checkpoints" / "step").read_text() == "20"
    assert (jobs / name / "attempt-1" / "algo-1" / "left").exists()
    assert "told" not in second
    for host in ("algo-1", "algo-2", "algo-3"):
        # A data host may have learnt that the training is over before it was told to end.
        assert (
            _row(ended.stdout, host, 1)[2] in {"trainer": ["143"], "data": ["143", "0"]}[_row(ended.stdout, host, 1)[1]]
        )
        assert 0 < float(_row(ended.stdout, host, 1)[4]) < 10
        assert _row(ended.stdout, host, 2)[2] == "0"
        assert len(_row(ended.stdout, host, 2)) == 4


def test_folders_of_all_attempts_are_removed(jobs, work):
    """After success nothing is left, checkpoints in the job's folder included; a named checkpoint folder stays."""
    options = ["--fault", "restart@step=8"]
    assert _local(jobs, work, *options).returncode == 0
    assert not jobs.exists()
    assert _local(jobs, work, *options, "--checkpoints", "kept").returncode == 0
    assert not jobs.exists()
    assert (work / "kept" / "step").read_text() == "20"


def test_restart_kills_all_without_a_word(jobs, work):
    """After a hardware failure the hosts were not told, and the next attempt begins."""
    ended = _local(jobs, work, "--group", "trainer=2", "--fault", "restart@epoch=2")
    assert ended.returncode == 0
    assert "told" not in ended.stdout
    assert [_row(ended.stdout, f"algo-{host}", 1)[2] for host in (1, 2)] == ["137", "137"]
    assert [text.split()[0] for _, text in _said(ended.stdout, "starts")] == ["0"] * 4
    assert re.search(r"^Fault restart@epoch=2: algo-1, algo-2 at step 1\d, epoch 2, ", ended.stdout, re.M)


def test_interruption_of_one_host(jobs, work):
    """Only that host is told; the others are killed when the time is over."""
    options = ["--group", "trainer=2", "--fault", "interrupt:algo-2@step=5", "--grace-s", "0.5", "--max-attempts", "1"]
    ended = _local(jobs, work, *options, mode="deaf")
    assert ended.returncode == 137
    assert [host for host, _ in _said(ended.stdout, "told")] == ["algo-2"]
    for host, num_columns in (("algo-1", 4), ("algo-2", 5)):
        assert f"Host {host} is killed: 0.5 s are over." in ended.stdout
        assert len(_row(ended.stdout, host)) == num_columns
    assert "Attempt" not in ended.stdout


def test_stubborn_hosts_are_killed_when_the_time_is_over(jobs, work):
    """Who ignores SIGTERM gets SIGKILL after --grace-s, and the next attempt begins all the same."""
    ended = _local(jobs, work, "--fault", "interrupt@step=1", "--grace-s", "0.5", mode="stubborn")
    assert ended.returncode == 0
    assert ended.stdout.index("Host algo-1 is killed: 0.5 s are over.") < ended.stdout.index("Attempt 2 of 2")
    assert _row(ended.stdout, "algo-1", 1)[2] == "137"
    assert 0.5 <= float(_row(ended.stdout, "algo-1", 1)[4]) < 10


def test_signal_before_the_launcher_listens_is_lost(jobs, work):
    """Process 1 of a container gets no signal that it did not ask for, and dies of none; nor does a launcher here."""
    options = ["--fault", "hang:algo-1@start", "--fault", "interrupt@after=0", "--grace-s", "0.2"]
    ended = _local(jobs, work, *options)
    assert ended.returncode == 0
    assert "Host algo-1 does not listen to SIGTERM (yet): it is lost." in ended.stdout
    assert _row(ended.stdout, "algo-1", 1)[2] == "137"
    assert "algo-1 | starts 0" in ended.stdout


@pytest.mark.parametrize("kind", ["interrupt", "stop"])
def test_skewed_signals(jobs, work, kind):
    """SIGTERM reaches the hosts the given seconds apart, in an order that repeats with the seed."""
    options = ["--group", "trainer=3", "--fault", f"{kind}@step=5,skew=0.4", "--grace-s", "1", "--max-attempts", "1"]
    orders = []
    for _ in range(2):
        ended = _local(jobs, work, *options, mode="deaf")
        told = sorted((float(at), host) for host, at in _said(ended.stdout, "told"))
        assert len(told) == 3
        assert told[2][0] - told[0][0] > 0.6
        orders.append([host for _, host in told])
    assert orders[0] == orders[1]


def test_stopped_job_has_no_other_attempt(jobs, work):
    """After StopTrainingJob the exit code is what the hosts made of SIGTERM."""
    ended = _local(jobs, work, "--group", "trainer=2", "--fault", "stop@step=5", "--max-attempts", "2")
    assert ended.returncode == 143
    assert "Attempt 2" not in ended.stdout
    assert "Host algo" not in ended.stdout
    assert len(_row(ended.stdout, "algo-1")) == 5


def test_interruption_without_another_attempt(jobs, work):
    """With --max-attempts 1 the job ends with the interruption."""
    ended = _local(jobs, work, "--fault", "interrupt@step=5", "--max-attempts", "1")
    assert ended.returncode == 143
    assert "Attempt" not in ended.stdout


def test_each_fault_happens_in_one_attempt(jobs, work):
    """Two interruptions at the same step are one in each of two attempts; the third attempt succeeds."""
    fault = ["--fault", "interrupt@step=5"]
    ended = _local(jobs, work, *fault, *fault)
    assert ended.returncode == 0
    assert ended.stdout.count("Fault interrupt@step=5: algo-1 at ") == 2
    assert [_row(ended.stdout, "algo-1", attempt)[2] for attempt in (1, 2, 3)] == ["143", "143", "0"]


def test_fault_that_was_not_reached_is_said(jobs, work):
    """A run that ended before a fault was due says so, lest it pass for a run that survived it."""
    ended = _local(jobs, work, "--fault", "interrupt@step=1000")
    assert ended.returncode == 0
    assert "Fault interrupt@step=1000 did not happen." in ended.stdout
    assert "Attempt 2" not in ended.stdout


def test_host_may_be_late(jobs, work):
    """A late host starts the given seconds after the others, and the job waits for it."""
    ended = _local(jobs, work, "--group", "trainer=2", "--fault", "late:algo-2=1.5", mode="started")
    started = {host: float(at) for host, at in _said(ended.stdout, "started")}
    assert ended.returncode == 0
    assert 1.3 < started["algo-2"] - started["algo-1"] < 10


def test_slow_names_reach_all_hosts(jobs, work):
    """Every host is told until when the address does not resolve."""
    options = ["--group", "trainer=1", "--group", "data=1", "--fault", "slow-dns:algo-2=30"]
    ended = _local(jobs, work, *options, mode="names")
    said = _said(ended.stdout, "names")
    assert len(said) == 2
    for _, text in said:
        names, now = text.rsplit(maxsplit=1)
        assert list(json.loads(names)) == ["127.0.0.3"]
        assert 0 < json.loads(names)["127.0.0.3"] - float(now) < 30


def test_slow_names_are_those_of_the_first_attempt(jobs, work):
    """No host of a job without the fault has the variable."""
    ended = _local(jobs, work, mode="names")
    assert SLOW_NAMES_VARIABLE not in os.environ
    assert [text.split()[0] for _, text in _said(ended.stdout, "names")] == ["None"]


def test_ctrl_c_during_an_interruption_ends_the_job(jobs, work):
    """Who does not want to wait for the 120 s does not have to, and no other attempt begins."""
    with _started(jobs, work, "--fault", "interrupt@step=1", mode="stubborn") as emulator:
        _line(emulator, "Fault interrupt")
        asked = time.monotonic()
        emulator.send_signal(signal.SIGINT)
        assert emulator.wait(_TIMEOUT_S) == 130
        assert time.monotonic() - asked < 15
        assert not processes_of(jobs)
        assert "Attempt 2" not in emulator.stdout.read()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--fault", "explode"], "--fault 'explode': there is no fault 'explode'; expected one of\n  kill:HOST@WHEN\n"),
        (["--fault", "kill:algo-9@start"], "there is no host 'algo-9'; the hosts are algo-1, or by their place"),
        (["--fault", "kill-rank:algo-1/1@start"], "there is no local rank 1; --devices is 1"),
        (["--grace-s", "-1"], "--grace-s -1: expected a number of seconds from 0."),
        (["--max-attempts", "0"], "--max-attempts 0: expected a number from 1."),
    ],
)
def test_wrong_faults_start_nothing(jobs, work, options, message):
    """A fault that cannot happen ends the command with exit code 2 and one message, before anything exists."""
    ended = _local(jobs, work, *options)
    assert ended.returncode == 2
    assert ended.stderr.startswith("lightning-sm: error: ")
    assert message in ended.stderr
    assert ended.stdout == ""
    assert not jobs.exists()


def _groups(cluster):
    job = SageMakerJob.from_environment(cluster.hosts[0].env)
    return [(group.name, group.hosts) for group in job.groups]


def test_another_attempt_is_another_draw(tmp_path):
    """Hosts land in groups anew, the same with the same seed; name, port and folders stay, what was in them is gone."""
    spec = ClusterSpec([GroupSpec("trainer", 4), GroupSpec("data", 8)], seed=1, keeps_checkpoints=True)
    drawn = []
    for _ in range(2):
        with LocalCluster(spec, tmp_path) as cluster:
            first, name, folder = _groups(cluster), cluster.name, cluster.hosts[0].base_dir
            port = Topology.from_job(SageMakerJob.from_environment(cluster.hosts[0].env)).main_port
            (folder / "model" / "left").touch()
            (cluster.checkpoint_dir / "last").touch()
            cluster.next_attempt()
            second = _groups(cluster)
            cluster.next_attempt()
            jobs = [SageMakerJob.from_environment(host.env) for host in cluster.hosts]
            drawn.append([first, second, _groups(cluster)])
            assert {Topology.from_job(job).main_port for job in jobs} == {port}
            assert (cluster.name, cluster.hosts[0].base_dir) == (name, folder)
            assert not (folder / "model" / "left").exists()
            assert {job.checkpoint_dir for job in jobs} == {cluster.checkpoint_dir}
            assert (cluster.checkpoint_dir / "last").exists()
            assert all(Topology.from_job(job).role is host.role for job, host in zip(jobs, cluster.hosts, strict=True))
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[0][1] != drawn[0][2]
    assert not list(tmp_path.iterdir())
