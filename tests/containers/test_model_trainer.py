"""Jobs in our image through the local mode of SDK v3, which has its own drivers instead of sagemaker-training."""

from __future__ import annotations

import pytest
import yaml

from tests.containers import own_code, sdk_v3

pytestmark = [pytest.mark.docker, pytest.mark.sdk3]

_CHECKPOINTS = {"monitor": None, "save_weights_only": True, "filename": "a b"}


def _arguments(image, hyperparameters, **source_code):
    arguments = {"training_image": image, "environment": own_code.ENVIRONMENT, "hyperparameters": hyperparameters}
    return {**arguments, "source_code": source_code} if source_code else arguments


def test_the_app_of_the_image_trains(image, sdk3_python, tmp_path):
    """Without source code, v3 runs the image's entry point, and hyperparameters of every type and name arrive."""
    hyperparameters = {
        "config": "app/configs/smoke.yaml",
        "data": {"init_args": {"batch_size": 4}},
        "model.learning_rate": 1e-05,
        "trainer.callbacks": [{"class_path": "ModelCheckpoint", "init_args": _CHECKPOINTS}],
        "trainer.enable_model_summary": False,
        "trainer.limit_train_batches": "2",
        "trainer.max_time": None,
    }
    job = sdk_v3.train(sdk3_python, tmp_path / "job", _arguments(image, hyperparameters))
    assert job.has_succeeded, job
    assert set(job.model) == own_code.MODEL_FILES
    assert "failure" not in job.artifacts
    config = yaml.safe_load(job.model["config.yaml"])
    trainer = config["trainer"]
    assert config["data"]["init_args"]["batch_size"] == 4
    assert config["model"]["learning_rate"] == 1e-05
    assert (trainer["num_nodes"], trainer["limit_train_batches"], trainer["max_time"]) == (1, 2, None)
    assert trainer["enable_model_summary"] is False
    assert {name: trainer["callbacks"][0]["init_args"][name] for name in _CHECKPOINTS} == _CHECKPOINTS


def test_own_code_runs_instead_of_the_app(image, sdk3_python, tmp_path):
    """Under v3's driver, without our launcher, every rank sees its place and the same typed hyperparameters."""
    hyperparameters = {"model": own_code.ARGUMENTS, "trainer": {"max_epochs": 1}}
    source_code = {"source_dir": own_code.source_dir(tmp_path), "entry_script": own_code.ENTRY_POINT}
    job = sdk_v3.train(
        sdk3_python,
        tmp_path / "job",
        _arguments(image, hyperparameters, **source_code),
        {"training": own_code.points(tmp_path)},
        num_hosts=2,
    )
    own_code.check_two_hosts(job, interface=None)
    # v3 writes "ethwe", an interface that no container has (train/local/local_container.py).
    assert "interface ethwe (not on this host)" in job.logs["algo-1"]


def test_torchrun_of_sdk_v3(image, sdk3_python, tmp_path):
    """v3's torchrun, with two processes on each of two hosts, assigns the ranks that our launcher would assign."""
    job = sdk_v3.train(
        sdk3_python,
        tmp_path / "job",
        {
            **_arguments(
                image,
                {"trainer": {"max_epochs": 1}},
                source_dir=own_code.source_dir(tmp_path),
                entry_script=own_code.ENTRY_POINT,
            ),
            "distributed": {"process_count_per_node": 2},
        },
        {"training": own_code.points(tmp_path)},
        num_hosts=2,
    )
    assert job.has_succeeded, job
    hosts = [("algo-1", 0), ("algo-1", 0), ("algo-2", 1), ("algo-2", 1)]
    assert own_code.places(job) == [(rank, *host, rank % 2, 4) for rank, host in enumerate(hosts)]
    assert [one["started_by"] for one in own_code.seen(job)] == [["torchrun"]] * 4
