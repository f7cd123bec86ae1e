"""The options with which containers are created, recorded by a stand-in for the Docker client."""

from __future__ import annotations

import io
import json
import os
import threading

import pytest

from lightning_sm.emulator.cluster import LocalCluster
from lightning_sm.emulator.container_hosts import ContainerRuntime
from lightning_sm.emulator.output import Output
from lightning_sm.emulator.spec import ClusterSpec
from lightning_sm.errors import ContainerError, ScriptError
from lightning_sm.job.variables import JOB_SECRET
from tests.fakes import docker_client

_CLIENT = """#!/bin/sh
echo "$@" >> "$CALLS"
case "$1" in
    image) echo "$ENTRY_POINT";;
    info) echo "$ABOUT";;
    create) while [ "$1" != --env-file ]; do shift; done; cat "$2" > "$CALLS.variables";;
    start) if [ -p "$CALLS.end" ]; then read code < "$CALLS.end"; exit "$code"; fi;;
    ps) echo running;;
    exec) echo "$STATUS";;
    kill) case "$*" in *TERM*) echo 143;; *) echo 137;; esac > "$CALLS.end";;
esac
"""


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """The file to which the stand-in writes its arguments, one line per call."""
    monkeypatch.setenv("ENTRY_POINT", '["/opt/conda/bin/lightning-sm"]')
    monkeypatch.setenv("ABOUT", "{}")
    return docker_client.install(_CLIENT, tmp_path, monkeypatch)


def _create(calls, tmp_path, command=(), **spec):
    """Start a host and return the arguments and variables of its container."""
    runtime = ContainerRuntime("an-image", tmp_path if command else None)
    runtime.check_command(command)
    with LocalCluster(ClusterSpec(**spec), tmp_path / "jobs", runtime) as cluster:
        host = cluster.hosts[0]
        output = Output(io.BytesIO(), [host.name])
        started = runtime.start(host, command, output, threading.Event())
        started.waiter.join(60)
        assert started.read_rest(60)
        assert started.exit_code == 0
    (created,) = [line for line in calls.read_text().splitlines() if line.startswith("create")]
    lines = calls.with_name("calls.variables").read_text().splitlines()
    return created, dict(line.split("=", 1) for line in lines)


@pytest.mark.parametrize(
    ("uid", "about", "is_own"),
    [
        (1234, {"SecurityOptions": ["name=seccomp,profile=default"]}, True),
        (1234, {"SecurityOptions": ["name=rootless"]}, False),
        (1234, {"Name": "docker-desktop"}, False),
        (0, {}, False),
    ],
)
def test_containers_run_as_this_user_where_root_s_files_would_be_root_s(
    calls, tmp_path, monkeypatch, uid, about, is_own
):
    """Containers run as this user, with a home and a name, unless the user is root or Docker maps root to the user."""
    monkeypatch.setattr(os, "getuid", lambda: uid)
    monkeypatch.setattr(os, "getgid", lambda: 5678)
    monkeypatch.setenv("ABOUT", json.dumps(about))
    created, variables = _create(calls, tmp_path)
    assert (f"--user {uid}:5678" in created) is is_own
    assert ({"HOME", "USER", "LOGNAME"} <= variables.keys()) is is_own


def test_no_value_of_a_variable_is_on_a_command_line(calls, tmp_path):
    """Values stay off command lines, which other users can read; multi-line ones are read from the environment."""
    created, variables = _create(calls, tmp_path, environment={"PHRASE": "hush", "KEY": "hush\nhush"})
    assert variables["PHRASE"] == "hush"
    assert JOB_SECRET.name in variables
    assert "hush" not in created
    assert "--env=KEY" in created


@pytest.mark.parametrize(("caught", "exit_code"), [("0", 137), ("4000", 143)])
def test_a_host_that_would_lose_its_signal_is_killed(calls, tmp_path, monkeypatch, caught, exit_code):
    """A host without a SIGTERM handler is killed: the kernel drops SIGTERM to such a process 1, so it would train."""
    os.mkfifo(calls.with_name("calls.end"))
    monkeypatch.setenv("STATUS", f"SigBlk:\t0000000000000000\nSigCgt:\t{caught:0>16}")
    with LocalCluster(ClusterSpec(), tmp_path / "jobs", ContainerRuntime("an-image")) as cluster:
        host = cluster.hosts[0]
        output = Output(io.BytesIO(), [host.name])
        started = cluster.runtime.start(host, [], output, threading.Event())
        started.terminate()
        started.waiter.join(60)
        assert started.exit_code == exit_code


def test_a_script_is_named_as_the_container_sees_it(calls, tmp_path, monkeypatch):
    """The script's path is relative to the mounted code folder; without a script, the image runs its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").touch()
    created, _ = _create(calls, tmp_path, [str(tmp_path / "src" / "train.py"), "fit"])
    assert created.endswith(" an-image train src/train.py fit")
    assert f'--mount "type=bind","source={tmp_path}","target=/opt/ml/code" --workdir /opt/ml/code' in created
    calls.unlink()
    created, _ = _create(calls, tmp_path)
    assert created.endswith(" an-image train")
    assert "target=/opt/ml/code" not in created


def test_an_image_with_another_entry_point_takes_no_script(calls, tmp_path, monkeypatch):
    """A script is refused for an image with another entry point, which would ignore it and train something else."""
    monkeypatch.setenv("ENTRY_POINT", '["train"]')
    with pytest.raises(ScriptError, match=r"The entry point of an-image is train, which does not accept a script"):
        ContainerRuntime("an-image", tmp_path).check_command(["train.py"])


def test_docker_is_named_where_it_is_missing(tmp_path, monkeypatch):
    """If Docker is not installed, the error names the missing command."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ContainerError, match=r"needs Docker, but the docker command is not on PATH"):
        ContainerRuntime("an-image")
