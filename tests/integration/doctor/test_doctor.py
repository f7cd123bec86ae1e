"""``lightning-sm doctor`` as a command, on healthy and on broken hosts."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from lightning_sm.emulator import own_disk
from lightning_sm.emulator.cluster import LocalCluster
from lightning_sm.emulator.spec import ClusterSpec
from lightning_sm.job.emulated_service import GroupSpec
from tests.fakes.job_folder import resource_config, write_job

_COMMAND = (sys.executable, "-m", "lightning_sm", "doctor")
_TIMEOUT_S = 60
_FOREIGN = ("SM_", "SAGEMAKER_", "LIGHTNING_SM_", "TRAINING_JOB_", "NCCL_", "GLOO_")


def _doctor(*args, env=None, command=_COMMAND, **variables):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    return subprocess.run(
        [*command, *args],
        env={**(inherited if env is None else env), "COLUMNS": "200", **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=_TIMEOUT_S,
    )


def _results(ended):
    return json.loads(ended.stdout)["results"]


@pytest.fixture
def base(tmp_path):
    """A host of a job with two trainer hosts whose names do not resolve."""
    groups = {"trainer": ["algo-2", "algo-1"]}
    base = write_job(
        tmp_path / "ml", resource_config(groups, "algo-1", instance_types={"trainer": "ml.m5.large"}, interface="lo")
    )
    for name in ("model", "output"):
        (base / name).mkdir()
    return base


def test_off_sagemaker_nothing_is_wrong(tmp_path):
    """Off SageMaker, the doctor prints a table with a summary and exits with 0."""
    ended = _doctor(SAGEMAKER_BASE_DIR=str(tmp_path / "none"))
    lines = ended.stdout.splitlines()
    assert ended.returncode == 0, ended.stdout
    assert lines[0].split() == ["check", "status", "found", "what", "to", "do"]
    assert lines[2].split()[:2] == ["job", "ok"]
    assert "Not a SageMaker host" in lines[2]
    assert lines[-1].startswith("0 problems, ")
    assert ended.stderr == ""


@pytest.mark.matrix(first=1)
@pytest.mark.parametrize("number", [0, 2])
def test_hosts_of_the_emulator_are_well(tmp_path, number):
    """On each host of an emulated cluster, the doctor shows the job's facts and finds no problem."""
    spec = ClusterSpec(groups=[GroupSpec("trainer", 2), GroupSpec("data", 1)], bucket=tmp_path / "checkpoints")
    with LocalCluster(spec, tmp_path / "jobs") as cluster:
        host = cluster.hosts[number]
        command = own_disk.command(cluster.job_dir, host.folder, _COMMAND)
        ended = _doctor("--json", env=host.env, command=command)
    found = {}
    for result in _results(ended):
        found.setdefault(result["name"], []).append(result["found"])
    assert ended.returncode == 0, ended.stdout
    assert cluster.name in found["job"][0]
    assert found["this host"][0].startswith(f"{host.name}, group {host.group} ")
    assert "(nothing listens yet)" in found["other hosts"][0]


def test_broken_file_of_the_service_is_a_problem(base):
    """For a malformed resourceconfig.json, the doctor names the file, runs its other checks and exits with 1."""
    write_job(base, resources="{not json")
    ended = _doctor("--json", SAGEMAKER_BASE_DIR=str(base))
    problems = [result for result in _results(ended) if result["status"] == "problem"]
    assert ended.returncode == 1
    assert [result["name"] for result in problems] == ["job"]
    assert "resourceconfig.json" in problems[0]["found"]
    assert "versions" in {result["name"] for result in _results(ended)}


def test_doctor_starts_without_torch_and_lightning():
    """The doctor imports neither torch nor Lightning, which may be broken and take seconds to import."""
    code = (
        "import sys\nfrom lightning_sm.doctor.context import Context\n"
        "from lightning_sm.doctor.command import CHECKS\n"
        "for check in CHECKS: list(check(Context.of({})))\n"
        "print({'torch', 'pytorch_lightning', 'lightning', 'grpc'} & set(sys.modules))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=_TIMEOUT_S)
    assert ended.stdout == "set()\n"
