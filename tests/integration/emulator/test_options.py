"""Options of ``lightning-sm local``: ``--help`` shows examples, and wrong options start nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.integration.emulators import TIMEOUT_S, local
from tests.integration.faulty_jobs import run_faulty


def test_help_has_examples():
    """``--help`` of both commands shows an example."""
    for command, example in (("train", "SAGEMAKER_PROGRAM"), ("local", "--group trainer=2 --group data=1")):
        arguments = [sys.executable, "-m", "lightning_sm", command, "--help"]
        ended = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
        assert example in ended.stdout


@pytest.mark.matrix(first=6)
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--group", "trainer"], "--group 'trainer': expected NAME=COUNT"),
        (["--group", "trainer=x"], "--group 'trainer=x'"),
        (["--group", "trainer=1:t2"], "--group 'trainer=1:t2'"),
        (["--group", "trainer=0"], "Group 'trainer' has 0 hosts"),
        (["--group", "trainer=300"], "300 hosts"),
        (["--group", "a=1", "--group", "a=2"], "Group 'a' is named twice"),
        (["--group", "data=1", "--group", "data2=1"], "No group trains"),
        (["--group", "a=1:ml.g5.xlarge", "--group", "b=1:ml.g5.12xlarge"], "different numbers of GPUs"),
        (["--devices", "0"], "--devices is 0"),
        (["--channel", "x"], "--channel 'x': expected NAME=DIR"),
        (["--channel", "x=nix"], "Channel 'x': the folder 'nix' does not exist"),
        (["--channel", "x=.", "--channel", "x=."], "'x' is given twice"),
        (["--channel", "a/b=."], "Channel 'a/b'"),
        (["--channel", "..=."], "Channel '..'"),
        (["--env", "X"], "--env 'X': expected NAME=VALUE"),
        (["--env", "A_TOKEN=x", "--env", "A_TOKEN=y"], "--env 'A_TOKEN=(hidden)': 'A_TOKEN' is given twice"),
        (["--hyperparameters", "nix.json"], "nix.json"),
        (["--hyperparameters", "broken.json"], "broken.json"),
        (["--hyperparameters", "broken.yaml"], "broken.yaml"),
        (["--hyperparameters", "list.yaml"], "is not a mapping from names to values"),
        (["--base-dir", "broken.yaml"], "broken.yaml"),
        (["--checkpoints", "broken.yaml"], "broken.yaml"),
    ],
)
def test_bad_options_start_nothing(jobs, work, args, message):
    """A wrong option makes the command exit with code 2 and one message that names it, and creates nothing."""
    (work / "train.py").write_text("print('started')")
    (work / "broken.json").write_text("{'a': 1}")
    (work / "broken.yaml").write_text("a: [1\nb: 2")
    (work / "list.yaml").write_text("- 1")
    ended = local(jobs, work, *args, "--", "train.py")
    assert ended.returncode == 2
    assert message in ended.stderr
    assert ended.stderr.startswith("lightning-sm: error: ")
    assert "Traceback" not in ended.stderr
    assert ended.stdout == ""
    assert list(jobs.glob("*")) == []


@pytest.mark.matrix(first=2)
@pytest.mark.parametrize(
    ("script", "message"),
    [
        ([], "No training script was given"),
        (["nix.py"], "'nix.py' cannot be read"),
        (["notes.txt"], "not a Python file"),
        (["broken.py"], "broken.py:2: "),
        (["null.py"], "null.py"),
    ],
)
def test_bad_scripts_start_nothing(jobs, work, script, message):
    """A script that is missing or does not compile is reported once, not by every host."""
    (work / "broken.py").write_text("x = 1\ndef f(:\n")
    (work / "notes.txt").write_text("x = 1\n")
    (work / "null.py").write_bytes(b"x = '\0'\n")
    ended = local(jobs, work, "--group", "trainer=3", "--", *script)
    assert ended.returncode == 2
    assert message in ended.stderr
    assert ended.stdout == ""
    assert not jobs.exists()


@pytest.mark.matrix(first=2)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--fault", "explode"], "--fault 'explode': unknown fault 'explode'; expected one of\n  kill:HOST@WHEN\n"),
        (["--fault", "kill:algo-9@start"], "there is no host 'algo-9'; the hosts are algo-1, or by position"),
        (["--fault", "kill-rank:algo-1/1@start"], "no local rank 1; --devices is 1"),
        (["--grace-s", "-1"], "--grace-s -1: expected 0 seconds or more."),
    ],
)
def test_wrong_faults_start_nothing(jobs, work, options, message):
    """A fault that cannot happen makes the command exit with code 2 and one message, and creates nothing."""
    ended = run_faulty(jobs, work, *options)
    assert ended.returncode == 2
    assert ended.stderr.startswith("lightning-sm: error: ")
    assert message in ended.stderr
    assert ended.stdout == ""
    assert not jobs.exists()
