"""Interruptions, restarts and stops injected into an emulated job, and the attempts that follow."""

from __future__ import annotations

import re
import signal
import time

import pytest

from tests.integration.emulators import processes_of
from tests.integration.faulty_jobs import TIMEOUT_S, read_to_line, row, run_faulty, said_after, started_faulty


def test_interrupted_job_resumes_from_its_checkpoint(jobs, work):
    """The second attempt keeps the job's name, port and checkpoints, and nothing else from the first."""
    options = ["--group", "trainer=2", "--group", "data=1", "--fault", "interrupt@step=8"]
    ended = run_faulty(jobs, work, *options, held=[19])
    assert ended.returncode == 0, ended.stdout
    first, second = ended.stdout.split("Attempt 2 of 2\n")
    starts = [[text.split(maxsplit=3) for _, text in said_after(output, "starts")] for output in (first, second)]
    assert [len(hosts) for hosts in starts] == [3, 3]
    assert {hosts[0] for hosts in starts[0]} == {"0"}
    assert all(8 <= int(hosts[0]) < 20 for hosts in starts[1])
    ((name, _port),) = {(hosts[1], hosts[2]) for hosts in starts[0] + starts[1]}
    assert {hosts[3] for hosts in starts[0] + starts[1]} == {"[]"}
    bucket = jobs / name / "checkpoints"
    assert first.startswith(f"Folder that stands in for the checkpoints' location in S3: {bucket}\nAttempt 1 of 2\n")
    assert (jobs / name / "checkpoints" / "step").read_text() == "20"
    assert (jobs / name / "attempt-1" / "algo-1" / "left").exists()
    assert "told" not in second
    for host in ("algo-1", "algo-2", "algo-3"):
        # A data host exits with 0 if it learns that the training is over before SIGTERM arrives.
        assert (
            row(ended.stdout, host, 1)[2] in {"trainer": ["143"], "data": ["143", "0"]}[row(ended.stdout, host, 1)[1]]
        )
        assert 0 < float(row(ended.stdout, host, 1)[4]) < 10
        assert row(ended.stdout, host, 2)[2] == "0"
        assert len(row(ended.stdout, host, 2)) == 4


def test_a_host_that_still_saves_is_left_alone_when_another_has_left(jobs, work):
    """When all hosts are stopped, a host may keep saving after another one has exited."""
    ended = run_faulty(jobs, work, "--group", "trainer=2", "--fault", "stop@step=1", mode="save_longer")
    assert ended.returncode == 143, ended.stdout
    assert "saved ['SIGUSR2']" in ended.stdout


def test_folders_of_all_attempts_are_discarded(jobs, work):
    """--discard removes the checkpoints in the job's folder, but keeps a folder given with --checkpoints."""
    options = ["--discard", "--fault", "restart@step=8"]
    assert run_faulty(jobs, work, *options, held=[19]).returncode == 0
    assert list(jobs.iterdir()) == []
    assert run_faulty(jobs, work, *options, "--checkpoints", "kept", held=[19]).returncode == 0
    assert list(jobs.iterdir()) == []
    assert (work / "kept" / "step").read_text() == "20"


def test_restart_kills_all_without_a_word(jobs, work):
    """A restart kills all hosts without SIGTERM, as after a hardware failure, and starts the next attempt."""
    ended = run_faulty(jobs, work, "--group", "trainer=2", "--fault", "restart@epoch=2", held=[19])
    assert ended.returncode == 0
    assert "told" not in ended.stdout
    assert [row(ended.stdout, f"algo-{host}", 1)[2] for host in (1, 2)] == ["137", "137"]
    assert [text.split()[0] for _, text in said_after(ended.stdout, "starts")] == ["0"] * 4
    assert re.search(r"^Fault restart@epoch=2: algo-1, algo-2 at step 1\d, epoch 2, ", ended.stdout, re.M)


def test_interruption_of_one_host(jobs, work):
    """Only the interrupted host gets SIGTERM; hosts that still run after the grace period are killed."""
    options = ["--group", "trainer=2", "--fault", "interrupt:algo-2@step=5", "--grace-s", "1"]
    ended = run_faulty(jobs, work, *options, mode="deaf")
    assert ended.returncode == 0
    assert [host for host, _ in said_after(ended.stdout, "told")] == ["algo-2"]
    for host, num_columns in (("algo-1", 4), ("algo-2", 5)):
        assert f"Killing host {host}: the grace period of 1 s is over." in ended.stdout
        assert len(row(ended.stdout, host, 1)) == num_columns


