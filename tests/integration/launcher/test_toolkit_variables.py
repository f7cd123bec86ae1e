"""A script gets the same variables from ``lightning-sm train`` as from the toolkit's ``train``."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from tests.fakes.job_folder import resource_config, write_job
from tests.integration.launching import TIMEOUT_S, train, variables_of

pytestmark = [
    pytest.mark.toolkit,
    pytest.mark.skipif(
        importlib.util.find_spec("sagemaker_training") is None, reason="needs the package sagemaker-training"
    ),
]

_TOOLKIT = "from sagemaker_training.cli.train import main; main()"
_DUMP = "import json, os, sys\nprint('DUMP', json.dumps([dict(os.environ), sys.argv[1:], os.getcwd()]))"
_PREFIXES = ("SM_", "SAGEMAKER_", "CURRENT_HOST", "TRAINING_JOB_", "AWS_")

# Variables whose values differ. All others are identical.
_DIFFERENT = {
    # The script's arguments. Ours are --name=value and keep None and dicts.
    "SM_USER_ARGS",
    # The toolkit sets both to an empty string if the job does not; we keep a known name or region.
    "SAGEMAKER_JOB_NAME",
    "SAGEMAKER_REGION",
}

# Used only by the toolkit's launchers.
_LEFT_OUT = {"SM_DISTRIBUTION_INSTANCE_GROUPS", "SM_TOPOLOGY"}
_LEFT_OUT_OF_TRAINING_ENV = {
    "distribution_hosts",
    "distribution_instance_groups",
    "is_master",
    "is_modelparallel_enabled",
    "is_smddpmprun_installed",
    "is_smddprun_installed",
    "master_hostname",
    "topology",
}

_CHANNELS = {
    "train": {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated", "RecordWrapperType": "None"},
    "my.Validation-1": {"TrainingInputMode": "Pipe", "ContentType": "text/csv"},
}
_HYPERPARAMETERS = {
    "lr": "0.1",
    "flag": "true",
    "none": "null",
    "b": "2",
    "trainer.max_epochs": "3",
    "some-name": '"a b"',
    "text": "no json {",
    "unicode": '"\\u00e4\U0001f600"',
    "nested": '{"y": [1, 2], "x": {"b": null, "a": 1e-3}}',
    "sagemaker_program": '"jobs/train.py"',
    "sagemaker_container_log_level": "10",
    "sagemaker_job_name": '"train-1"',
    "sagemaker_region": '"eu-west-1"',
    "sagemaker_estimator_class_name": '"PyTorch"',
    "_tuning_objective_metric": '"val_acc"',
}
_GROUPS = {"trainer": ["algo-3", "algo-1"], "helper": ["algo-2"]}
_LOCAL_MODE = {
    "current_host": "algo-1-x9",
    "hosts": ["algo-1-x9"],
    "network_interface_name": "eth0",
    "current_instance_type": "local",
}
_JOBS = {
    "one host": (resource_config({"homogeneousCluster": ["algo-1"]}, "algo-1"), _HYPERPARAMETERS, {}),
    "homogeneous": (
        resource_config({"homogeneousCluster": ["algo-2", "algo-1"]}, "algo-2"),
        _HYPERPARAMETERS,
        {"TRAINING_JOB_NAME": "train-1", "AWS_REGION": "eu-west-1", "AWS_DEFAULT_REGION": "eu-west-1"},
    ),
    "heterogeneous": (resource_config(_GROUPS, "algo-2"), _HYPERPARAMETERS, {"LIGHTNING_SM_DATA_GROUPS": "helper"}),
    "a distribution": (
        resource_config({"homogeneousCluster": ["algo-2", "algo-1"]}, "algo-1"),
        {
            **_HYPERPARAMETERS,
            "sagemaker_torch_distributed_enabled": "true",
            "sagemaker_instance_type": '"ml.g5.xlarge"',
        },
        {},
    ),
    "a distribution on one group": (
        resource_config(_GROUPS, "algo-2"),
        {
            **_HYPERPARAMETERS,
            "sagemaker_torch_distributed_enabled": "true",
            "sagemaker_distribution_instance_groups": '["trainer"]',
        },
        {"LIGHTNING_SM_DATA_GROUPS": "helper"},
    ),
    "local mode": (
        _LOCAL_MODE,
        {"sagemaker_program": "jobs/train.py", "sagemaker_submit_directory": "/opt/ml/code"},
        {},
    ),
    "a topology": (
        {**_LOCAL_MODE, "topology": [{"hostName": "algo-1-x9", "capacityUnitId": "1"}]},
        {},
        {"SAGEMAKER_PROGRAM": "jobs/train.py", "SAGEMAKER_TRAINING_MODULE": ""},
    ),
}


@pytest.fixture(scope="module", params=_JOBS)
def dumps(request, tmp_path_factory):
    """The script's variables, arguments and folder under the toolkit's ``train``, and under ours."""
    resources, hyperparameters, variables = _JOBS[request.param]
    base = tmp_path_factory.mktemp("job") / "ml"
    write_job(base, resources, channels=_CHANNELS, hyperparameters=hyperparameters)
    (base / "code" / "jobs").mkdir(parents=True)
    (base / "code" / "jobs" / "train.py").write_text(_DUMP)
    (base / "output").mkdir()
    # SM_STUDIO_LOCAL_MODE keeps the toolkit from waiting for the hosts' names, which do not resolve here.
    variables = {**variables, "SM_STUDIO_LOCAL_MODE": "true", "AWS_EC2_METADATA_DISABLED": "true"}
    toolkit = subprocess.run(
        [sys.executable, "-c", _TOOLKIT],
        env=variables_of(base, **variables),
        cwd=base,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert toolkit.returncode == 0, toolkit.stderr
    ours = train(base, base, **variables)
    assert ours.returncode == 0, ours.stderr
    return _dumped(toolkit.stdout), _dumped(ours.stdout)


def _dumped(output):
    line = next(line for line in output.splitlines() if line.startswith("DUMP "))
    variables, arguments, folder = json.loads(line.removeprefix("DUMP "))
    return {name: text for name, text in variables.items() if name.startswith(_PREFIXES)}, arguments, folder


@pytest.mark.matrix(first=2)
def test_the_same_variables_have_the_same_text(dumps):
    """The variables have the same names, and the same values except for the known differences."""
    (toolkit, _, _), (ours, _, _) = dumps
    expected = {name: text for name, text in toolkit.items() if name not in _LEFT_OUT}
    together = json.loads(expected["SM_TRAINING_ENV"])
    for name in _LEFT_OUT_OF_TRAINING_ENV:
        del together[name]
    expected["SM_TRAINING_ENV"] = json.dumps(together, sort_keys=True, separators=(",", ":"))
    assert sorted(ours) == sorted(expected)
    different = {name: (expected[name], ours[name]) for name in expected if expected[name] != ours[name]}
    assert {name: texts for name, texts in different.items() if name not in _DIFFERENT} == {}


@pytest.mark.matrix(first=2)
def test_what_the_toolkit_knows_of_names_and_regions_is_the_same(dumps):
    """SAGEMAKER_JOB_NAME and SAGEMAKER_REGION equal the toolkit's values unless those are empty."""
    (toolkit, _, _), (ours, _, _) = dumps
    for name in ("SAGEMAKER_JOB_NAME", "SAGEMAKER_REGION"):
        assert toolkit[name] in ("", ours[name])


@pytest.mark.matrix(first=2)
def test_user_args_are_the_arguments_of_the_script(dumps):
    """Under both, SM_USER_ARGS equals the script's arguments, and the script starts in the code folder."""
    for variables, arguments, folder in dumps:
        assert json.loads(variables["SM_USER_ARGS"]) == arguments
        assert folder == variables["SAGEMAKER_BASE_DIR"] + "/code"


@pytest.mark.matrix(first=2)
def test_our_own_code_reads_the_same_job_under_both(dumps):
    """SageMakerJob reads the same job from both environments."""
    from lightning_sm.job.facts import SageMakerJob

    (toolkit, _, _), (ours, _, _) = dumps
    same = {"SAGEMAKER_JOB_NAME": "train-1"}
    assert SageMakerJob.from_environment({**toolkit, **same}) == SageMakerJob.from_environment({**ours, **same})
