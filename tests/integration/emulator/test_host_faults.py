"""Faults injected into single hosts: kills, hangs and late starts."""

from __future__ import annotations

import re
import signal

import pytest

from tests.integration.emulators import processes_of, until
from tests.integration.faulty_jobs import TIMEOUT_S, read_to_line, row, run_faulty, said_after, started_faulty


def test_killed_host_vanishes_as_a_whole(jobs, work):
    """A killed host leaves no process behind, not even a daemon, and the job fails with its exit code."""
    ended = run_faulty(jobs, work, "--group", "trainer=2", "--fault", "kill:algo-2@step=5", mode="watch_kill")
    assert ended.returncode == 137
    assert re.search(r"^Fault kill:algo-2@step=5: algo-2 at step \d+, epoch \d+, \d+\.\d s\.$", ended.stdout, re.M)
    assert "Host algo-2 (group trainer) failed with exit code 137." in ended.stdout
    assert said_after(ended.stdout, "left of algo-2:") == [("algo-1", "[]")]
    assert row(ended.stdout, "algo-2")[:3] == ["trainer", "trainer", "137"]


def test_killed_training_process_is_reported_by_its_launcher(jobs, work):
    """Without a local rank, the fault kills the script; its launcher survives and reports the reason."""
    options = ["--group", "trainer=1", "--group", "data=1", "--fault", "kill-rank:trainer-1@step=5"]
    ended = run_faulty(jobs, work, *options, mode="endless")
    (trainer,) = re.findall(r"^Fault kill-rank:trainer-1@step=5: (algo-\d) at ", ended.stdout, re.M)
    assert ended.returncode == 137
    assert ended.stdout.rpartition("The job failed:\n")[2].startswith(
        f"killed by SIGKILL (exit code 137) on trainer host {trainer}, rank 0; "
    )


@pytest.mark.matrix(rows=["1"])
@pytest.mark.parametrize("rank", [0, 1])
def test_killed_local_rank(jobs, work, rank):
    """Only the named local rank is killed, not its worker, its parent process or the other rank."""
    options = ["--devices", "2", "--fault", f"kill-rank:algo-1/{rank}@step=1"]
    ended = run_faulty(jobs, work, *options, mode="local_ranks")
    assert f"rank {rank}: killed by SIGKILL (exit code 137). Terminating the other ranks on this host." in ended.stdout
    assert ended.returncode == 137


def test_killed_launcher_leaves_its_script(jobs, work):
    """Only the launcher is killed; its script runs until the job ends."""
    options = ["--group", "trainer=2", "--fault", "kill-launcher:algo-2@step=10"]
    ended = run_faulty(jobs, work, *options, mode="watch_launcher")
    assert ended.returncode == 137
    assert ended.stdout.endswith(
        "The job failed:\nkilled by SIGKILL (exit code 137) on trainer host algo-2, which gave no reason\n"
    )
    assert int(dict(said_after(ended.stdout, "left of algo-2:"))["algo-1"]) >= 1
    assert not processes_of(jobs)


def test_hanging_host_resumes_after_its_time(jobs, work):
    """All processes of a hanging host, including its launcher, stop and resume together."""
    options = ["--group", "trainer=2", "--fault", "hang:algo-2,for=3@step=1"]
    ended = run_faulty(jobs, work, *options, mode="watch_hang")
    assert ended.returncode == 0, ended.stdout
    lines = [line for line in ended.stdout.splitlines() if "stopped" in line or line.startswith(("Fault", "Host"))]
    assert lines[0].startswith("Fault hang:algo-2,for=3@step=1: algo-2 at step 1")
    assert sorted(lines[1:]) == ["Host algo-2 resumed.", "algo-1 | all stopped", "algo-1 | none stopped"]


def test_frozen_host_ends_with_a_killed_emulator(jobs, work):
    """When the emulator is killed, a frozen host gets SIGKILL, the only signal that it can react to."""
    with started_faulty(jobs, work, "--fault", "hang:algo-1@after=0", mode="ready_and_wait") as emulator:
        read_to_line(emulator, "Fault hang")
        assert processes_of(jobs)
        emulator.kill()
        until(lambda: not processes_of(jobs), "no process is left", TIMEOUT_S)


@pytest.mark.proof
def test_frozen_host_ends_with_the_job(jobs, work):
    """A host that hangs for good is killed when another host fails."""
    options = ["--group", "trainer=2", "--fault", "hang:algo-2@step=1"]
    ended = run_faulty(jobs, work, *options, mode="fail_beside_frozen")
    assert ended.returncode == 3
    assert ended.stderr == ""
    assert row(ended.stdout, "algo-2")[2] == "137"
    assert not processes_of(jobs)


def test_frozen_host_ends_with_ctrl_c(jobs, work):
    """Ctrl-C does not wait for a frozen host, which cannot react to SIGTERM."""
    with started_faulty(jobs, work, "--fault", "hang:algo-1@start", mode="ready_and_wait") as emulator:
        read_to_line(emulator, "Fault hang")
        emulator.send_signal(signal.SIGINT)
        assert emulator.wait(TIMEOUT_S) == 130
        assert not processes_of(jobs)


def test_host_may_be_late(jobs, work):
    """A late host starts the given seconds after the others, and the job waits for it."""
    ended = run_faulty(jobs, work, "--group", "trainer=2", "--fault", "late:algo-2=1.5", mode="started")
    started = {host: float(at) for host, at in said_after(ended.stdout, "started")}
    assert ended.returncode == 0
    assert 1.0 < started["algo-2"] - started["algo-1"] < 60  # the first host may start late as well
