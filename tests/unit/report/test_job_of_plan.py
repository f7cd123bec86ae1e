"""The job file of a plan."""

from __future__ import annotations

import json
import logging

import pytest
import yaml

from lightning_sm.__main__ import main
from lightning_sm.submit.job_file import read_job
from tests.unit.report.recorded import input_bound
from tests.unit.report.test_sizing import local

_PRICES = ("--price", "ml.g5.xlarge=1.41", "--price", "ml.c5.xlarge=0.2", "--price", "ml.c5.4xlarge=0.9")
_BASE = """
# a comment of the user's
image: 123456789012.dkr.ecr.eu-west-1.amazonaws.com/lightning-sm:latest
role: arn:aws:iam::123456789012:role/training
script: train.py
source_dir: .
groups:
  trainer: {instance_type: ml.g5.xlarge}
  data: {instance_type: ml.c5.xlarge, count: 1}
hyperparameters: {data.num_workers: 2, max_epochs: 3}
"""


def _launched(folder, *command, hyperparameters=None):
    """Change what the launcher of a recorded run has started."""
    (path,) = folder.rglob("algo-1-launcher.jsonl")
    line, *others = path.read_text().splitlines()
    started = json.loads(line) | {"command": command, "hyperparameters": hyperparameters or {}}
    path.write_text("\n".join([json.dumps(started), *others, ""]))


@pytest.fixture
def remote(tmp_path):
    """A run whose cheapest number of data hosts is two instead of one."""
    folder = tmp_path / "run"
    input_bound(folder)
    _launched(folder, "train.py", "fit", "--data.num_workers=2", hyperparameters={"data.num_workers": "2"})
    return folder


def test_the_users_job_file_gets_the_planned_data_hosts(remote, tmp_path):
    """All else stays, and the file is one that submit reads."""
    base, saved = tmp_path / "job.yaml", tmp_path / "planned.yaml"
    base.write_text(_BASE)
    (tmp_path / "train.py").write_text("")
    assert main(["plan", str(remote), *_PRICES, "--base", str(base), "--save", str(saved)]) == 0
    before, after = (yaml.safe_load(path.read_text()) for path in (base, saved))
    assert after["groups"].pop("data") == {"instance_type": "ml.c5.xlarge", "count": 2}
    assert before["groups"].pop("data")["count"] == 1
    assert after == before
    assert {name: group.count for name, group in read_job(saved).groups.items()} == {"trainer": 1, "data": 2}
    text = " ".join(line.lstrip("# ") for line in saved.read_text().splitlines() if line.startswith("#"))
    assert "Use 2 data hosts instead of 1, with 4 workers in all" in text
    assert "lightning-sm local --group trainer=1 --group data=2 -- train.py fit --data.num_workers=2" in text


def test_hosts_of_another_type_take_the_place_of_the_measured_ones(remote, tmp_path):
    """Also without a job file: then submit asks for what the record does not say."""
    saved = tmp_path / "planned.yaml"
    options = ("--kind", "ml.c5.4xlarge", "--speed", "1", "--save", str(saved))
    assert main(["plan", str(remote), *_PRICES, *options]) == 0
    job = yaml.safe_load(saved.read_text())
    assert job == {
        "image": "<image>",
        "role": "<role>",
        "script": "train.py",
        "groups": {
            "trainer": {"instance_type": "ml.g5.xlarge", "count": 1},
            "data": {"instance_type": "ml.c5.4xlarge", "count": 1},
        },
        "hyperparameters": {"data.num_workers": "2"},
    }


@pytest.mark.parametrize(
    ("command", "hyperparameters"),
    [
        (("train.py", "fit", "--data.num_workers=2"), {"data.num_workers": 3}),
        (("train.py", "--num_workers=2", "--max_num_workers=2"), {"num_workers": 3}),
        (("train.py",), None),
    ],
)
def test_local_workers_are_set_where_the_run_names_them(tmp_path, command, hyperparameters):
    """Where it does not, the file says that the script has to be changed."""
    run, saved = tmp_path / "run", tmp_path / "planned.yaml"
    local(run, waiting=0.6, cpus=3)
    _launched(run, *command)
    assert main(["plan", str(run), "--save", str(saved)]) == 0
    job = yaml.safe_load(saved.read_text())
    assert job.get("hyperparameters") == hyperparameters
    assert list(job["groups"]) == ["trainer"]
    assert ("Set num_workers=3 in the script" in saved.read_text()) == (hyperparameters is None)


def test_what_cannot_be_saved_is_said(remote, tmp_path, caplog):
    """Nothing is replaced, and nothing mixes two jobs."""
    base = tmp_path / "job.yaml"
    base.write_text(_BASE.replace("ml.g5.xlarge}", "ml.g5.xlarge, count: 2}"))
    saved = ("--save", str(tmp_path / "new.yaml"))
    for options, message in (
        (("--save", str(base)), f"{base} exists, and is not replaced."),
        (("--base", str(base)), "Name the new file: --save FILE."),
        (("--base", str(base), *saved), "other trainer hosts (trainer: 2) than the run that was measured, job (train"),
        (("--base", str(base), "--save", str(tmp_path / "run" / "new.yaml")), "Save it beside that file."),
        (("--save", str(tmp_path / "none" / "new.yaml")), "cannot be written: No such file or directory"),
    ):
        caplog.clear()
        with caplog.at_level(logging.ERROR):
            assert main(["plan", str(remote), *_PRICES, *options]) == 2
        assert message in caplog.text
    base.write_text(_BASE.replace("  data: {instance_type: ml.c5.xlarge, count: 1}", "  data: 1"))
    assert main(["plan", str(remote), "--base", str(base), *saved]) == 2
    assert "The job file's groups are" in caplog.text
    assert not (tmp_path / "new.yaml").exists()
