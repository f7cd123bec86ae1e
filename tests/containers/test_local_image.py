"""``lightning-sm local --image``: emulated hosts as containers of our image, with separate files, faults and exits."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from tests.containers.engine import docker
from tests.integration.emulators import in_background, job_dir, local, until

pytestmark = pytest.mark.docker

_SCRIPTS = Path(__file__).parent / "scripts"
_SCRIPT = "emulated_host.py"
# Only a hang reaches this limit: containers share the cores with other work.
_DEADLINE_S = 600
_NO_REPORT = "LIGHTNING_SM_REPORT_S=0"
# Makes hosts wait for a launcher that starts late on a busy machine.
_ALL_MEET = "LIGHTNING_SM_PEERS_TIMEOUT_S=600"


@pytest.fixture
def options(image, tmp_path):
    """Options of the command for our image; no container of its jobs may be left after the test."""
    yield ["--image", image, "--env", _NO_REPORT, "--env", _ALL_MEET]
    assert not _left(tmp_path)


def _left(tmp_path):
    """Return the containers and networks left by the jobs of a test."""
    left = []
    for folder in (tmp_path / "jobs").glob("local-*"):
        for kind in (("ps", "--all"), ("network", "ls")):
            left += docker(*kind, "--quiet", "--filter", f"label=lightning-sm.job={folder.name}").stdout.split()
    return left


def _run(tmp_path, *args, **variables):
    return local(tmp_path / "jobs", _SCRIPTS, *args, timeout_s=_DEADLINE_S, **variables)


def _facts(folder):
    return {path.parts[-3]: json.loads(path.read_text()) for path in sorted(folder.glob("algo-*/model/facts.json"))}


def _lines_until(process, *texts):
    """Read the output until each of some texts has been in a line."""
    read, missing = [], list(texts)
    for line in process.stdout:
        read.append(line)
        missing = [text for text in missing if text not in line]
        if not missing:
            return
    raise AssertionError(f"{missing} not in:\n{''.join(read)}")


def test_hosts_are_containers_with_files_and_names_of_their_own(options, tmp_path):
    """Each host has the service's name, address, groups and channels, and none of this machine's variables."""
    (tmp_path / "points, of data").mkdir()
    (tmp_path / "points, of data" / "one").touch()
    groups = ["--group", "trainer=2", "--group", "data=1"]
    settings = ["--channel", f"training={tmp_path / 'points, of data'}", "--env", "LINES_OF_TEXT=one\ntwo"]
    ended = _run(tmp_path, *options, *groups, *settings, "--", _SCRIPT, "end", ONLY_ON_THIS_MACHINE="here")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    facts = _facts(job_dir(tmp_path / "jobs"))
    assert sorted(one["group"] for one in facts.values()) == ["data", "trainer", "trainer"]
    for host, one in facts.items():
        assert one["hostname"] == host
        assert one["addresses"] == 3
        assert one["interface"]
        assert one["channels"] == {"training": ["one"]}
        assert one["writable"] == []
        assert one["lines"] == "one\ntwo"
        assert one["leaked"] is one["checkpoint"] is None
        assert one["free_memory"] > 1e9
    assert f"{job_dir(tmp_path / 'jobs')}/algo-1/model" in ended.stdout


def test_an_interrupted_job_finds_its_checkpoint_in_the_next_attempt(options, tmp_path):
    """SIGTERM reaches process 1 of each container; the second attempt has the checkpoint, and otherwise new folders."""
    faults = ["--group", "trainer=2", "--fault", "interrupt@step=5"]
    ended = _run(tmp_path, *options, *faults, "--", _SCRIPT, "wait")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    folder = job_dir(tmp_path / "jobs")
    assert {one["checkpoint"] for one in _facts(folder / "attempt-1").values()} == {None}
    assert [one["checkpoint"] for one in _facts(folder).values()] == ["saved", "saved"]
    assert (folder / "checkpoints" / "last").read_text() == "saved"


@pytest.mark.matrix(first=1)
@pytest.mark.parametrize(
    ("fault", "exit_code", "reason"),
    [
        ("kill-rank:algo-2@step=5", 137, "killed by SIGKILL (exit code 137) on trainer host algo-2, rank 1"),
        ("kill:algo-2@step=5", 137, "killed by SIGKILL (exit code 137) on trainer host algo-2, which gave no reason"),
    ],
)
def test_a_killed_process_or_container_fails_the_job(options, tmp_path, fault, exit_code, reason):
    """The launcher reports a killed rank; a killed process 1 ends the whole container."""
    ended = _run(tmp_path, *options, "--group", "trainer=2", "--fault", fault, "--", _SCRIPT, "wait")
    assert ended.returncode == exit_code, ended.stdout + ended.stderr
    assert reason in ended.stdout


def test_a_stopped_job_ends_also_a_host_that_hangs(options, tmp_path):
    """Ctrl-C stops all hosts, even one whose container the fault has paused."""
    faults = ["--group", "trainer=2", "--fault", "hang:algo-2@step=5"]
    with in_background(tmp_path / "jobs", _SCRIPTS, *options, *faults, "--", _SCRIPT, "wait") as process:
        _lines_until(process, "Fault hang:algo-2@step=5")
        container = f"{job_dir(tmp_path / 'jobs').name}-algo-2"
        state = ["inspect", "--format", "{{.State.Status}}", container]
        until(lambda: docker(*state).stdout.strip() == "paused", "algo-2 is paused", _DEADLINE_S)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=_DEADLINE_S)[0]
    assert process.returncode == 128 + signal.SIGINT, said
    assert "Stopping all hosts: SIGINT." in said


@pytest.mark.proof
def test_a_host_that_hangs_hears_of_no_interruption(options, tmp_path):
    """SIGTERM does not resume a paused container: the host is killed after the grace period."""
    faults = ["--fault", "hang:algo-2@step=5", "--fault", "interrupt@step=5", "--grace-s", "3"]
    ended = _run(tmp_path, *options, "--group", "trainer=2", *faults, "--", _SCRIPT, "wait")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Killing host algo-2: the grace period of 3 s is over." in ended.stdout


def test_nothing_outlives_a_command_that_is_killed(options, tmp_path):
    """The guard removes the containers and the network of a killed command."""
    command = [*options, "--group", "trainer=2", "--", _SCRIPT, "wait"]
    with in_background(tmp_path / "jobs", _SCRIPTS, *command) as process:
        _lines_until(process, "algo-1 | waits", "algo-2 | waits")
        assert _left(tmp_path)
        process.kill()
        until(lambda: not _left(tmp_path), "nothing is left", _DEADLINE_S)


@pytest.mark.matrix(first=2)
@pytest.mark.parametrize(
    ("args", "message"),
    [(["--", sys.executable + ".py"], "cannot be read"), (["--", __file__], "is outside the current folder")],
)
def test_what_containers_cannot_do_is_refused(image, tmp_path, args, message):
    """Nothing is started, and the message names the option or the script."""
    ended = _run(tmp_path, "--image", image, *args)
    assert ended.returncode == 2
    assert message in ended.stderr
    assert not (tmp_path / "jobs").exists()


def test_an_image_that_docker_does_not_have_is_named(engine, tmp_path):
    """The message has the commands that build or fetch the image."""
    ended = _run(tmp_path, "--image", "lightning-sm-test/nowhere")
    assert ended.returncode == 2
    assert "Docker has no image 'lightning-sm-test/nowhere' on this machine" in ended.stderr
