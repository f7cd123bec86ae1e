"""Scripts that use the real Hydra, which accepts ``name=value`` but not ``--name=value``."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.fakes.job_folder import resource_config, write_job
from tests.integration.hosts import REPOSITORY
from tests.integration.launching import failure, train

_SCRIPT = """
import json, sys
import hydra
from omegaconf import OmegaConf

@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(config):
    print(json.dumps(OmegaConf.to_container(config, resolve=True)))

if __name__ == "__main__":
    main()
"""
VALUE = "S3CR3T"
_CONFIG = "model: {width: 1, name: a, layers: [1]}\noptimizer: {lr: 0.1, name: sgd}\nbuild: true\ntoken: ''\n"
_HARD = "it's a \\'quoted\\' \"text\", {with}: [all] = $signs, and a backslash \\"


@pytest.fixture(scope="session")
def hydra(tmp_path_factory):
    """A ``PYTHONPATH`` folder with Hydra, which is not installed in the tests' environment."""
    folder = tmp_path_factory.mktemp("hydra")
    needs = ["hydra-core>=1.3,<1.4", "omegaconf>=2.3,<2.4", "antlr4-python3-runtime==4.9.*"]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *needs]
    subprocess.run(command, check=True, timeout=90)
    return folder


@pytest.fixture
def hydra_script(work):
    """A Hydra script with two configurations."""
    (work / "train.py").write_text(_SCRIPT)
    (work / "conf").mkdir()
    (work / "conf" / "config.yaml").write_text(_CONFIG)
    (work / "conf" / "other.yaml").write_text(_CONFIG.replace("sgd", "adam"))
    return work


def _path(hydra):
    return os.pathsep.join([str(REPOSITORY), str(hydra)])


def _run(base, work, hydra, hyperparameters, *args):
    write_job(base, resource_config({"trainer": ["algo-1"]}, "algo-1"), hyperparameters=hyperparameters)
    return train(base, work, "train.py", *args, PYTHONPATH=_path(hydra))


def test_hyperparameters_override_the_configuration(base, hydra_script, hydra):
    """Numbers, special characters, lists, dicts, additions and options are converted to Hydra's syntax."""
    hyperparameters = {
        "model.width": "3",
        "model.name": _HARD,
        "model.layers": "[1, 2]",
        "optimizer": '{"lr": 0.01, "name": "a b"}',
        "build": "None",
        "+extra.path": "s3://bucket/x",
        "config-name": "other",
        "sagemaker_program": "train.py",
    }
    ended = _run(base, hydra_script, hydra, hyperparameters, "++more=1")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == {
        "model": {"width": 3, "name": _HARD, "layers": [1, 2]},
        "optimizer": {"lr": 0.01, "name": "a b"},
        "build": None,
        "token": "",
        "extra": {"path": "s3://bucket/x"},
        "more": 1,
    }


def test_secrets_are_not_in_the_log(base, hydra_script, hydra):
    """The log hides secrets in Hydra's notation and warns that others can read the command line."""
    ended = _run(base, hydra_script, hydra, {"token": VALUE})
    assert json.loads(ended.stdout)["token"] == VALUE
    assert "'token=(hidden)'" in ended.stderr
    assert "can read the script's command line, which contains the values of token." in ended.stderr
    assert VALUE not in ended.stderr


def test_an_override_of_what_is_not_there_is_the_reason_for_the_failure(base, hydra_script, hydra):
    """The failure file quotes Hydra's message about an override of a key that does not exist."""
    ended = _run(base, hydra_script, hydra, {"epochs": "3"})
    assert ended.returncode == 1
    assert "Could not override 'epochs'" in failure(base)
