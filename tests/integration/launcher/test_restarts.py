"""Restarts within a job of two trainer hosts and a data host. The script does not use torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen

import psutil
import pytest

from lightning_sm.job.variables import HOST_FOLDER
from tests.integration.emulators import in_background, local, processes_of
from tests.integration.faulty_jobs import row
from tests.integration.launching import failure, train

# Each start adds a line "attempt:pid" to NOTES/<host>. In every attempt the trainers meet on the port of rank 0, so a
# restart must have freed it. In the first NUM_FAILURES attempts the second host then fails as FAILS says, while the
# other host waits.
_SCRIPT = """
import os, signal, socket, subprocess, time
from pathlib import Path

import psutil

from lightning_sm.job.control_folder import Phase, announce
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.topology import Role, Topology

job = SageMakerJob.from_environment()
topology = Topology.from_job(job)
notes = Path(os.environ["NOTES"])
kind, num_failures = os.environ["FAILS"], int(os.environ["NUM_FAILURES"])


def lines(name):
    return (notes / name).read_text().split() if (notes / name).exists() else []


def note(name, word):
    with open(notes / name, "a") as file:
        file.write(f"{word}\\n")


def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # at once: the hosts share their output


def meet():
    deadline = time.monotonic() + 60
    while not lines(topology.data_hosts[0]) and time.monotonic() < deadline:
        time.sleep(0.01)
    address = job.addresses[topology.main_host], topology.main_port
    if job.current_host == topology.main_host:
        with socket.create_server(address) as server:
            server.settimeout(60)
            server.accept()[0].sendall(b".")
        return
    while True:
        try:
            with socket.create_connection(address, timeout=60) as connection:
                assert connection.recv(1) == b"."
                return
        except ConnectionRefusedError:
            time.sleep(0.01)


attempt = len(lines(job.current_host)) + 1
started = [line.split(":") for host in topology.trainer_hosts for line in lines(host)]
say("left:", [pid for number, pid in started if int(number) < attempt and psutil.pid_exists(int(pid))])
note(job.current_host, f"{attempt}:{os.getpid()}")
if topology.role is Role.DATA:
    time.sleep(60)
if kind == "import" and job.current_host == topology.trainer_hosts[1]:
    import no_such_module
if kind == "usage":
    import argparse
    argparse.ArgumentParser(prog="train.py").parse_args(["--nix"])
if kind == "deaf" and job.current_host == topology.main_host:
    signal.signal(signal.SIGTERM, lambda *_: None)
meet()
if kind == "wait":
    if job.current_host == topology.main_host:
        announce().beat(0, 1, 0, Phase.TRAINING, trained_epoch=1)
    time.sleep(60)
if attempt <= num_failures:
    if job.current_host == topology.trainer_hosts[1]:
        if kind == "daemon":  # in a session of its own, as the ranks of torchrun are
            daemon = subprocess.Popen(["sleep", "600"], start_new_session=True)
            note("daemons", daemon.pid)
        if kind in ("kill", "daemon"):
            os.kill(os.getpid(), signal.SIGKILL)
        raise ArithmeticError(f"attempt {attempt}")
    time.sleep(60)
say("daemons:", [psutil.pid_exists(int(pid)) for pid in lines("daemons")])
"""


@dataclass
class _Ended:
    """A finished job."""

    code: int
    output: str
    jobs: Path
    notes: Path

    def num_starts(self):
        """Count the starts of the script by host. A seed always assigns the same roles to the hosts."""
        paths = {name: self.notes / name for name in (*self.trainers, self.data)}
        return {name: len(path.read_text().split()) if path.exists() else 0 for name, path in paths.items()}

    @property
    def trainers(self):
        """The sorted names of the trainer hosts."""
        return sorted(re.findall(r"^(algo-\d) +trainer ", self.output, re.MULTILINE))

    @property
    def data(self):
        """The name of the data host."""
        return re.findall(r"^(algo-\d) +data ", self.output, re.MULTILINE)[0]

    def exit_codes(self):
        """Return the exit codes of the trainer hosts, then of the data host."""
        return [int(row(self.output, host)[2]) for host in (*self.trainers, self.data)]

    def reason(self, host):
        """Read a host's failure file."""
        (path,) = self.jobs.glob(f"*/{host}/output/failure")
        return path.read_text()


