"""Secrets of a job's hyperparameters and variables reach the script, and nothing that people read."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.fakes.job_folder import resource_config, write_job
from tests.integration.launching import TIMEOUT_S, failure, train, variables_of

VALUE = "S3CR3T"
HYPERPARAMETERS = {
    "data_service.token": VALUE,
    "trainer.logger.init_args.api_key": VALUE,
    "data_service": json.dumps({"token": VALUE, "port": 3}),
    "model": f"{{'options': [{{'hub-password': '{VALUE}'}}]}}",
    "tokenizer": "bert",
    "sagemaker_mpi_custom_mpi_options": f"-x HF_TOKEN={VALUE}",
}


@pytest.fixture
def secret_base(base):
    """A host of a job whose hyperparameters hold secrets."""
    return write_job(base, resource_config({"trainer": ["algo-1"]}, "algo-1"), hyperparameters=HYPERPARAMETERS)


def test_the_script_gets_secrets_and_the_log_does_not(secret_base, work):
    """The command line is complete for the script; in the log the values of secrets are hidden, and only those."""
    (work / "train.py").write_text("import json, sys; print(json.dumps(sys.argv[1:]))")
    ended = train(secret_base, work, "train.py", "fit", "--hub_token", VALUE)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == [
        "fit",
        "--hub_token",
        VALUE,
        f'--data_service={{"token": "{VALUE}", "port": 3}}',
        f"--data_service.token={VALUE}",
        f'--model={{"options": [{{"hub-password": "{VALUE}"}}]}}',
        "--tokenizer=bert",
        f"--trainer.logger.init_args.api_key={VALUE}",
    ]
    assert VALUE not in ended.stderr
    for part in ("fit --hub_token '(hidden)'", "'--data_service.token=(hidden)'", '"port": 3', "--tokenizer=bert"):
        assert part in ended.stderr


def test_a_command_that_cannot_be_started_is_quoted_without_secrets(secret_base, work):
    """The error names the command line, and neither log nor failure file has a secret."""
    (work / "train.py").write_text("")
    too_long = {**HYPERPARAMETERS, "x": "a" * 200_000}
    write_job(secret_base, hyperparameters=too_long)
    ended = train(secret_base, work, "train.py")
    assert ended.returncode == 2
    assert "cannot be started" in ended.stderr
    assert VALUE not in ended.stderr
    assert VALUE not in failure(secret_base)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"data_service.token": VALUE})[:-1],
        json.dumps({"data_service.token": f"{VALUE}\0"}),
        json.dumps({"config": json.dumps([{"token": VALUE}])}),
    ],
)
def test_a_broken_hyperparameter_is_quoted_without_secrets(base, work, text):
    """An error about the file or one of its values names the hyperparameter, not the secret."""
    write_job(base, resource_config({"trainer": ["algo-1"]}, "algo-1"), hyperparameters=text)
    (work / "train.py").write_text("")
    ended = train(base, work, "train.py")
    assert ended.returncode == 2
    assert "hyperparameter" in ended.stderr.lower()
    assert VALUE not in ended.stderr + failure(base)


def test_the_doctor_shows_no_secrets(secret_base, work):
    """Neither hyperparameters nor variables that say so are in the report."""
    (work / "train.py").write_text("")
    command = [sys.executable, "-m", "lightning_sm", "doctor", "--json"]
    secrets = {"NCCL_AUTH_TOKEN": VALUE, "LIGHTNING_SM_JOB_SECRET": VALUE, "NCCL_DEBUG": "WARN"}
    env = variables_of(secret_base, SAGEMAKER_PROGRAM="train.py", **secrets)
    ended = subprocess.run(command, cwd=work, env=env, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert "NCCL_DEBUG=WARN" in ended.stdout
    assert "NCCL_AUTH_TOKEN=(hidden)" in ended.stdout
    assert VALUE not in ended.stdout + ended.stderr
