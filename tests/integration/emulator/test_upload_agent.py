"""The emulator's agent, which uploads each host's checkpoints, and the service's reaction to exit codes."""

from __future__ import annotations

import os
import re
from types import SimpleNamespace

import pytest

from lightning_sm.emulator.agent import UploadAgent, download
from lightning_sm.job.uploads import is_uploaded
from tests.integration.emulators import SCRIPT_START, job_dir, local, until
from tests.integration.faulty_jobs import row, run_faulty, said_after

_TIMEOUT_S = 60


@pytest.fixture
def bucket(tmp_path):
    """The folder that stands in for S3, with one object."""
    folder = tmp_path / "bucket"
    folder.mkdir()
    (folder / "old").write_text("of an earlier attempt")
    return folder


@pytest.fixture
def folder(tmp_path, bucket):
    """The checkpoint folder of a host that is about to start."""
    path = tmp_path / "host" / "checkpoints"
    download(bucket, path)
    return path


@pytest.fixture
def start(folder, bucket):
    """A function that starts the host's agent, given the seconds that an upload takes."""
    agents = []

    def make(delay_s):
        agents.append(UploadAgent(folder, bucket, "algo-1", delay_s))
        return agents[-1]

    yield make
    for agent in agents:
        agent.stop()


def wait(condition, what):
    """Wait until the agent has done something."""
    until(condition, what, _TIMEOUT_S)


def write(path, content):
    """Write a file and rename it, so that the agent never sees a part of it."""
    unfinished = path.with_name(f"{path.name}.sagemaker-ignore")
    unfinished.write_text(content)
    unfinished.replace(path)


def names(path):
    """Names of all files and folders at any depth, except the job's record."""
    found = (str(found.relative_to(path)) for found in path.rglob("*"))
    return sorted(name for name in found if not name.startswith("lightning-sm-record"))


