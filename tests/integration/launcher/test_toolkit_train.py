"""The stock ``train`` of sagemaker-training runs a SageMakerCLI script on two hosts that resolve each other's names."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil

import pytest

from tests.integration.hosts import REPOSITORY, SCRIPTS, Hosts, run_together

pytestmark = [
    pytest.mark.processes,
    pytest.mark.root,
    pytest.mark.toolkit,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to replace /etc/hosts for one process"),
    pytest.mark.skipif(
        importlib.util.find_spec("sagemaker_training") is None, reason="needs the package sagemaker-training"
    ),
]

_SCRIPT = "train_with_cli.py"
# As SDK v2's framework estimators send them: JSON, with additional ``sagemaker_`` keys.
_HYPERPARAMETERS = {
    "model.nesterov": "true",
    "model.note": "null",
    "model.rate": "0.001",
    "model.schedule": json.dumps({"warm": 1, "cool": 2.5}),
    "sagemaker_container_log_level": "20",
    "sagemaker_program": json.dumps(_SCRIPT),
    "trainer.accelerator": '"cpu"',
    "trainer.devices": "1",
    "trainer.enable_progress_bar": "false",
    "trainer.logger": "false",
    "trainer.max_epochs": "1",
}


def _train(folder, hyperparameters, source=SCRIPTS / _SCRIPT, program=None):
    """Run ``train`` on both hosts, which resolve their names through a private hosts file."""
    hosts = Hosts(folder, hyperparameters=hyperparameters, channels={})
    names = folder / "names"
    lines = ["127.0.0.1 localhost", *(f"{hosts.address(host)} {host}" for host in hosts.names)]
    names.write_text("\n".join(lines) + "\n")
    command = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec train', str(names)]
    commands = {}
    for host in hosts.names:
        code = hosts.folder / host / "code"
        code.mkdir()
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, code / source.name)
        env = {**hosts.env(host), "AWS_REGION": "us-east-1"}
        if program is not None:
            env["SAGEMAKER_PROGRAM"] = program
        del env["LIGHTNING_SM_HOST_ADDRESSES"]
        commands[host] = command, env
    return hosts, run_together(commands)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished job of two hosts."""
    return _train(tmp_path_factory.mktemp("trained"), _HYPERPARAMETERS)


def test_both_hosts_succeed(trained):
    """On both hosts, the toolkit exits with 0 and writes a success file but no failure file."""
    hosts, ended = trained
    for host in hosts.names:
        assert ended[host].code == 0, ended[host].output
        assert (hosts.folder / host / "output" / "success").exists()
        assert not (hosts.folder / host / "output" / "failure").exists()


def test_hosts_train_together(trained):
    """Each host runs one rank of a world of two, and the main address is the first host's name."""
    hosts, _ = trained
    assert [(seen["rank"], seen["world_size"], seen["met"]) for seen in hosts.seen()] == [
        (0, 2, [0, 1]),
        (1, 2, [0, 1]),
    ]
    assert {seen["address"] for seen in hosts.seen()} == {"algo-1"}


def test_hyperparameters_reach_the_model_unmangled(trained):
    """A dict, None and a bool keep their types, although the toolkit's arguments lose them."""
    hosts, ended = trained
    assert "--model.schedule cool=2.5,warm=1" in ended["algo-1"].output
    for seen in hosts.seen():
        expected = {"schedule": {"warm": 1.0, "cool": 2.5}, "note": None, "nesterov": True, "rate": 0.001}
        assert seen["arguments"] == expected
        assert seen["max_epochs"] == 1


@pytest.mark.proof
def test_contradicting_hyperparameter_fails_the_job(tmp_path):
    """With a wrong num_nodes, the toolkit exits with 1 and writes a failure file but no success file."""
    hosts, ended = _train(tmp_path, {**_HYPERPARAMETERS, "trainer.num_nodes": "3"})
    failed = [host for host in hosts.names if ended[host].code is not None]
    assert failed
    for host in failed:
        assert ended[host].code == 1
        assert "num_nodes=3 does not match the number of trainer hosts in the job, 2 " in ended[host].output
        assert (hosts.folder / host / "output" / "failure").exists()
        assert not (hosts.folder / host / "output" / "success").exists()


@pytest.mark.proof
def test_the_example_app_trains_by_the_stock_toolkit(tmp_path):
    """``SAGEMAKER_PROGRAM=app/train.py`` runs the app unchanged, and the first host writes the model."""
    hosts, ended = _train(
        tmp_path,
        {"config": '"app/configs/smoke.yaml"', "trainer.enable_model_summary": "false", "data.augment": "false"},
        source=REPOSITORY / "app",
        program="app/train.py",
    )
    for host in hosts.names:
        assert ended[host].code == 0, ended[host].output
        assert (hosts.folder / host / "output" / "success").exists()
    assert "val_acc=" in ended["algo-1"].output
    assert (hosts.folder / "algo-1" / "model" / "model.ckpt").exists()
    assert not any((hosts.folder / "algo-2" / "model").iterdir())
