"""Which script runs, how it starts, and which packages pip must not change."""

import importlib.metadata
import sys
from pathlib import Path

import pytest

from lightning_sm.errors import ScriptError
from lightning_sm.launcher.user_code.requirements import constraints, failure
from lightning_sm.launcher.user_code.script import Program, Submission, find_program, find_script, find_submission
from tests.fakes.job_folder import make_job


def job_with(hyperparameters=None, **facts):
    """A job with one host."""
    return make_job({"trainer": ["algo-1"]}, hyperparameters=hyperparameters or {}, **facts)


@pytest.mark.parametrize(
    ("line", "hyperparameter", "variable", "chosen"),
    [
        ("a.py", '"b.py"', "c.py", "a.py"),
        (None, '"b.py"', "c.py", "b.py"),
        (None, "b.py", "b.py", "b.py"),
        (None, None, "c.py", "c.py"),
        (None, '""', "c.py", "c.py"),
        ("a.py", None, None, "a.py"),
    ],
)
def test_command_line_then_job_then_image(line, hyperparameter, variable, chosen):
    """The command line takes precedence over the job, and the job over the image."""
    hyperparameters = {} if hyperparameter is None else {"sagemaker_program": hyperparameter}
    env = {} if variable is None else {"SAGEMAKER_PROGRAM": variable}
    assert find_program(line, job_with(hyperparameters), env).name == chosen


@pytest.mark.parametrize(
    ("hyperparameter", "variable", "address"),
    [
        ('"s3://b/k"', "s3://other/k", "s3://b/k"),
        (None, "s3://other/k", "s3://other/k"),
        (None, "/opt/ml/code", None),
        ("/opt/ml/code", None, "/jobs/ml/code"),
        ("/opt/ml/input/data/code", None, "/opt/ml/input/data/code"),
        (None, None, None),
    ],
)
def test_code_that_came_with_the_job(hyperparameter, variable, address):
    """A hyperparameter gives the job's code; a variable only if it is an address, because images set it to folders."""
    hyperparameters = {} if hyperparameter is None else {"sagemaker_submit_directory": hyperparameter}
    env = {} if variable is None else {"SAGEMAKER_SUBMIT_DIRECTORY": variable}
    submission = find_submission(job_with(hyperparameters, base_dir=Path("/jobs/ml")), env)
    assert (submission and submission.address) == address
    assert submission is None or isinstance(submission, Submission)


@pytest.mark.parametrize(
    ("name", "content", "command"),
    [
        ("train.py", "#!/bin/sh", [sys.executable, "-u"]),
        ("run.sh", "echo", ["/bin/sh"]),
        ("run.sh", "#!/bin/bash -e -x\n", ["/bin/bash", "-e -x"]),
        ("run.sh", "#!/usr/bin/env bash\r\n", ["/usr/bin/env", "bash"]),
        ("run.sh", "#!\n", ["/bin/sh"]),
        ("run", "#! /bin/sh\n", ["/bin/sh"]),
        ("run", "\x7fELF", []),
    ],
)
def test_what_starts_a_file(tmp_path, monkeypatch, name, content, command):
    """Python runs .py files; others run with the interpreter in their first line, else sh; programs run directly."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(content.encode())
    script = find_script(Program(name, "the command line"), job_with(), {})
    assert list(script.command) == [*command, str(tmp_path / name)]


def test_a_name_that_is_no_file_is_an_error(tmp_path, monkeypatch):
    """The error states where the name comes from."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ScriptError, match=r"'nets\.train' does not exist. It was named by the command line\."):
        find_script(Program("nets.train", "the command line"), job_with(base_dir=tmp_path / "ml"), {})


def test_constraints_keep_what_the_image_is_built_around():
    """Constraints pin the installed torch and Lightning, and give other requirements' ranges without extras."""
    lines = constraints()
    assert f"torch=={importlib.metadata.version('torch')}" in lines
    assert f"pytorch-lightning=={importlib.metadata.version('pytorch-lightning')}" in lines
    assert any(line.startswith("numpy") and "==" not in line for line in lines)
    assert not any("[" in line or ";" in line for line in lines)
    assert sum(line.startswith("torch") and line[5] in "=<>" for line in lines) == 1


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("Looking in indexes\n  ERROR: inner\nERROR: outer\n", "  ERROR: inner\nERROR: outer"),
        ("", "killed by SIGKILL (exit code 137); nothing was written to stderr"),
        ('Traceback (most recent call last):\n  File "a", line 1, in b\nImportError: no pip\n', "ImportError: no pip"),
        ("ERROR: " + "x" * 5000, "..."),
    ],
)
def test_pips_own_words_come_first(tmp_path, output, said):
    """The reason contains pip's errors, nothing else of its log, and fits into the failure file."""
    reason = failure(output, 137, tmp_path, is_protected=True)
    assert said in reason
    assert "Looking" not in reason
    assert len(reason) < 1024 or not output
