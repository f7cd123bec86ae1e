"""Checks across the keys of a job file."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_sm.errors import SubmitError
from lightning_sm.submit.job_file import Group, InputChannel, Job, Spot, Tune
from lightning_sm.submit.preflight import check
from lightning_sm.submit.problems import Findings

GPU, CPU = Group("ml.g5.xlarge", 2), Group("ml.c5.xlarge")
IMAGE = "111122223333.dkr.ecr.us-east-1.amazonaws.com/lightning-sm:latest"
CODE = str(Path(__file__).parent)
JOB = Job(
    image=IMAGE,
    role="arn:aws:iam::111122223333:role/training",
    groups={"trainer": GPU, "data": CPU},
    channels={"training": InputChannel("s3://bucket/data", ["data"])},
    output="s3://bucket/output",
)


def test_a_good_job_has_neither_problems_nor_warnings():
    """A valid job passes the checks for both modes."""
    assert check(JOB, "cloud", "us-east-1") == Findings()
    assert check(replace(JOB, channels={}), "local") == Findings()


@pytest.mark.parametrize(
    ("registry", "region"),
    [("ecr-fips.us-east-1.amazonaws.com", "us-east-1"), ("ecr.cn-north-1.amazonaws.com.cn", "cn-north-1")],
)
def test_registries_of_every_partition_are_known(registry, region):
    """Registries with FIPS endpoints and those in China are recognised by their different names."""
    job = replace(JOB, image=f"111122223333.dkr.{registry}/lightning-sm:latest")
    assert check(job, "cloud", region) == Findings()
    (problem,) = check(job, "cloud", "eu-west-1").problems
    assert f"image is in {region}" in problem.text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"groups": {}, "channels": {}}, ["groups is empty"]),
        ({"groups": {"data": CPU}}, ["No group trains"]),
        ({"groups": {"a": GPU}, "channels": {}, "environment": {"LIGHTNING_SM_DATA_GROUPS": "nix"}}, ["nix"]),
        ({"groups": {"a": GPU, "b": Group("ml.p4d.24xlarge")}, "channels": {}}, ["different numbers of GPUs"]),
        ({"environment": {"LIGHTNING_SM_DATA_GROUPS": "nix"}}, ["nix"]),
        ({"environment": {"LIGHTNING_SM_DATA_GROUPS": ""}}, ["different numbers of GPUs"]),
        ({"environment": {"LIGHTNING_SM_JOB_SECRET": "short"}}, ["LIGHTNING_SM_JOB_SECRET", "(hidden)", "32"]),
        ({"environment": {"LIGHTNING_SM_STOP_SCHEDULE": "9"}}, ["environment", "LIGHTNING_SM_STOP_SCHEDULE", "'9'"]),
        ({"environment": {"LIGHTNING_SM_MODEL": "best"}}, ["environment", "LIGHTNING_SM_MODEL", "'best'"]),
        ({"environment": {"LIGHTNING_SM_DATAGROUPS": "a"}}, ["_DATAGROUPS", "LIGHTNING_SM_DATA_GROUPS"]),
        ({"channels": {"a": InputChannel("s3://bucket/a", ["nix"])}}, ["channels.a.groups", "nix", "trainer"]),
        ({"channels": {"a": InputChannel("/folder")}}, ["channels.a.uri", "/folder", "s3://"]),
        ({"channels": {"a": InputChannel("file:///folder")}}, ["channels.a.uri", "file:///folder"]),
        ({"output": "s3://UPPER/x"}, ["output", "s3://UPPER/x"]),
        ({"checkpoints": "s3:/bucket"}, ["checkpoints", "s3:/bucket"]),
        ({"name": "a_b"}, ["name", "a_b"]),
        ({"name": "a" * 40}, ["name", "39"]),
        ({"name": "a" * 30 + "-"}, ["name"]),
        ({"spot": Spot(60), "checkpoints": "s3://bucket/c"}, ["spot.max_wait_s", "60", "max_run_s", "86400"]),
        ({"max_restarts": -1, "checkpoints": "s3://bucket/c"}, ["LIGHTNING_SM_MAX_RESTARTS", "-1", "from 0 to 1000"]),
        (
            {"max_restarts": 3, "environment": {"LIGHTNING_SM_MAX_RESTARTS": "2"}, "checkpoints": "s3://bucket/c"},
            ["environment has LIGHTNING_SM_MAX_RESTARTS, which the key max_restarts sets"],
        ),
        ({"max_run_s": 2419201}, ["max_run_s is 2419201", "at most 2419200 (28 days)"]),
        ({"metrics": ["val_acc", "loss", "val_acc"]}, ["metrics names val_acc more than once"]),
        ({"tags": {"AWS:x": "y"}}, ["AWS:x begins with aws:"]),
        ({"source_dir": "/nix/nirgends", "script": "a.py"}, ["source_dir", "/nix/nirgends"]),
        ({"source_dir": CODE, "script": "nix.py"}, ["script", "nix.py", "source_dir"]),
        ({"source_dir": CODE, "script": "../submit/test_preflight.py"}, ["not a file in source_dir", CODE]),
        ({"source_dir": CODE, "script": __file__}, ["not a file in source_dir", CODE]),
        ({"request": {"RoleArn": "a"}}, ["request has RoleArn, which the key role sets"]),
        ({"request": {"StoppingCondition": {"MaxRuntimeInSeconds": 9}}}, ["the key max_run_s sets"]),
        ({"request": {"Environment": {"A": "b"}}}, ["the key environment sets"]),
        ({"tune": Tune("val_acc", {}, "maximize"), "groups": {"a": GPU}, "channels": {}}, ["tune.ranges is empty"]),
        ({"role": None}, ["role"]),
        ({"role": "training"}, ["role", "training", "ARN"]),
        ({"image": "lightning-sm:latest"}, ["image", "lightning-sm:latest", "ecr"]),
        (
            {"image": "lightning-sm", "build": CODE, "dockerfile": __file__},
            ["With `build: .`, it is built and pushed."],
        ),
        (
            {"image": f"{IMAGE.partition(':')[0]}@sha256:{64 * 'a'}", "build": CODE, "dockerfile": __file__},
            ["with build, expected a tag in place of the digest"],
        ),
        ({"image": IMAGE.replace("111122223333", "<account>")}, ["image", "<account>"]),
        ({"image": IMAGE.replace("us-east-1", "eu-west-1")}, ["image is in eu-west-1", "runs in us-east-1"]),
        ({"checkpoints": "s3://bucket/output/"}, ["output is s3://bucket/output", "equal to checkpoints"]),
        ({"checkpoints": "s3://bucket"}, ["output is s3://bucket/output", "checkpoints (s3://bucket) or below it"]),
        (
            {"groups": {"trainer": CPU, "data": GPU}},
            ["data hosts (ml.g5.xlarge) have GPUs", "(ml.c5.xlarge) have none"],
        ),
        ({"source_dir": CODE}, ["source_dir is set, but script is missing", "script: train.py"]),
    ],
)
def test_every_contradiction_is_a_problem(changes, words):
    """Each contradiction is one problem that names the keys and the values, and prevents submission."""
    findings = check(replace(JOB, **changes), "cloud", "us-east-1")
    (problem,) = findings.problems
    for word in words:
        assert word in problem.text
    with pytest.raises(SubmitError, match="1 problem; nothing was sent"):
        findings.report()


@pytest.mark.parametrize(
    ("changes", "region", "words"),
    [
        ({"spot": Spot(86400)}, "us-east-1", ["spot without checkpoints"]),
        ({"max_restarts": 1}, "us-east-1", ["max_restarts without checkpoints"]),
        (
            {"prices": {"ml.g5.xlarg": 1.41}},
            "us-east-1",
            ["prices has ml.g5.xlarg, which", "Did you mean ml.g5.xlarge?"],
        ),
    ],
)
def test_what_is_rarely_meant_is_a_warning(changes, region, words):
    """An unusual setting causes a warning, but the job can be submitted."""
    findings = check(replace(JOB, **changes), "cloud", region)
    (warning,) = findings.warnings
    assert all(word in warning for word in words)
    findings.report()


def test_code_cannot_be_fetched_without_a_network(tmp_path):
    """With network isolation, hosts cannot fetch the code, so it must be in the image."""
    (tmp_path / "train.py").touch()
    job = replace(JOB, source_dir=str(tmp_path), script="train.py")
    assert check(job, "cloud").problems == []
    (problem,) = check(replace(job, request={"EnableNetworkIsolation": True}), "cloud").problems
    assert "hosts without a network cannot fetch the code" in problem.text


def test_what_is_not_meant_to_be_uploaded_is_a_warning(tmp_path):
    """Secrets, repositories and virtual environments beside the code each cause a warning."""
    (tmp_path / "train.py").touch()
    (tmp_path / ".env").touch()
    for folder in (".aws", ".git", ".venv", "venv"):
        (tmp_path / folder).mkdir()
    job = replace(JOB, source_dir=str(tmp_path), script="train.py")
    assert check(job, "local").warnings == []
    findings = check(job, "cloud", "us-east-1")
    named = [warning.split()[2].rstrip(",") for warning in findings.warnings]
    assert named == [".aws", ".env", ".git", ".venv", "venv"]
    findings.report()


@pytest.mark.parametrize("mode", ["cloud", "local"])
def test_what_cannot_be_copied_is_a_problem(tmp_path, mode):
    """Broken links, as editors create them, links to themselves or a parent folder, and pipes are problems."""
    (tmp_path / "train.py").touch()
    (tmp_path / "same.py").symlink_to("train.py")
    job = replace(JOB, source_dir=str(tmp_path), script="train.py", channels={})
    assert check(job, mode).problems == []
    (tmp_path / ".#train.py").symlink_to("me@host.1")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "all").symlink_to("..")
    (tmp_path / "self").symlink_to("self")
    os.mkfifo(tmp_path / "pipe")
    found = {problem.text.split()[2].rstrip(","): problem.text for problem in check(job, mode).problems}
    assert set(found) == {".#train.py", "package/all", "pipe", "self"}
    assert "neither a file nor a folder" in found["pipe"]
    assert "a broken link" in found["self"]
    assert "a link to a folder that contains it" in found["package/all"]
    assert "a broken link" in found[".#train.py"]


def test_local_mode_needs_neither_role_nor_registry(tmp_path):
    """Local mode requires neither a role nor a registry, but channels must be existing folders."""
    channels = {"a": InputChannel(tmp_path.as_uri())}
    local = replace(JOB, image="x", role=None, output=None, channels=channels)
    assert check(local, "local") == Findings()
    for uri in ("file:///nix/nirgends", "relative", "file://relative", "s3://bucket/data"):
        (problem,) = check(replace(local, channels={"a": InputChannel(uri)}), "local").problems
        assert uri in problem.text


def test_all_problems_are_said_at_once():
    """One error lists all problems, one per line."""
    findings = check(replace(JOB, role=None, image="x", name="_", output="x"), "cloud")
    with pytest.raises(SubmitError) as caught:
        findings.report()
    title, *lines = str(caught.value).split("\n")
    assert title == "4 problems; nothing was sent:"
    assert sorted(line.split()[0] for line in lines) == ["image", "name", "output", "role"]
