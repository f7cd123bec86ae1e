"""What is filled in: groups of channels, hyperparameters, local mode."""

import json
from dataclasses import replace

import pytest
import yaml

from lightning_sm.errors import HyperparameterError, JobConfigError
from lightning_sm.job.hyperparameters import to_argv
from lightning_sm.job.variables import JOB_SECRET, MODEL
from lightning_sm.submit.job_file import Group, InputChannel, Job
from lightning_sm.submit.request import encode_hyperparameters, make_request

GPU, CPU = Group("ml.g5.xlarge", 2), Group("ml.c5.xlarge")
JOB = Job(image="x", groups={"trainer": GPU, "data": CPU})


def options(job):
    """The arguments that the script gets, by name."""
    arguments = to_argv(encode_hyperparameters(job))
    return dict(argument.removeprefix("--").split("=", 1) for argument in arguments if argument.startswith("--"))


def test_groups_are_for_all_channels_or_for_none():
    """If one channel names groups, the others and the code get all groups; if none does, nothing is said."""
    channels = {"a": InputChannel("s3://b/a", ["data"]), "b": InputChannel("s3://b/b")}
    plan = make_request(replace(JOB, channels=channels), {})
    assert {name: channel.groups for name, channel in plan.channels.items()} == {
        "a": ["data"],
        "b": ["trainer", "data"],
    }
    assert plan.with_code_channel("s3://b/c").channels["code"].groups == ["trainer", "data"]
    plan = make_request(replace(JOB, channels={"b": InputChannel("s3://b/b")}), {})
    assert {channel.groups for channel in plan.with_code_channel("s3://b/c").channels.values()} == {None}


def test_each_job_gets_a_secret_of_its_own():
    """Two jobs from one file have different secrets; one in the file is kept, as are its other variables."""
    first, second = (make_request(replace(JOB, environment={"A": "1"}), {}).job.environment for _ in range(2))
    assert first.keys() == {"A", JOB_SECRET.name}
    assert first[JOB_SECRET.name] != second[JOB_SECRET.name]
    assert JOB_SECRET.read(first) == first[JOB_SECRET.name]
    own = {JOB_SECRET.name: "mine" * 8}
    assert make_request(replace(JOB, environment=own), {}).job.environment == own


@pytest.mark.parametrize("stated", [{}, {"LIGHTNING_SM_MAX_RESTARTS": "3"}])
def test_restarts_are_told_to_the_launchers(stated):
    """As a variable of all hosts, by which they agree; a job file without the key sets none."""
    environment = make_request(replace(JOB, max_restarts=3, environment=stated), {}).job.environment
    assert environment["LIGHTNING_SM_MAX_RESTARTS"] == "3"
    assert "LIGHTNING_SM_MAX_RESTARTS" not in make_request(JOB, {}).job.environment


def test_what_the_job_leaves_is_a_variable_of_all_hosts():
    """Unless it is the default."""
    assert make_request(replace(JOB, model="weights"), {}).job.environment[MODEL.name] == "weights"
    assert MODEL.name not in make_request(JOB, {}).job.environment


@pytest.mark.parametrize(
    ("isolated", "directory", "channels"),
    [(False, "s3://b/c.tar.gz", []), (True, "/opt/ml/input/data/code/sourcedir.tar.gz", ["code"])],
)
def test_the_launcher_is_told_where_the_code_is(isolated, directory, channels):
    """In S3, from where it fetches it; hosts without a network find it in a channel."""
    plan = make_request(replace(JOB, request={"EnableNetworkIsolation": isolated}), {"a": "1"}).with_code(
        "s3://b/c.tar.gz"
    )
    assert plan.hyperparameters.keys() == {"a", "sagemaker_submit_directory"}
    assert json.loads(plan.hyperparameters["sagemaker_submit_directory"]) == directory
    assert list(plan.channels) == channels


def test_a_single_group_is_an_ordinary_job():
    """The service knows no groups then, and channels must not name any."""
    plan = make_request(Job(image="x", groups={"a": GPU}, channels={"c": InputChannel("s3://b/c", ["a"])}), {})
    assert plan.single_group == GPU
    assert plan.channels["c"].groups is None


def test_the_config_file_becomes_hyperparameters(tmp_path):
    """Its top-level keys, as JSON; what overrides it becomes dotted options, which come after it."""
    path = tmp_path / "config.yaml"
    path.write_text("seed_everything: 1\ndata: {class_path: a.B, init_args: {size: 3}}\n")
    job = replace(
        JOB, config=str(path), hyperparameters={"data": {"size": 4}, "trainer": {"max_epochs": 5}, "data.x": None}
    )
    arguments = to_argv(encode_hyperparameters(job))
    assert arguments == [
        '--data={"class_path": "a.B", "init_args": {"size": 3}}',
        "--data.size=4",
        "--data.x=null",
        "--seed_everything=1",
        '--trainer={"max_epochs": 5}',
    ]


def test_a_value_that_is_too_long_says_what_to_do(tmp_path):
    """A config file with a value beyond the service's 2500 characters has to come with the code."""
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"model": {"layers": list(range(2000))}}))
    with pytest.raises(HyperparameterError, match=r"'model' has \d+ characters in JSON; .* by the key config"):
        encode_hyperparameters(replace(JOB, config=str(path)))


def test_subcommand_and_code_are_told_to_the_launcher():
    """As the hyperparameters that it looks for; none of them is an option of the script."""
    job = replace(JOB, subcommand="validate", script="go.py", source_dir="/src")
    encoded = encode_hyperparameters(job)
    assert json.loads(encoded["sagemaker_program"]) == "go.py"
    assert to_argv(encoded) == ["validate"]


@pytest.mark.parametrize("content", ["[1, 2]", "a: [", "1: 2"])
def test_a_config_file_that_is_none_is_an_error(tmp_path, content):
    """Broken YAML, or something other than names and values; the message names the file."""
    path = tmp_path / "config.yaml"
    path.write_text(content)
    with pytest.raises(JobConfigError, match=str(path)):
        encode_hyperparameters(replace(JOB, config=str(path)))
