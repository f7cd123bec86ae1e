"""The doctor's checks of what the launcher would refuse: settings in variables, and the script."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_sm.doctor.checks import start
from lightning_sm.doctor.context import Context
from lightning_sm.doctor.report import Status
from lightning_sm.job.variables import SETTINGS
from tests.fakes.job_folder import resource_config, write_job


def _context(base, **env):
    return Context.of({"SAGEMAKER_BASE_DIR": str(base), **env}, 20)


@pytest.fixture
def base(tmp_path, monkeypatch):
    """A job of one host, seen from an empty folder."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return write_job(tmp_path / "ml", resource_config({"trainer": ["algo-1"]}, "algo-1"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("STOP_SCHEDULE", "abc"),
        ("PEERS_TIMEOUT_S", "10s"),
        ("PEERS_TIMEOUT_S", "inf"),
        ("PREPARE_S", "x"),
        ("INSTALL_REQUIREMENTS", "maybe"),
        ("DEVICES", "0"),
    ],
)
def test_setting_that_the_launcher_refuses_is_a_problem(tmp_path, name, value):
    """A setting that ends the job at its start is quoted, in a job and in an image."""
    found = {result.status: result for result in start.variables(_context(tmp_path, **{f"LIGHTNING_SM_{name}": value}))}
    assert found[Status.PROBLEM].found.startswith(f"LIGHTNING_SM_{name}={value!r}: expected ")


def test_a_secret_is_never_shown(tmp_path):
    """Neither a valid secret nor a wrong one is in what the doctor found; that it is set is."""
    for secret in ("0123456789abcdef" * 4, "hunter2"):
        results = list(start.variables(_context(tmp_path, LIGHTNING_SM_JOB_SECRET=secret)))
        assert "LIGHTNING_SM_JOB_SECRET" in results[-1].found
        assert secret not in str(results)


def test_settings_are_named(tmp_path):
    """The variables that are set are shown by name; an empty one means the default."""
    context = _context(tmp_path, LIGHTNING_SM_PEERS_TIMEOUT_S="", LIGHTNING_SM_PREPARE_S="60")
    (result,) = start.variables(context)
    assert result.status is Status.OK
    assert result.found == "settings: LIGHTNING_SM_PREPARE_S, LIGHTNING_SM_PEERS_TIMEOUT_S"


@pytest.mark.parametrize(
    ("name", "meant"), [("DATA_GROUP", "DATA_GROUPS"), ("MAINPORT", "MAIN_PORT"), ("STOP_SHEDULE", "STOP_SCHEDULE")]
)
def test_misspelled_setting_is_a_warning(tmp_path, name, meant):
    """A variable that is almost a setting is named, with the one that was meant."""
    result, _ = start.variables(
        _context(tmp_path, **{f"LIGHTNING_SM_{name}": "x", "LIGHTNING_SM_DEVICES": "1", "MAIN_PORTS": "1"})
    )
    assert result.status is Status.WARNING
    assert f"LIGHTNING_SM_{name} is set" in result.found
    assert f"LIGHTNING_SM_{meant} meant" in result.advice


def test_no_variable_of_the_package_counts_as_misspelled(tmp_path):
    """Neither what users set nor what our own processes pass on."""
    results = start.variables(_context(tmp_path, **{setting.name: "" for setting in SETTINGS}))
    assert [result.status for result in results] == [Status.OK]


def test_script_of_a_job_is_shown_with_who_named_it(base):
    """The script that the launcher would start is found where the launcher looks."""
    (base / "code").mkdir()
    (base / "code" / "train.py").write_text("")
    write_job(base, hyperparameters={"sagemaker_program": '"train.py"'})
    (result,) = start.script(_context(base, SAGEMAKER_PROGRAM="other.py"))
    assert result.status is Status.OK
    assert result.found == f"{base}/code/train.py (hyperparameter sagemaker_program)"


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"SAGEMAKER_PROGRAM": "app/trian.py"}, "The training script 'app/trian.py' "),
        ({}, "No training script was given."),
    ],
)
def test_job_without_a_script_is_a_problem(base, env, said):
    """A script that is nowhere, or is not named, is reported in the launcher's words."""
    (result,) = start.script(_context(base, **env))
    assert result.status is Status.PROBLEM
    assert result.found.startswith(said)


def test_script_of_an_image_must_be_there(base, tmp_path):
    """Outside of a job, the script that the image names is looked for as in a job."""
    (result,) = start.script(_context(tmp_path / "none", SAGEMAKER_PROGRAM="train.py"))
    assert result.status is Status.PROBLEM
    Path("train.py").write_text("")
    (result,) = start.script(_context(tmp_path / "none", SAGEMAKER_PROGRAM="train.py"))
    assert (result.status, result.found) == (Status.OK, f"{Path.cwd()}/train.py (SAGEMAKER_PROGRAM)")


def test_laptop_needs_no_script(tmp_path):
    """Where neither a job nor an image names a script, none is missed."""
    assert list(start.script(_context(tmp_path))) == []


def test_emulator_names_the_script_elsewhere(base):
    """On emulated hosts only the command line of the launcher knows the script."""
    assert list(start.script(_context(base, LIGHTNING_SM_HOST_ADDRESSES=json.dumps({"algo-1": "127.0.0.2"})))) == []


def test_job_that_cannot_be_read_has_no_script(base):
    """The malformed file is the problem, not a script that it may name."""
    write_job(base, resources="{not json")
    assert list(start.script(_context(base, SAGEMAKER_PROGRAM="train.py"))) == []


def test_code_that_must_be_fetched_is_not_looked_into(base):
    """Where the code comes with the job, the name of its script is all that is known."""
    submitted = {"sagemaker_program": "train.py", "sagemaker_submit_directory": "s3://bucket/code.tar.gz"}
    write_job(base, hyperparameters=submitted)
    (result,) = start.script(_context(base))
    assert result.status is Status.OK
    assert "in the code at s3://bucket/code.tar.gz" in result.found


def test_folder_with_the_code_of_the_job_is_looked_into(base, tmp_path):
    """Code that came as a folder must be there, and have the script."""
    write_job(
        base, hyperparameters={"sagemaker_program": "train.py", "sagemaker_submit_directory": str(tmp_path / "x")}
    )
    (result,) = start.script(_context(base))
    assert (result.status, "neither a folder nor a file" in result.found) == (Status.PROBLEM, True)
    (tmp_path / "x").mkdir()
    (result,) = start.script(_context(base))
    assert (result.status, "does not exist" in result.found) == (Status.PROBLEM, True)
    (tmp_path / "x" / "train.py").write_text("")
    (result,) = start.script(_context(base))
    assert result.status is Status.OK