@pytest.fixture
def clock(monkeypatch):
    """The clock of all agents, in seconds, as the only item of a list."""
    now = [0.0]
    monkeypatch.setattr("lightning_sm.emulator.agent.time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_a_file_is_marked_while_it_is_uploaded_and_afterwards(folder, bucket, clock, start):
    """Files are marked .sagemaker-uploading, then .sagemaker-uploaded; new content is uploaded again."""
    start(5)
    write(folder / "a", "first")
    wait((folder / "a.sagemaker-uploading").exists, "the upload begins")
    assert not is_uploaded(folder / "a")
    assert names(bucket) == ["old"]
    clock[0] = 5.0
    wait(lambda: is_uploaded(folder / "a"), "the upload ends")
    assert (bucket / "a").read_text() == "first"
    wait(lambda: not (folder / "a.sagemaker-uploading").exists(), "the first marker is gone")
    write(folder / "a", "second")
    wait((folder / "a.sagemaker-uploading").exists, "its upload begins")
    clock[0] = 10.0
    wait(lambda: (bucket / "a").read_text() == "second", "the new content is uploaded")
    wait(lambda: is_uploaded(folder / "a"), "and marked")
    assert names(bucket) == ["a", "old"]


def test_what_is_not_the_users_is_not_uploaded(folder, bucket, start):
    """The agent skips unfinished files, files in unfinished folders, its own markers, and links."""
    (folder / "half.sagemaker-ignore").mkdir()
    (folder / "half.sagemaker-ignore" / "part").write_text("unfinished")
    (folder / "a.sagemaker-ignore").write_text("unfinished")
    (folder / "link").symlink_to("old")
    start(0)
    (folder / "deep").mkdir()
    write(folder / "deep" / "z", "finished")
    wait(lambda: is_uploaded(folder / "deep" / "z"), "the finished file is uploaded")
    assert names(bucket) == ["deep", "deep/z", "old"]


def test_removals_are_mirrored_and_downloads_are_not_uploaded(folder, bucket, start):
    """Files removed on the host are removed from S3; downloaded files get no marker."""
    start(0)
    write(folder / "a", "new")
    wait(lambda: is_uploaded(folder / "a"), "the new file is uploaded")
    assert not (folder / "old.sagemaker-uploaded").exists()
    (folder / "a").unlink()
    (folder / "old").unlink()
    wait(lambda: names(bucket) == [], "both are removed")


def test_an_agent_that_stops_leaves_what_it_has_not_uploaded(folder, bucket, start):
    """A stopped agent lists the files that it has not uploaded, and S3 has no part of them."""
    agent = start(60)
    write(folder / "a", "too late")
    wait((folder / "a.sagemaker-uploading").exists, "the upload begins")
    agent.stop()
    assert agent.lost == ["a"]
    assert names(bucket) == ["old"]
    assert not (folder / "a.sagemaker-uploaded").exists()


def test_an_agent_that_cannot_write_says_why(folder, bucket, start):
    """The agent keeps its error, so that the emulator can report it."""
    agent = start(0)
    (bucket / "old").unlink()
    bucket.rmdir()
    bucket.write_text("no folder")
    write(folder / "a", "new")
    wait(lambda: agent.error is not None, "the upload fails")
    assert str(bucket) in str(agent.error)
    agent.stop()
    assert agent.lost == ["a"]


def test_the_next_attempt_begins_with_what_was_uploaded(jobs, work):
    """Each host has a separate folder; files written at the last moment are lost, and the job names them."""
    options = ["--group", "trainer=2", "--upload-delay", "3", "--fault", "interrupt@step=1"]
    ended = run_faulty(jobs, work, *options, mode="upload")
    assert ended.returncode == 0, ended.stdout
    assert sorted(said_after(ended.stdout, "folder")) == [(host, "ml/checkpoints") for host in ("algo-1", "algo-2")]
    kept = ["deep/shard", "early", "of-algo-1", "of-algo-2"]
    # Every file has the time of its download, although the script had set one of them to 1970.
    everything = str([(name, True) for name in kept])
    assert sorted(said_after(ended.stdout, "found")) == [("algo-1", everything), ("algo-2", everything)]
    assert f"Folder that stands in for the checkpoints' location in S3: {job_dir(jobs) / 'checkpoints'}" in ended.stdout
    for host in ("algo-1", "algo-2"):
        assert f"Not uploaded when {host} exited: lost." in ended.stdout
        assert row(ended.stdout, host, 1)[2] == "143"
    assert [name for name in names(job_dir(jobs) / "checkpoints") if name != "deep"] == kept


def test_everything_is_uploaded_when_a_host_ends_by_itself(jobs, work):
    """When a host exits by itself, all its files are uploaded, whatever the delay."""
    (work / "train.py").write_text(SCRIPT_START + "open(base + '/checkpoints/' + host, 'w').close()\n")
    ended = local(jobs, work, "--group", "trainer=2", "--upload-delay", "60", "--", "train.py")
    assert ended.returncode == 0, ended.stdout
    assert names(job_dir(jobs) / "checkpoints") == ["algo-1", "algo-2"]
    assert "Not uploaded" not in ended.stdout


def test_hosts_see_no_files_of_each_other(jobs, work):
    """Each host has its folder at the same path and a private /dev/shm, and sees nothing else of the job."""
    (work / "train.py").write_text(
        SCRIPT_START + "import sys, time\n"
        "mine = [base + '/checkpoints/mine', '/dev/shm/mine']\n"
        "for name in mine:\n    assert not os.path.exists(name)\n    open(name, 'x').close()\n"
        "open('made-' + host, 'x').close()\n"
        f"deadline = time.monotonic() + {_TIMEOUT_S}\n"
        "while not (os.path.exists('made-algo-1') and os.path.exists('made-algo-2')):\n"
        "    assert time.monotonic() < deadline\n    time.sleep(0.01)\n"
        "print('sees', base, os.listdir(os.path.dirname(base)))\n"
        "try:\n    open(os.path.dirname(base) + '/x', 'x')\n"
        "except OSError as error:\n    print('says', error.strerror)\n"
    )
    ended = local(jobs, work, "--group", "trainer=2", "--checkpoints", "ck", "--", "train.py")
    assert ended.returncode == 0, ended.stdout
    seen = f"{job_dir(jobs) / 'ml'} ['ml']"
    assert sorted(said_after(ended.stdout, "sees")) == [("algo-1", seen), ("algo-2", seen)]
    assert {text for _, text in said_after(ended.stdout, "says")} == {"Read-only file system"}
    assert not os.path.exists("/dev/shm/mine")


def test_a_host_that_was_not_interrupted_and_leaves_first_fails_the_job(jobs, work):
    """The service treats the host's exit code as a failure and starts no other attempt."""
    options = ["--group", "trainer=2", "--fault", "interrupt:algo-2@step=1"]
    ended = run_faulty(jobs, work, *options, mode="unstopped_leaves_first")
    assert ended.returncode == 3, ended.stdout
    assert re.search(
        r"^Host algo-1 \(group trainer\), which was not interrupted, exited first, with code 3:", ended.stdout, re.M
    )
    assert "Attempt 2 of 2" not in ended.stdout
    assert "The job failed:" in ended.stdout


def test_the_other_hosts_are_stopped_when_the_interrupted_one_has_left(jobs, work):
    """When the interrupted host has exited, the service stops the other hosts and starts another attempt."""
    options = ["--group", "trainer=2", "--fault", "interrupt:algo-2@step=1"]
    ended = run_faulty(jobs, work, *options, mode="stopped_leaves_first")
    assert ended.returncode == 0, ended.stdout
    assert sorted(host for host, _ in said_after(ended.stdout, "told")) == ["algo-1", "algo-2"]
    assert [row(ended.stdout, host, 1)[2] for host in ("algo-1", "algo-2")] == ["143", "143"]
    assert len(row(ended.stdout, "algo-1", 1)) == 5


@pytest.mark.parametrize("stopped", ["algo-1", "algo-2"])
def test_hosts_leave_when_the_checkpoint_is_uploaded_and_the_stopped_one_first(jobs, work, stopped):
    """Hosts exit once the checkpoint is uploaded, the stopped one first, and the next attempt resumes from it."""
    options = ["--group", "trainer=2", "--upload-delay", "2", "--fault", f"interrupt:{stopped}@step=1"]
    ended = run_faulty(jobs, work, *options, mode="save_and_leave")
    assert ended.returncode == 0, ended.stdout
    assert sorted(said_after(ended.stdout, "resumed")) == [("algo-1", "at step 1"), ("algo-2", "at step 1")]
    assert re.search(r"^algo-1 \| lightning-sm: uploaded after \d", ended.stdout, re.MULTILINE)
    assert "exited first" not in ended.stdout
    assert [row(ended.stdout, host, 1)[2] for host in ("algo-1", "algo-2")] == ["143", "143"]
    assert "Not uploaded" not in ended.stdout


@pytest.mark.parametrize("delay", ["-1", "inf", "nan"])
def test_a_delay_that_never_ends_is_refused(jobs, work, delay):
    """A negative, infinite or undefined delay is refused before anything starts."""
    ended = run_faulty(jobs, work, f"--upload-delay={delay}")
    assert ended.returncode == 2
    assert f"--upload-delay {delay}: expected 0 seconds or more." in ended.stderr
    assert not jobs.exists()
