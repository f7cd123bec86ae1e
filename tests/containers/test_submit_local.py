"""lightning-sm submit --local with our image: the real SDKs, Docker, and jobs that end well and badly."""

import importlib.util
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

from tests.containers.engine import docker
from tests.containers.local_mode import ROOT

pytestmark = pytest.mark.docker

SDK3 = ROOT / ".venv-sdk3" / "bin" / "python"
# Says where it runs; the host that is named fails after the others have started.
SCRIPT = """\
import json, sys
import helper
host = json.load(open("/opt/ml/input/config/resourceconfig.json"))["current_host"]
print("arguments", sys.argv[1:], open("/opt/ml/input/data/training/number").read(), flush=True)
open(f"/opt/ml/model/{host[:6]}", "w").close()
if f"--fail={host[:6]}" in sys.argv:
    raise RuntimeError("meant to fail")
if "--hang=true" in sys.argv:
    import threading
    threading.Event().wait()
"""


@pytest.fixture(params=[pytest.param("sdk2", marks=pytest.mark.sdk2), pytest.param("sdk3", marks=pytest.mark.sdk3)])
def python(request):
    """An interpreter with version 2 or 3 of the SDK."""
    if request.param == "sdk2" and importlib.util.find_spec("sagemaker") is None:
        pytest.skip("needs version 2 of the SageMaker SDK (extra launch)")
    if request.param == "sdk3" and not SDK3.exists():
        pytest.skip("needs version 3 of the SageMaker SDK: make .venv-sdk3/.ready")
    return sys.executable if request.param == "sdk2" else str(SDK3)


@pytest.fixture
def submit(image, tmp_path):
    """Runs the command on a job with code of its own; its folders are made in one of the test."""
    (tmp_path / "src" / "package").mkdir(parents=True)
    (tmp_path / "src" / "package" / "go.py").write_text(SCRIPT)
    (tmp_path / "src" / "helper.py").write_text("")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "number").write_text("42")
    (tmp_path / "work").mkdir()

    def run(python, *options, **changes):
        job = {
            "image": image,
            "groups": {"trainer": {"instance_type": "ml.m5.large", "count": 2}},
            "channels": {"training": {"uri": (tmp_path / "data").as_uri()}},
            "hyperparameters": {"data.size": 3},
            "source_dir": "src",
            "script": "package/go.py",
            **changes,
        }
        path = tmp_path / "job.yaml"
        path.write_text(yaml.safe_dump(job, sort_keys=False))
        env = {name: value for name, value in os.environ.items() if not name.startswith(("AWS", "SAGEMAKER"))}
        env |= {"AWS_EC2_METADATA_DISABLED": "true", "TMPDIR": str(tmp_path / "work"), "PYTHONPATH": str(ROOT)}
        command = [python, "-m", "lightning_sm", "submit", str(path), "--local", "--timeout_s=180", *options]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)

    yield run
    left = [
        line
        for line in docker("ps", "--all", "--no-trunc", "--format", "{{.ID}} {{.Mounts}}").stdout.splitlines()
        if str(tmp_path) in line
    ]
    assert not left, f"containers left behind: {left}"


def output_of(ended):
    """What the command and the containers said."""
    return ended.stdout + ended.stderr


@pytest.mark.proof
def test_own_code_runs_on_two_hosts_and_leaves_a_model(python, submit, tmp_path):
    """The image's launcher starts the script from source_dir, with its options and its channel."""
    ended = submit(python)
    assert ended.returncode == 0, output_of(ended)
    assert output_of(ended).count("arguments ['--data.size=3'] 42") == 2
    assert [*Path(tmp_path / "work").rglob("docker-compose.yaml")] == []  # it may hold credentials
    archives = [*Path(tmp_path / "work").rglob("model.tar.gz")]
    with tarfile.open(archives[0]) as archive:
        assert {Path(name).name for name in archive.getnames()} >= {"algo-1", "algo-2"}


@pytest.mark.proof
@pytest.mark.parametrize("host", ["algo-1", "algo-2"])
def test_whichever_host_fails_the_command_does(python, submit, host):
    """Though the SDK itself may call that a success; the reason is that of the script."""
    ended = submit(python, f"--hyperparameters.fail={host}")
    assert ended.returncode == 1, output_of(ended)
    # SDK v2 keeps the failure file of one host, whichever it copies last: all of them name the one that failed.
    told = f"a host failed: RuntimeError: meant to fail\\s+on trainer host {host}\\b"
    assert re.search(told, ended.stderr), output_of(ended)


@pytest.mark.proof
def test_a_job_that_hangs_ends_with_the_time_limit(python, submit):
    """With all its containers."""
    ended = submit(python, "--hyperparameters.hang=true", "--timeout_s=25")
    assert ended.returncode == 124, output_of(ended)


@pytest.mark.proof
@pytest.mark.sdk2
def test_a_heterogeneous_job_trains(submit):
    """A heterogeneous job trains the app fed by its data host; unsupported settings are ignored with a warning."""
    groups = {"trainer": {"instance_type": "ml.g5.xlarge"}, "data": {"instance_type": "ml.c5.xlarge"}}
    ended = submit(
        sys.executable,
        groups=groups,
        channels={},
        source_dir=None,
        script=None,
        config=str(ROOT / "app" / "configs" / "smoke.yaml"),
        hyperparameters={},
        checkpoints="s3://bucket/checkpoints",
    )
    assert ended.returncode == 0, output_of(ended)
    assert "checkpoints is ignored: local mode does not support it" in ended.stderr
    assert "Data host done" in output_of(ended)


@pytest.mark.sdk3
def test_version_3_refuses_groups(submit):
    """And says what to use instead."""
    if not SDK3.exists():
        pytest.skip("needs version 3 of the SageMaker SDK: make .venv-sdk3/.ready")
    ended = submit(str(SDK3), groups={name: {"instance_type": "ml.m5.large"} for name in ("trainer", "data")})
    assert ended.returncode == 2
    assert "The local mode of SDK v3 does not support instance groups" in ended.stderr
    assert "Traceback" not in ended.stderr
