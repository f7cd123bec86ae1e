"""Hyperparameters against the parser of the script that will get them."""

import json
from dataclasses import replace

import pytest

from lightning_sm.submit import script_check
from lightning_sm.submit.job_file import InputChannel, Range, Tune
from lightning_sm.submit.preflight import check
from lightning_sm.submit.problems import Findings
from lightning_sm.submit.request import encode_hyperparameters
from tests.unit.submit.test_preflight import JOB

ARGPARSE = """
import argparse, os, sys
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, required=True)
parser.add_argument("--optimizer", choices=["adam", "sgd"])
parser.add_argument("--data")
options = parser.parse_args()
open("trained", "w").close()
"""
LEFT_OVER = ARGPARSE.replace("parse_args()", "parse_known_args()[0]")
JSONARGPARSE = """
from jsonargparse import auto_cli
def main(lr: float = 1.0, optimizer: str = "adam"):
    open("trained", "w").close()
auto_cli(main)
"""


@pytest.fixture
def checked(tmp_path, caplog):
    """Checks hyperparameters against a script; returns the problems and what was logged. Nothing may be trained."""

    def run(script, hyperparameters, **changed):
        path = tmp_path / "train.py"
        path.write_text(script)
        job = replace(JOB, local_script=str(path), hyperparameters=hyperparameters, **changed)
        findings = Findings()
        caplog.clear()
        with caplog.at_level("INFO", "lightning_sm"):
            script_check.check_hyperparameters(job, encode_hyperparameters(job), findings)
        assert not (tmp_path / "trained").exists()
        return findings.problems, caplog.text

    return run


@pytest.mark.parametrize("script", [ARGPARSE, LEFT_OVER, JSONARGPARSE])
def test_what_the_parser_accepts_is_said(checked, script):
    """And the script has ended before it does anything else."""
    problems, log = checked(script, {"lr": 0.1, "optimizer": "sgd"})
    assert problems == []
    assert "accepts the hyperparameters" in log


@pytest.mark.parametrize(
    ("script", "hyperparameters", "words"),
    [
        (ARGPARSE, {"lr": "fast"}, "argument --lr: invalid float value: 'fast'"),
        (ARGPARSE, {"lr": 1, "optimiser": "sgd"}, "unrecognized arguments: --optimiser=sgd"),
        (ARGPARSE, {"optimizer": "sgd"}, "the following arguments are required: --lr"),
        (LEFT_OVER, {"lr": 1, "optimizer": "lion"}, "invalid choice: 'lion'"),
        (JSONARGPARSE, {"lr": 1, "optimiser": "sgd"}, "optimiser"),
    ],
)
def test_what_the_parser_refuses_is_a_problem(checked, script, hyperparameters, words):
    """In the parser's own words."""
    (problem,), _ = checked(script, hyperparameters)
    assert words in problem.text
    assert "train.py says: " in problem.text


def test_ranges_of_a_tuning_job_are_checked_with_their_first_values(checked):
    """A value of a list, or the smallest one."""
    tune = Tune("val_acc", {"lr": Range(0.1, 1), "optimizer": Range(values=["lion", "adam"])}, "maximize")
    (problem,), _ = checked(ARGPARSE, {"data": "a b"}, tune=tune)
    assert "invalid choice: 'lion'" in problem.text


def test_a_secret_is_not_repeated(checked):
    """The parser's message may quote it."""
    problems, log = checked(ARGPARSE, {"lr": 1, "hub_token": "hunter2"})
    assert len(problems) == 1
    assert "hunter2" not in problems[0].text + log


def test_files_of_the_hosts_cannot_be_checked_here(checked):
    """They are no problem."""
    script = ARGPARSE.replace('"--data")', '"--data", type=argparse.FileType())')
    problems, log = checked(script, {"lr": 1, "data": "/opt/ml/input/data/training/index"})
    assert problems == []
    assert "were not checked against the script: they name files of the hosts" in log


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("open('trained', 'w').close()", "has no parser that can be run alone"),
        (
            "from argparse import ArgumentParser\nimport nowhere",
            "does not run here: ModuleNotFoundError: No module named 'nowhere'",
        ),
        ("from argparse import ArgumentParser", "it ended with exit code 98 and said nothing"),
    ],
)
def test_what_cannot_be_checked_is_said_and_no_problem(checked, script, words):
    """A script without a parser is not even started."""
    problems, log = checked(script, {"lr": 1})
    assert problems == []
    assert "Hyperparameters were not checked against the script: " in log
    assert words in log


def test_a_script_that_does_not_come_to_its_parser_is_ended(checked, monkeypatch):
    """After the time limit."""
    monkeypatch.setattr(script_check, "_TIMEOUT_S", 1.0)
    script = "from argparse import ArgumentParser\nimport threading\nthreading.Event().wait()"
    problems, log = checked(script, {"lr": 1})
    assert problems == []
    assert "has not parsed its command line within 1 s" in log


def test_without_torch_nothing_is_started(checked, monkeypatch):
    """As where jobs are only submitted from."""
    monkeypatch.setattr(script_check, "find_spec", lambda _: None)
    assert "torch is not installed here" in checked(ARGPARSE, {"lr": "fast"})[1]


def test_the_script_is_that_of_the_code_that_is_sent(tmp_path, caplog):
    """It starts in the folder of the code, with the channels of a trainer host; a script of the image is elsewhere."""
    (tmp_path / "package").mkdir()
    code = (
        "import argparse, json, os\n"
        "folder = os.environ['SAGEMAKER_BASE_DIR']\n"
        "config = os.path.join(folder, 'input', 'config')\n"
        "channels = json.load(open(os.path.join(config, 'inputdataconfig.json')))\n"
        "hosts = json.load(open(os.path.join(config, 'resourceconfig.json')))\n"
        "found = [os.getcwd(), sorted(channels), sorted(os.listdir(os.path.join(folder, 'input', 'data'))),\n"
        "         hosts['current_group_name'], len(hosts['hosts'])]\n"
        "argparse.ArgumentParser().error(json.dumps(found))\n"
    )
    (tmp_path / "package" / "go.py").write_text(code)
    channels = {
        "a": InputChannel("s3://b/a", ["data"]),
        "b": InputChannel("s3://b/b", ["trainer"]),
        "c": InputChannel("s3://b/c"),
    }
    job = replace(JOB, source_dir=str(tmp_path), script="package/go.py", channels=channels)
    findings = Findings()
    script_check.check_hyperparameters(job, {}, findings)
    (problem,) = findings.problems
    assert json.loads(problem.text.partition(" says: ")[2]) == [str(tmp_path), ["b", "c"], ["b", "c"], "trainer", 3]
    with caplog.at_level("INFO", "lightning_sm"):
        script_check.check_hyperparameters(JOB, {}, findings)
    assert "it is in the image; to check them, set local_script" in caplog.text


def test_a_local_script_that_does_not_exist_is_a_problem():
    """Before anything is run."""
    (problem,) = check(replace(JOB, local_script="/nowhere/train.py"), "cloud", "us-east-1").problems
    assert "local_script is '/nowhere/train.py', which does not exist" in problem.text
