"""Values filled into a request: groups of channels, variables and hyperparameters."""

import json
from dataclasses import replace

import pytest
import yaml

from lightning_sm.errors import HyperparameterError, JobConfigError
from lightning_sm.job.hyperparameters import encode, to_argv
from lightning_sm.job.variables import JOB_SECRET
from lightning_sm.submit.job_file import Group, InputChannel, Job
from lightning_sm.submit.training_job import prepared, script_options, training_job

GPU, CPU = Group("ml.g5.xlarge", 2), Group("ml.c5.xlarge")
JOB = Job(image="x", groups={"trainer": GPU, "data": CPU})


def encoded(job):
    """Return the encoded hyperparameters of a job."""
    return encode(script_options(job))


def test_groups_are_for_all_channels_or_for_none():
    """If one channel names groups, the other channels get all groups; otherwise, no channel has groups."""
    channels = {
        "a": InputChannel("s3://b/a", ["data"]),
        "b": InputChannel("s3://b/b"),
        "c": InputChannel("s3://b/c", []),
    }
    job = prepared(replace(JOB, channels=channels))
    assert {name: channel.groups for name, channel in job.channels.items()} == {
        "a": ["data"],
        "b": ["trainer", "data"],
        "c": ["trainer", "data"],
    }
    job = prepared(replace(JOB, channels={"b": InputChannel("s3://b/b")}))
    assert job.channels["b"].groups is None


def test_each_job_gets_a_secret_of_its_own():
    """Two jobs from one file get different secrets; a secret in the file is kept, and so are its other variables."""
    first, second = (prepared(replace(JOB, environment={"A": "1"})).environment for _ in range(2))
    assert first.keys() == {"A", JOB_SECRET.name}
    assert first[JOB_SECRET.name] != second[JOB_SECRET.name]
    assert JOB_SECRET.read(first) == first[JOB_SECRET.name]
    own = {JOB_SECRET.name: "mine" * 8}
    assert prepared(replace(JOB, environment=own)).environment == own


@pytest.mark.parametrize("stated", [{}, {"LIGHTNING_SM_MAX_RESTARTS": "3"}])
def test_restarts_are_told_to_the_launchers(stated):
    """The limit is a variable, so that all launchers agree on it; without the key, no variable is set."""
    environment = prepared(replace(JOB, max_restarts=3, environment=stated)).environment
    assert environment["LIGHTNING_SM_MAX_RESTARTS"] == "3"
    assert "LIGHTNING_SM_MAX_RESTARTS" not in prepared(JOB).environment


def test_the_launcher_is_told_where_the_code_is():
    """The request has the code's address in S3, from which the launcher fetches it."""
    request = training_job(replace(JOB, hyperparameters={"a": 1}), "job-1", "s3://b", "s3://b/c.tar.gz")
    options = {name: json.loads(text) for name, text in request["HyperParameters"].items()}
    assert options == {"a": 1, "sagemaker_submit_directory": "s3://b/c.tar.gz"}


def test_a_single_group_is_an_ordinary_job():
    """The request of a job with one group has no groups, so its channels must not name any."""
    job = prepared(Job(image="x", groups={"a": GPU}, channels={"c": InputChannel("s3://b/c", ["a"])}))
    assert job.channels["c"].groups is None
    resources = training_job(job, "job-1", "s3://b")["ResourceConfig"]
    assert resources == {"InstanceType": "ml.g5.xlarge", "InstanceCount": 2, "VolumeSizeInGB": 30}


def test_the_config_file_becomes_hyperparameters(tmp_path):
    """Top-level keys of the file become JSON values, followed by overriding dotted options."""
    path = tmp_path / "config.yaml"
    path.write_text("seed_everything: 1\ndata: {class_path: a.B, init_args: {size: 3}}\n")
    job = replace(
        JOB, config=str(path), hyperparameters={"data": {"size": 4}, "trainer": {"max_epochs": 5}, "data.x": None}
    )
    assert to_argv(encoded(job)) == [
        '--data={"class_path": "a.B", "init_args": {"size": 3}}',
        "--data.size=4",
        "--data.x=null",
        "--seed_everything=1",
        '--trainer={"max_epochs": 5}',
    ]


def test_a_value_that_is_too_long_says_what_to_do(tmp_path):
    """The error for a value beyond the service's 2500 characters advises packing the config file with the code."""
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"model": {"layers": list(range(2000))}}))
    too_long = r"'model' has \d+ characters in JSON; .* set the hyperparameter config"
    with pytest.raises(HyperparameterError, match=too_long):
        encoded(replace(JOB, config=str(path)))


def test_the_script_is_told_to_the_launcher():
    """The script is passed as the launcher's hyperparameter, which does not become one of the script's options."""
    job = replace(JOB, hyperparameters={"subcommand": "validate"}, script="go.py", source_dir="/src")
    assert json.loads(encoded(job)["sagemaker_program"]) == "go.py"
    assert to_argv(encoded(job)) == ["validate"]


@pytest.mark.parametrize("content", ["[1, 2]", "a: [", "1: 2"])
def test_a_config_file_that_is_none_is_an_error(tmp_path, content):
    """Broken YAML or anything but a mapping is an error that names the file."""
    path = tmp_path / "config.yaml"
    path.write_text(content)
    with pytest.raises(JobConfigError, match=str(path)):
        encoded(replace(JOB, config=str(path)))