def test_stubborn_hosts_are_killed_when_the_time_is_over(jobs, work):
    """A host that ignores SIGTERM is killed after --grace-s, and the next attempt starts anyway."""
    ended = run_faulty(jobs, work, "--fault", "interrupt@step=1", "--grace-s", "0.5", mode="stubborn")
    assert ended.returncode == 0
    assert ended.stdout.index("Killing host algo-1: the grace period of 0.5 s is over.") < ended.stdout.index(
        "Attempt 2 of 2"
    )
    assert row(ended.stdout, "algo-1", 1)[2] == "137"
    assert 0.5 <= float(row(ended.stdout, "algo-1", 1)[4]) < 10


def test_signal_before_the_launcher_listens_is_lost(jobs, work):
    """SIGTERM before the launcher installs its handler is lost, as it is for process 1 of a container."""
    options = ["--fault", "hang:algo-1@start", "--fault", "interrupt@after=0", "--grace-s", "0.2"]
    ended = run_faulty(jobs, work, *options)
    assert ended.returncode == 0
    assert "Host algo-1 has no SIGTERM handler yet: the signal is lost." in ended.stdout
    assert row(ended.stdout, "algo-1", 1)[2] == "137"
    assert "algo-1 | starts 0" in ended.stdout


@pytest.mark.matrix(first=1)
@pytest.mark.parametrize("kind", ["stop", "interrupt"])
def test_skewed_signals(jobs, work, kind):
    """SIGTERM reaches the hosts ``skew`` seconds apart, in an order that the seed reproduces."""
    options = ["--group", "trainer=3", "--fault", f"{kind}@step=5,skew=1"]
    orders = []
    for _ in range(2):
        ended = run_faulty(jobs, work, *options, mode="leave_together")
        told = sorted((float(at), host) for host, at in said_after(ended.stdout, "told"))
        assert len(told) == 3
        assert told[2][0] - told[0][0] > 1.0  # 2 s at best: each host may receive it late
        orders.append([host for _, host in told])
    assert orders[0] == orders[1]


def test_stopped_job_has_no_other_attempt(jobs, work):
    """A stopped job starts no further attempt, and exits with the code that its hosts return after SIGTERM."""
    ended = run_faulty(jobs, work, "--group", "trainer=2", "--fault", "stop@step=5", held=[19])
    assert ended.returncode == 143
    assert "Attempt" not in ended.stdout
    assert "Killing host" not in ended.stdout
    assert "Host algo" not in ended.stdout
    assert len(row(ended.stdout, "algo-1")) == 5


def test_each_fault_happens_in_one_attempt(jobs, work):
    """Two faults at the same step interrupt one attempt each; the third attempt succeeds."""
    fault = ["--fault", "interrupt@step=5"]
    ended = run_faulty(jobs, work, *fault, *fault, held=[9, 19])
    assert ended.returncode == 0
    assert ended.stdout.count("Fault interrupt@step=5: algo-1 at ") == 2
    assert [row(ended.stdout, "algo-1", attempt)[2] for attempt in (1, 2, 3)] == ["143", "143", "0"]


def test_fault_that_was_not_reached_is_said(jobs, work):
    """A run that ends before a fault is due reports it, lest it pass for a run that survived the fault."""
    ended = run_faulty(jobs, work, "--fault", "interrupt@step=1000")
    assert ended.returncode == 0
    assert "Fault interrupt@step=1000 did not happen." in ended.stdout
    assert "Attempt 2" not in ended.stdout


def test_ctrl_c_during_an_interruption_ends_the_job(jobs, work):
    """Ctrl-C ends an interrupted job without waiting for the 120 s grace period or starting another attempt."""
    with started_faulty(jobs, work, "--fault", "interrupt@step=1", mode="stubborn") as emulator:
        read_to_line(emulator, "Fault interrupt")
        asked = time.monotonic()
        emulator.send_signal(signal.SIGINT)
        assert emulator.wait(TIMEOUT_S) == 130
        assert time.monotonic() - asked < 60
        assert not processes_of(jobs)
        assert "Attempt 2" not in emulator.stdout.read()
