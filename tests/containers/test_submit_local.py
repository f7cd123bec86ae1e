"""``lightning-sm submit --local`` with our image: jobs in containers that succeed and fail."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.containers.engine import docker
from tests.containers.local_mode import ROOT

pytestmark = pytest.mark.docker

SCRIPTS = Path(__file__).parent / "scripts"

# Prints its arguments and the channel's content, then fails or hangs if its options say so.
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


@pytest.fixture
def submit(image, tmp_path):
    """A function that runs the command on a job with a script, with all folders inside the test's folder."""
    (tmp_path / "src" / "package").mkdir(parents=True)
    (tmp_path / "src" / "package" / "go.py").write_text(SCRIPT)
    (tmp_path / "src" / "helper.py").write_text("")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "number").write_text("42")
    (tmp_path / "work").mkdir()

    def run(*options, **changes):
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
        command = [sys.executable, "-m", "lightning_sm", "submit", str(path), "--local", *options]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, check=False)

    yield run
    left = [
        line
        for line in docker("ps", "--all", "--no-trunc", "--format", "{{.ID}} {{.Mounts}}").stdout.splitlines()
        if str(tmp_path) in line
    ]
    assert not left, f"containers left behind: {left}"


def output_of(ended):
    """Return the output of the command and of its containers."""
    return ended.stdout + ended.stderr


def runs(tmp_path):
    """Return the folders of the emulated jobs."""
    return [*(tmp_path / "work").glob("lightning-sm-*/local-*")]


def test_own_code_runs_on_two_hosts_and_leaves_models(submit, tmp_path):
    """Both hosts run the script from source_dir, with options and channel; the code folder is unchanged."""
    ended = submit()
    assert ended.returncode == 0, output_of(ended)
    assert output_of(ended).count("arguments ['--data.size=3'] 42") == 2
    (job,) = runs(tmp_path)
    assert [path.name for path in sorted(job.glob("algo-*/model/*"))] == ["algo-1", "algo-2"]
    assert sorted(path.name for path in (tmp_path / "src").rglob("*")) == ["go.py", "helper.py", "package"]
    assert [path.name for path in (tmp_path / "work").iterdir()] == [job.parent.name]  # no copy of the code is left


def test_the_host_that_fails_decides(submit):
    """The command has the failed host's exit code and error; the first host, which would hang, is stopped."""
    ended = submit("--hyperparameters.fail=algo-2", "--hyperparameters.hang=true")
    assert ended.returncode == 1, output_of(ended)
    assert "Host algo-2 (group trainer) failed with exit code 1." in ended.stdout
    assert "The job failed:\nRuntimeError: meant to fail\n" in ended.stdout
    assert "on trainer host algo-2" in ended.stdout.partition("The job failed:")[2]


@pytest.mark.proof
def test_a_heterogeneous_job_trains(submit, tmp_path):
    """The data host, which alone has a channel, feeds two trainers; rank 0 saves the model; ignored keys are named."""
    (tmp_path / "data" / "points.txt").write_text(" ".join(str(number / 16) for number in range(16)))
    ended = submit(
        groups={"trainer": {"instance_type": "ml.g5.xlarge", "count": 2}, "data": {"instance_type": "ml.c5.xlarge"}},
        channels={"training": {"uri": (tmp_path / "data").as_uri(), "groups": ["data"]}},
        source_dir=str(SCRIPTS),
        script="train_with_groups.py",
        hyperparameters={},
        checkpoints="s3://bucket/checkpoints",
        spot={"max_wait_s": 90000},
    )
    assert ended.returncode == 0, output_of(ended)
    assert "spot is ignored with --local" in ended.stderr
    assert "Data host done" in output_of(ended)
    (job,) = runs(tmp_path)
    facts = [json.loads(path.read_text()) for path in job.glob("algo-*/output/data/algo.json")]
    assert sorted((one["group"], one["channels"]) for one in facts) == [
        ("data", ["training"]),
        ("trainer", []),
        ("trainer", []),
    ]
    assert sorted(len(one.get("model", [])) for one in facts) == [0, 0, 3]
    assert [*(job / "checkpoints").rglob("*.ckpt")]
