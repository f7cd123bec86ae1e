"""The job file that ``plan`` saves."""

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


def _launched(folder, *command, hyperparameters=None):
    """Change the command and hyperparameters in a recorded launcher's first line."""
    (path,) = folder.rglob("algo-1-launcher.jsonl")
    line, *others = path.read_text().strip().splitlines()
    started = json.loads(line) | {"command": command, "hyperparameters": hyperparameters or {}}
    path.write_text("\n".join([json.dumps(started), *others, ""]))


@pytest.fixture
def remote(tmp_path):
    """Write a run that would be cheapest with two data hosts instead of one."""
    folder = tmp_path / "run"
    input_bound(folder)
    _launched(folder, "train.py", "fit", "--data.num_workers=2", hyperparameters={"data.num_workers": "2"})
    return folder


def test_the_file_has_the_planned_data_hosts(remote, tmp_path):
    """The file describes a local trial, and has placeholders for what the record lacks."""
    saved = tmp_path / "planned.yaml"
    assert main(["plan", str(remote), *_PRICES, "--save", str(saved)]) == 0
    assert yaml.safe_load(saved.read_text())["groups"]["data"] == {"instance_type": "ml.c5.xlarge", "count": 2}
    text = " ".join(line.lstrip("# ") for line in saved.read_text().splitlines() if line.startswith("#"))
    assert "Use 2 data hosts instead of 1, with 4 workers in all" in text
    assert "lightning-sm local --group trainer=1 --group data=2 -- train.py fit --data.num_workers=2" in text
    filled = saved.read_text().replace("<image>", "123456789012.dkr.ecr.eu-west-1.amazonaws.com/lightning-sm:latest")
    saved.write_text(filled.replace("<role>", "arn:aws:iam::123456789012:role/training"))
    (tmp_path / "train.py").write_text("")
    assert {name: group.count for name, group in read_job(saved).groups.items()} == {"trainer": 1, "data": 2}


def test_hosts_of_another_type_take_the_place_of_the_measured_ones(remote, tmp_path):
    """Planned hosts of another type replace the measured ones, in a number that follows from their vCPUs."""
    saved = tmp_path / "planned.yaml"
    options = ("--kind", "ml.c5.4xlarge", "--save", str(saved))
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
        "hyperparameters": {"subcommand": "fit", "data.num_workers": "2"},
    }


def test_the_measured_hosts_may_be_cheaper_than_those_of_another_type(remote, tmp_path):
    """If the measured hosts are the cheapest, the file has their type."""
    saved = tmp_path / "planned.yaml"
    prices = ("--price", "ml.g5.xlarge=1.41", "--price", "ml.c5.xlarge=0.2", "--price", "ml.c5.4xlarge=90")
    assert main(["plan", str(remote), *prices, "--kind", "ml.c5.4xlarge", "--save", str(saved)]) == 0
    assert yaml.safe_load(saved.read_text())["groups"]["data"] == {"instance_type": "ml.c5.xlarge", "count": 1}


def test_arguments_may_be_two_words(remote, tmp_path):
    """Options whose values are separate words are part of the job; words that cannot be hyperparameters are listed."""
    saved = tmp_path / "planned.yaml"
    given = "train.py", "validate", "--config", "a.yaml", "--config=b.yaml", "--shift", "-0.5", "--fast", "--lr=1", "-v"
    _launched(tmp_path / "run", *given)
    assert main(["plan", str(remote), *_PRICES, "--save", str(saved)]) == 0
    expected = {"subcommand": "validate", "config": ["a.yaml", "b.yaml"], "shift": "-0.5", "lr": "1"}
    assert yaml.safe_load(saved.read_text())["hyperparameters"] == expected
    assert "# Arguments that cannot be hyperparameters: --fast -v. Set them in the script." in saved.read_text()


def test_a_first_argument_that_is_no_word_is_no_subcommand(remote, tmp_path):
    """A job would refuse such a subcommand."""
    saved = tmp_path / "planned.yaml"
    _launched(tmp_path / "run", "train.py", "data/images", "--lr=1")
    assert main(["plan", str(remote), *_PRICES, "--save", str(saved)]) == 0
    assert yaml.safe_load(saved.read_text())["hyperparameters"] == {"lr": "1"}
    assert "# Arguments that cannot be hyperparameters: data/images. Set" in saved.read_text()


def test_arguments_are_part_of_the_job(remote, tmp_path):
    """Hyperparameters override their copies on the command line, and hidden values are dropped."""
    saved = tmp_path / "planned.yaml"
    given = "train.py", "fit", "--data_service.workers=1", "--trainer.callbacks+=Timer", "--lr=1", "--token=(hidden)"
    _launched(tmp_path / "run", *given, hyperparameters={"lr": "3"})
    assert main(["plan", str(remote), *_PRICES, "--save", str(saved)]) == 0
    expected = {"subcommand": "fit", "data_service.workers": "2", "trainer.callbacks+": "Timer", "lr": "3"}
    assert yaml.safe_load(saved.read_text())["hyperparameters"] == expected


def test_a_number_of_workers_of_the_measured_hosts_is_not_that_of_others(remote, tmp_path):
    """The number of workers is adapted to the new hosts, in the hyperparameters and in the local command."""
    saved = tmp_path / "planned.yaml"
    _launched(tmp_path / "run", "train.py", "fit", "--data_service.workers=2")
    assert main(["plan", str(remote), *_PRICES, "--kind", "ml.c5.4xlarge", "--save", str(saved)]) == 0
    assert yaml.safe_load(saved.read_text())["hyperparameters"] == {"subcommand": "fit", "data_service.workers": "15"}
    assert "--group data=1 -- train.py fit --data_service.workers=15" in saved.read_text().replace("\n#  ", "")


@pytest.mark.parametrize(
    ("command", "hyperparameters"),
    [
        (("train.py", "fit", "--data.num_workers=2"), {"subcommand": "fit", "data.num_workers": "3"}),
        (("train.py", "--num_workers=2", "--max_num_workers=2"), {"num_workers": "3", "max_num_workers": "2"}),
        (("train.py",), None),
    ],
)
def test_local_workers_are_set_where_the_run_names_them(tmp_path, command, hyperparameters):
    """If the run does not name the number of workers, the file asks for a change in the script."""
    run, saved = tmp_path / "run", tmp_path / "planned.yaml"
    local(run, waiting=0.6, cpus=3)
    _launched(run, *command)
    assert main(["plan", str(run), "--save", str(saved)]) == 0
    job = yaml.safe_load(saved.read_text())
    assert job.get("hyperparameters") == hyperparameters
    assert list(job["groups"]) == ["trainer"]
    assert ("Set num_workers=3 in the script" in saved.read_text()) == (hyperparameters is None)


def test_what_cannot_be_saved_is_said(remote, tmp_path, caplog):
    """If the file exists or cannot be written, the error names the cause, and no file is replaced."""
    saved = tmp_path / "job.yaml"
    saved.write_text("")
    for path, message in (
        (saved, f"{saved} already exists."),
        (tmp_path / "none" / "new.yaml", "cannot be written: No such file or directory"),
    ):
        caplog.clear()
        with caplog.at_level(logging.ERROR):
            assert main(["plan", str(remote), *_PRICES, "--save", str(path)]) == 2
        assert message in caplog.text
