"""On macOS, simulated by ``not_linux``, scripts train and emulated jobs run; what needs Linux is refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.emulators import SCRIPT_START, TIMEOUT_S, in_background, job_dir, local, processes_of, until
from tests.integration.hosts import REPOSITORY, script

MACOS = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent / "not_linux"), str(REPOSITORY)])}
ADDRESSES = SCRIPT_START + "print('addresses', os.environ['LIGHTNING_SM_HOST_ADDRESSES'], os.environ['DISABLE_MPS'])\n"
# Starts a daemon in a new session, which outlives its parent and its host's launcher.
DAEMON = """\
import os, subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("left a daemon", flush=True)
"""
NEEDED = re.compile(r"needs Linux, but this system is macOS\. ")


@pytest.fixture
def places(tmp_path):
    """The folders of the jobs and of the script."""
    for name in ("jobs", "work"):
        (tmp_path / name).mkdir()
    return tmp_path / "jobs", tmp_path / "work"


def test_emulated_job_runs(places):
    """An emulated job runs on two hosts that share the only loopback address."""
    jobs, work = places
    (work / "train.py").write_text(ADDRESSES)
    ended = local(jobs, work, "--group", "trainer=2", "--", "train.py", **MACOS)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("addresses " + '{"algo-1": "127.0.0.1", "algo-2": "127.0.0.1"} 1') == 2
    assert "Traceback" not in ended.stdout + ended.stderr
    config = json.loads((job_dir(jobs) / "algo-1" / "input" / "config" / "resourceconfig.json").read_text())
    assert config["network_interface_name"] == "lo0"


def test_failure_of_one_host_ends_the_other(places):
    """The launchers communicate over the shared address, and both hosts report the failure of one."""
    jobs, work = places
    (work / "train.py").write_text(
        SCRIPT_START + "import time\nif host == 'algo-2':\n    raise ArithmeticError('too large')\ntime.sleep(60)\n"
    )
    ended = local(jobs, work, "--group", "trainer=2", "--", "train.py", **MACOS)
    assert ended.returncode == 1
    for host in ("algo-1", "algo-2"):
        assert "ArithmeticError: too large" in (job_dir(jobs) / host / "output" / "failure").read_text()


def test_orphans_end_with_the_job(places):
    """A daemon that the script left behind is killed with the job, although it is no child of the emulator on macOS."""
    jobs, work = places
    (work / "train.py").write_text(
        DAEMON + "import time\nfrom lightning_sm.job.control_folder import Phase, announce\n"
        "announce().beat(0, 1, 0, Phase.TRAINING, trained_epoch=1)\ntime.sleep(60)\n"
    )
    ended = local(
        jobs, work, "--group", "trainer=1", "--fault", "kill-launcher:algo-1@step=1", "--", "train.py", **MACOS
    )
    assert ended.returncode == 137, ended.stdout
    assert "left a daemon" in ended.stdout
    assert processes_of(jobs) == []


def test_hosts_end_with_a_killed_emulator(places):
    """If the emulator is killed, its guard kills the hosts, because macOS sends no signal when a parent dies."""
    jobs, work = places
    (work / "train.py").write_text(DAEMON + "import threading\nthreading.Event().wait(600)\n")
    with in_background(jobs, work, "--group", "trainer=2", "--", "train.py", **MACOS) as emulator:
        for _ in range(2):
            while not (line := emulator.stdout.readline()).endswith("left a daemon\n"):
                assert line
        emulator.kill()
        until(lambda: not processes_of(jobs), "no process is left", TIMEOUT_S)


def test_what_needs_linux_is_refused_in_one_line(places):
    """A cluster with data hosts is refused in one line, and nothing is started."""
    jobs, work = places
    (work / "train.py").write_text("print('started')")
    ended = local(jobs, work, "--group", "trainer=1", "--group", "data=1", "--", "train.py", **MACOS)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("lightning-sm: error: A cluster with data hosts (algo-")
    assert NEEDED.search(line)
    assert (ended.stdout, list(jobs.iterdir())) == ("", [])


def test_doctor_tells(tmp_path):
    """The doctor warns that jobs with data hosts need Linux."""
    ended = subprocess.run(
        [sys.executable, "-m", "lightning_sm", "doctor", "--json"],
        env={**os.environ, **MACOS, "SAGEMAKER_BASE_DIR": str(tmp_path / "none")},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    (result,) = [row for row in json.loads(ended.stdout)["results"] if row["name"] == "system"]
    assert result["status"] == "warning"
    assert result["found"] == "This system is macOS: jobs with data hosts need Linux."


@pytest.mark.processes
def test_script_with_the_cli_trains(tmp_path):
    """Every module can be imported, SageMakerCLI fits and tests, and data hosts raise an error that names Linux."""
    ended = subprocess.run(
        [*script("without_linux.py"), "fit", "--trainer.max_epochs=1", "--trainer.accelerator=cpu"],
        cwd=tmp_path,
        env={**os.environ, **MACOS, "PRELOAD": "torch pytorch_lightning.cli grpc tensorboard.compat"},
        capture_output=True,
        text=True,
        timeout=2 * TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("seen:")]
    seen = json.loads(line.removeprefix("seen:"))
    assert {name.partition(".")[0] for name in seen["missing"]} <= {"sagemaker", "sagemaker_training"}
    assert seen["steps"] == 4
    assert NEEDED.search(seen["remote"])
    assert NEEDED.search(seen["host"])