def _options(tmp_path, work, fails, num_failures, max_restarts, *options):
    (tmp_path / "notes").mkdir()
    (work / "train.py").write_text(_SCRIPT)
    variables = {
        "NOTES": tmp_path / "notes",
        "FAILS": fails,
        "NUM_FAILURES": num_failures,
        "LIGHTNING_SM_MAX_RESTARTS": max_restarts,
    }
    given = [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
    return ["--group", "trainer=2", "--group", "data=1", "--seed", "1", *given, *options, "--", "train.py"]


def _run(tmp_path, jobs, work, fails, num_failures, max_restarts, *options):
    arguments = _options(tmp_path, work, fails, num_failures, max_restarts, *options)
    ended = local(jobs, work, *arguments)
    return _Ended(ended.returncode, ended.stdout + ended.stderr, jobs, tmp_path / "notes")


@pytest.mark.matrix(first=1)
@pytest.mark.parametrize(
    ("fails", "cause"),
    [("exception", "ArithmeticError: attempt 1 on trainer host"), ("kill", "killed by SIGKILL (exit code 137) on")],
)
def test_all_trainer_hosts_start_again_and_the_data_host_goes_on(tmp_path, jobs, work, fails, cause):
    """After an exception or a kill on one host, both trainer hosts restart once, on the same ports, and succeed."""
    ended = _run(tmp_path, jobs, work, fails, 1, 3, "--checkpoints", str(tmp_path / "checkpoints"))
    assert ended.code == 0, ended.output
    assert ended.exit_codes() == [0, 0, 0]
    assert ended.num_starts() == {**dict.fromkeys(ended.trainers, 2), ended.data: 1}
    # No process of the first attempt was left when the second began: 3 first starts and 2 restarts report [].
    assert ended.output.count("left: []") == 5, ended.output
    line = f"Restart 1 of 3: all trainer hosts restart from the latest valid checkpoint. Cause: {cause}"
    assert ended.output.count(line) == 3, ended.output
    assert not list(jobs.glob("*/algo-*/output/failure"))
    assert not processes_of(jobs)


def test_what_a_script_left_elsewhere_is_gone_before_the_restart(tmp_path, jobs, work):
    """Processes in other sessions, which could hold ports and GPUs, are killed before a restart.

    Without a checkpoint folder, the log says that the job restarts from the beginning.
    """
    ended = _run(tmp_path, jobs, work, "daemon", 1, 1)
    assert ended.code == 0, ended.output
    assert ended.output.count("daemons: [False]") == 2, ended.output
    start = "the beginning, because the job has no checkpoint folder"
    assert f"restart from {start}. Cause: " in ended.output


def test_after_the_last_restart_the_job_fails_with_all_it_knows(tmp_path, jobs, work):
    """Both hosts report the last attempt's reason, with the number of restarts and the first cause."""
    ended = _run(tmp_path, jobs, work, "exception", 9, 2)
    assert ended.code == 1, ended.output
    assert ended.num_starts() == {**dict.fromkeys(ended.trainers, 3), ended.data: 1}
    main, other = ended.trainers
    reason = ended.reason(other)
    assert reason.startswith(f"ArithmeticError: attempt 3\non trainer host {other}")
    assert re.search(
        r"\nThe job was restarted 2 times before\. First cause: ArithmeticError: attempt 1 on trainer host ", reason
    )
    assert ended.reason(main) == reason
    assert ended.exit_codes()[2] == 0
    assert ended.output.count("Restart 2 of 2: ") == 3


@pytest.mark.matrix(first=1)
@pytest.mark.parametrize(("fails", "code"), [("usage", 2), ("import", 1)])
def test_errors_that_would_come_again_are_not_retried(tmp_path, jobs, work, fails, code):
    """Wrong arguments and missing modules fail the job without a restart."""
    ended = _run(tmp_path, jobs, work, fails, 1, 3)
    assert ended.code == code, ended.output
    assert max(ended.num_starts().values()) == 1
    assert "Restart 1" not in ended.output
    assert "restarted" not in ended.reason(ended.trainers[1])


def test_a_lost_launcher_is_not_restarted(tmp_path, jobs, work):
    """The job fails when a launcher is killed, because only SageMaker can replace a host."""
    ended = _run(tmp_path, jobs, work, "wait", 0, 3, "--fault", "kill-launcher:trainer-2@step=1")
    assert ended.code == 137, ended.output
    assert set(ended.num_starts().values()) == {1}
    assert "Restart 1" not in ended.output


def _stopped_in_restart(tmp_path, jobs, work, fails, number, stop=Popen.terminate):
    """Run a job that fails in every attempt, and stop it once all hosts have logged this restart."""
    arguments = _options(tmp_path, work, fails, 9, 3)
    with in_background(jobs, work, *arguments) as emulator:
        seen = []
        while sum(f"Restart {number} of 3: " in line for line in seen) < 3:
            seen.append(emulator.stdout.readline())
            assert seen[-1], "".join(seen)
        stop(emulator)
        rest = emulator.communicate(timeout=60)[0]
    return _Ended(emulator.returncode, "".join(seen) + rest, jobs, tmp_path / "notes")


def test_a_stop_ends_a_restart(tmp_path, jobs, work):
    """A host that is waiting to restart exits at once with 143 and the cause, and no script starts again."""
    # The main host's script ignores SIGTERM, so the other host has to wait for it.
    ended = _stopped_in_restart(tmp_path, jobs, work, "deaf", 1)
    main, other = ended.trainers
    assert ended.exit_codes()[1] == 143, ended.output
    assert ended.reason(other).startswith(
        "The job was stopped or interrupted (SIGTERM). This host was waiting for restart 1 of 3. Its cause: "
        f"ArithmeticError: attempt 1 on trainer host {other}"
    )
    assert ended.num_starts() == {main: 1, other: 1, ended.data: 1}


@pytest.mark.proof
def test_a_stop_in_the_pause_before_a_restart(tmp_path, jobs, work):
    """A stop during the pause interrupts all hosts instead of failing them, so SageMaker may restart the job."""
    ended = _stopped_in_restart(tmp_path, jobs, work, "exception", 3)  # preceded by a pause of 2 s
    assert ended.exit_codes() == [143, 143, 0], ended.output
    for host in ended.trainers:
        assert ended.reason(host).startswith("The job was stopped or interrupted (SIGTERM). ")
    assert "This host was waiting for restart 3 of 3. Its cause: Arithmetic" in ended.reason(ended.trainers[1])
    assert ended.num_starts() == {**dict.fromkeys(ended.trainers, 3), ended.data: 1}


@pytest.mark.proof
def test_a_host_that_waits_for_a_restart_is_interrupted_with_the_first_that_is(tmp_path, jobs, work):
    """If one host is stopped first, the other also exits with 143, not with the failure that caused the restart."""

    def stop_main_host(emulator):
        # Only direct children (launchers and the guard): the scripts may still be exiting.
        children = psutil.Process(emulator.pid).children()
        (main,) = (each for each in children if each.environ().get(HOST_FOLDER.name, "").endswith("algo-2"))
        main.terminate()

    ended = _stopped_in_restart(tmp_path, jobs, work, "exception", 3, stop_main_host)
    assert ended.trainers[0] == "algo-2"
    assert ended.exit_codes() == [143, 143, 0], ended.output
    main, other = map(ended.reason, ended.trainers)
    assert main.startswith("The job was stopped or interrupted (SIGTERM). ")
    assert other.startswith(main)


def test_a_hang_restarts_the_script(alone, work):
    """A hang causes a restart, and steps of the first attempt do not count towards the new attempt's hang limit."""
    (work / "train.py").write_text(
        "import pathlib, time\nfrom lightning_sm.job.control_folder import Phase, announce\n"
        "process, started = announce(), pathlib.Path('started')\n"
        "for step in range(3):\n    process.beat(0, step, phase=Phase.TRAINING)\n"
        "if not started.exists():\n    started.touch()\n    time.sleep(60)\nprint('done', flush=True)\n"
    )
    ended = train(alone, work, "train.py", LIGHTNING_SM_MAX_RESTARTS="1", LIGHTNING_SM_HANG_S="1")
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr
    assert "Restart 1 of 1: " in ended.stderr
    assert " Cause: The training hangs: no progress on host algo-1. Last seen: rank 0 at step 2" in ended.stderr


def test_the_only_host_restarts_its_script(alone, work):
    """A host that is alone also restarts its script, and its reason mentions the restart."""
    (work / "train.py").write_text("print('starts', flush=True)\nraise KeyError('x')")
    ended = train(alone, work, "train.py", LIGHTNING_SM_MAX_RESTARTS="1")
    assert (ended.returncode, ended.stdout) == (1, "starts\n" * 2)
    assert failure(alone).startswith("KeyError: 'x'\non trainer host algo-1")
    cause = "KeyError: 'x' on trainer host algo-1 (exit code 1)"
    assert failure(alone).endswith(f"The job was restarted once before. First cause: {cause}")
