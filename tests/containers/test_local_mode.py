"""Jobs in our image through the unmodified local mode of SDK v2, without an AWS account or a network."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml

from app.digits import write_digits
from tests.containers import own_code
from tests.containers.local_mode import fit, new_label

pytestmark = [pytest.mark.docker, pytest.mark.sdk2]

# The generic Estimator sends str(value) of each hyperparameter (sagemaker 2.257.7, estimator.py,
# EstimatorBase.set_hyperparameters). Without the optimizer's state, a checkpoint is a third of the size; the SDK takes
# longer to compress it than the training takes.
_CHECKPOINTS = {"monitor": None, "save_weights_only": True, "filename": "a b"}
_HYPERPARAMETERS = {
    "config": "app/configs/smoke.yaml",
    "data.init_args.batch_size": "8",
    "model.learning_rate": 1e-05,
    "model.norm": "group",
    "trainer.callbacks": [{"class_path": "ModelCheckpoint", "init_args": _CHECKPOINTS}],
    "trainer.default_root_dir": "all runs",
    "trainer.enable_model_summary": False,
    "trainer.limit_train_batches": 2,
    "trainer.logger": {"class_path": "CSVLogger", "init_args": {"save_dir": ".", "name": "c d", "version": 3}},
    "trainer.max_time": None,
}


def _estimator(image, **arguments):
    settings = {"instance_type": "local", "instance_count": 2, "environment": own_code.ENVIRONMENT}
    return {"image_uri": image, **settings, **arguments}


def _own_code(folder, image, *, has_requirements=False, **hyperparameters):
    """Return the arguments of ``fit`` for a job with the user's script."""
    estimator = _estimator(
        image,
        entry_point=own_code.ENTRY_POINT,
        source_dir=own_code.source_dir(folder, has_requirements=has_requirements),
        hyperparameters={"trainer.max_epochs": 1, **hyperparameters},
    )
    return folder / "job", estimator, {"training": own_code.points(folder).as_uri()}


def test_the_app_of_the_image_trains(image, sdk2_python, tmp_path):
    """Without an entry point, the image's script runs, with the types of all hyperparameters restored."""
    data = tmp_path / "digits"
    write_digits(data)
    estimator = _estimator(image, hyperparameters=_HYPERPARAMETERS)
    job = fit(sdk2_python, tmp_path / "job", estimator, {"training": data.as_uri()}, is_offline=True)
    assert job.has_succeeded, job
    assert len(job.exit_codes) == 2
    assert set(job.model) == own_code.MODEL_FILES
    assert "failure" not in job.artifacts
    config = yaml.safe_load(job.model["config.yaml"])
    trainer, init = config["trainer"], config["data"]["init_args"]
    assert (init["batch_size"], init["data_dir"]) == (8, "/opt/ml/input/data/training")
    assert (config["model"]["learning_rate"], config["model"]["norm"]) == (1e-05, "group")
    assert (trainer["limit_train_batches"], trainer["max_time"]) == (2, None)
    assert trainer["enable_model_summary"] is False
    callback, logger = trainer["callbacks"][0]["init_args"], trainer["logger"]["init_args"]
    assert {name: callback[name] for name in _CHECKPOINTS} == _CHECKPOINTS
    assert (logger["name"], logger["version"]) == ("c d", 3)
    assert [name for name in job.artifacts if name.endswith("c d/version_3/metrics.csv")]


def test_own_code_runs_instead_of_the_app(image, sdk2_python, tmp_path):
    """The entry point's script runs with its modules, and every rank sees the same typed hyperparameters."""
    hyperparameters = {f"model.{name}": value for name, value in own_code.ARGUMENTS.items()}
    job = fit(sdk2_python, *_own_code(tmp_path, image, has_requirements=True, **hyperparameters), is_offline=True)
    own_code.check_two_hosts(job, interface="eth0")
    assert [one["has_requirements"] for one in own_code.seen(job)] == [True, True]


def test_stopped_job_saves_a_checkpoint(image, sdk2_python, tmp_path):
    """``docker stop`` in mid-training leaves a checkpoint of all ranks, the model, exit code 143, and the reason."""
    label = new_label()
    endless = {"trainer.max_epochs": -1, "trainer.enable_progress_bar": False}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(fit, sdk2_python, *_own_code(tmp_path, image, **endless), label=label, is_offline=True)
        own_code.stop_in_the_middle(label, 2, running)
        job = running.result()
    assert set(job.exit_codes.values()) == {143}, job
    assert "The job was stopped or interrupted (SIGTERM)" in job.artifacts["failure"].decode()
    checkpoints = [name for name in job.artifacts if "/checkpoints/" in name and "lightning_logs" not in name]
    assert [own_code.short(name.removeprefix("data/")) for name in checkpoints] == ["algo-1"]
    assert set(job.model) == own_code.MODEL_FILES
