"""lightning-sm jobs shell against a service on this machine, and with programs in place of AWS's."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.fakes.sagemaker_service import FakeService

RUNNING = {"TrainingJobStatus": "InProgress", "SecondaryStatus": "Training"}
ENABLED = {"EnableRemoteDebug": True}
HOSTS = {"InstanceType": "ml.g5.xlarge", "InstanceCount": 2}


@pytest.fixture
def programs(tmp_path):
    """A folder with programs that say how they were called."""
    for name in ("aws", "session-manager-plugin"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text('#!/bin/sh\necho "$@"\nexit 7\n')
        program.chmod(0o755)
    return tmp_path / "bin"


def described(**changed):
    """A service whose only job runs on two hosts."""
    job = {"TrainingJobName": "job-1", "ResourceConfig": HOSTS, "RemoteDebugConfig": ENABLED}
    return FakeService(endings=[RUNNING | changed], requests=[job | changed])


def test_the_command_of_aws_takes_over(programs):
    """With the job's host and region; its exit code is that of the command."""
    with described() as service:
        kept = {name: value for name, value in os.environ.items() if not name.upper().startswith("AWS")}
        done = subprocess.run(
            [sys.executable, "-m", "lightning_sm", "jobs", "shell", "job-1", "algo-2"],
            env={**kept, **service.environment, "PATH": f"{programs}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    target = "sagemaker-training-job:job-1_algo-2"
    assert done.stdout == f"ssm start-session --region us-east-1 --target {target}\n", done.stderr
    assert done.returncode == 7


@pytest.mark.parametrize(
    ("changed", "host", "words"),
    [
        ({"TrainingJobStatus": "Stopped"}, "algo-1", "has ended: Stopped"),
        ({}, "algo-3", "no host algo-3; its hosts are algo-1, algo-2"),
        ({"RemoteDebugConfig": {}}, "algo-1", "Turn it on: lightning-sm jobs debug job-1"),
        ({"SecondaryStatus": "Downloading"}, "algo-1", "job-1 is Downloading; its hosts can be reached while"),
        ({}, "algo-1", "not on PATH: session-manager-plugin (Systems Manager user guide"),
    ],
)
def test_what_a_shell_lacks_is_said(jobs, programs, monkeypatch, changed, host, words):
    """The state of the job, its host, the permission, and the programs on this machine."""
    (programs / "session-manager-plugin").unlink()
    monkeypatch.setenv("PATH", str(programs))
    with described(**changed) as service:
        code, _, log = jobs(service, "shell", "job-1", host)
    assert code == 2
    assert words in log
