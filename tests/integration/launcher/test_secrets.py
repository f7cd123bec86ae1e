"""Secrets in hyperparameters and variables reach the script but not logs, failure files or reports."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.fakes.job_folder import resource_config, write_job
from tests.integration.launching import TIMEOUT_S, failure, local_addresses, train, variables_of

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
    """A host of a job with secrets in its hyperparameters."""
    return write_job(base, resource_config({"trainer": ["algo-1"]}, "algo-1"), hyperparameters=HYPERPARAMETERS)


def test_the_script_gets_secrets_and_the_log_does_not(secret_base, work):
    """The script gets the complete command line; the log hides the values of secrets, and no others."""
    (work / "train.py").write_text("import json, os, sys; print(json.dumps([os.environ['HF_TOKEN'], *sys.argv[1:]]))")
    ended = train(secret_base, work, "train.py", "fit", "--hub_token", VALUE)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == [
        VALUE,  # from mpirun's -x
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
    for part in ("fit --hub_token '(hidden)'", "'--data_service.token=(hidden)'", "--tokenizer=bert"):
        assert part in ended.stderr


@pytest.mark.parametrize(
    ("hosts", "current", "secret", "is_said"),
    [
        (["algo-1", "algo-2"], "algo-1", "", True),
        (["algo-1", "algo-2"], "algo-1", "x" * 32, False),
        (["algo-1", "algo-2"], "algo-2", "", False),
        (["algo-1"], "algo-1", "", False),
    ],
)
def test_a_job_without_a_secret_says_so_once(base, work, hosts, current, secret, is_said):
    """The main host of a job with several hosts warns that LIGHTNING_SM_JOB_SECRET is not set."""
    write_job(base, resource_config({"trainer": hosts}, current))
    (work / "train.py").write_text("")
    ended = train(base, work, "train.py", LIGHTNING_SM_JOB_SECRET=secret, **local_addresses("algo-1", "algo-2"))
    assert ended.stderr.count("this job has no secret: anyone who knows its name and can reach port") == is_said
    assert ended.stderr.count("set LIGHTNING_SM_JOB_SECRET to the same random characters") == is_said


_CLI = """
import os, torch
from pytorch_lightning import LightningModule
from lightning_sm import SageMakerCLI

class Model(LightningModule):
    def __init__(self, api_key: str = "", options: dict = {}, width: int = 1):
        super().__init__()
        with open("/proc/self/cmdline") as file:
            words = file.read().split(chr(0))
        rank = os.environ.get("LOCAL_RANK", "0")
        text = f"rank {rank}: {api_key} {options} {width}, secret in ps: {'S3CR3T' in str(words)}, {words[-3:]}\\n"
        os.write(1, text.encode())
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(4, 1))

quiet = dict(accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False)
SageMakerCLI(Model, trainer_defaults=quiet, save_config_callback=None)
"""


@pytest.mark.processes
def test_secrets_are_on_no_command_line_of_the_cli(base, work):
    """SageMakerCLI reads secrets from the job, even in local ranks; other values stay on the command line."""
    options = {"model.options": json.dumps({"token": VALUE, "b": 1}), "model.width": "3", "trainer.devices": "2"}
    hyperparameters = {"model.api_key": VALUE, **options}
    write_job(base, resource_config({"trainer": ["algo-1"]}, "algo-1", interface="lo"), hyperparameters=hyperparameters)
    (work / "train.py").write_text(_CLI)
    ended = train(base, work, "train.py", "fit", "--trainer.strategy=ddp", **local_addresses("algo-1"))
    assert ended.returncode == 0, ended.stderr
    seen = (
        f"{VALUE} {{'token': '{VALUE}', 'b': 1}} 3, secret in ps: False, ['--model.width=3', '--trainer.devices=2', '']"
    )
    lines = [line for line in ended.stdout.splitlines() if line.startswith("rank ")]
    assert sorted(lines) == [f"rank {rank}: {seen}" for rank in range(2)]
    assert "model.api_key, model.options: not on the script's command line." in ended.stderr
    assert VALUE not in ended.stderr


def test_a_script_that_reads_no_secrets_from_the_job_is_named(secret_base, work):
    """If a script mentions SageMakerCLI but never calls it, the log names the secrets that the script did not get."""
    (work / "train.py").write_text("from lightning_sm import SageMakerCLI\nif False:\n    SageMakerCLI()")
    ended = train(secret_base, work, "train.py")
    assert ended.returncode == 0
    assert "no SageMakerCLI has read the values of data_service, data_service.token, model, trainer" in ended.stderr


def test_other_scripts_keep_secrets_on_their_command_line(secret_base, work):
    """Other scripts get secrets on the command line, and the log warns who can read them there."""
    (work / "train.py").write_text("import argparse, sys; print(sys.argv[1:])")
    ended = train(secret_base, work, "train.py")
    assert f"--data_service.token={VALUE}" in ended.stdout
    assert "every process on this host, and W&B, can read the script's command line" in ended.stderr
    assert VALUE not in ended.stderr


def test_a_command_that_cannot_be_started_is_quoted_without_secrets(secret_base, work):
    """If the command cannot be started, neither the log nor the failure file contains a secret."""
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
    """An error about a malformed hyperparameter does not quote the secret."""
    write_job(base, resource_config({"trainer": ["algo-1"]}, "algo-1"), hyperparameters=text)
    (work / "train.py").write_text("")
    ended = train(base, work, "train.py")
    assert ended.returncode == 2
    assert "hyperparameter" in ended.stderr.lower()
    assert VALUE not in ended.stderr + failure(base)


def test_the_doctor_shows_no_secrets(secret_base, work):
    """The doctor's report shows no secrets from hyperparameters or variables."""
    (work / "train.py").write_text("")
    command = [sys.executable, "-m", "lightning_sm", "doctor", "--json"]
    secrets = {"NCCL_AUTH_TOKEN": VALUE, "LIGHTNING_SM_JOB_SECRET": VALUE, "NCCL_DEBUG": "WARN"}
    env = variables_of(secret_base, SAGEMAKER_PROGRAM="train.py", **secrets)
    ended = subprocess.run(command, cwd=work, env=env, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert "NCCL_DEBUG=WARN" in ended.stdout
    assert "NCCL_AUTH_TOKEN=(hidden)" in ended.stdout
    assert VALUE not in ended.stdout + ended.stderr
