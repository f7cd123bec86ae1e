"""Running a job file on an emulated cluster of containers."""

from dataclasses import replace

from lightning_sm.job.emulated_service import GroupSpec
from lightning_sm.submit import local
from lightning_sm.submit.job_file import InputChannel, Retries, Spot, Tune
from lightning_sm.submit.training_job import prepared
from tests.unit.submit.test_request import JOB


def spec_of(job):
    """Return the specification of a job's cluster."""
    return local.cluster_spec(prepared(job))


def test_groups_channels_and_variables_are_those_of_the_job(tmp_path):
    """Channels keep their groups, addresses may have spaces, and the number of processes is not set."""
    (tmp_path / "my data").mkdir()
    channels = {"a": InputChannel((tmp_path / "my data").as_uri(), ["data"]), "b": InputChannel(tmp_path.as_uri())}
    job = replace(JOB, channels=channels, environment={"A": "1"}, hyperparameters={"x": 1}, checkpoints="s3://b/c")
    spec = spec_of(job)
    assert spec.groups == [GroupSpec("trainer", 2, "ml.g5.xlarge"), GroupSpec("data", 1, "ml.c5.xlarge")]
    assert spec.channels_of("data") == {"a": tmp_path / "my data", "b": tmp_path}
    assert spec.channels_of("trainer") == {"b": tmp_path}
    assert (spec.devices, spec.keeps_checkpoints, spec.environment["A"]) == (None, True, "1")
    assert spec.hyperparameters == {"x": 1}


def test_own_code_is_where_the_containers_have_it(tmp_path):
    """The hyperparameters name the script and the code's folder in the container, as SDK v2 does with local_code."""
    spec = spec_of(replace(JOB, source_dir=str(tmp_path), script="go.py"))
    assert spec.hyperparameters == {"sagemaker_program": "go.py", "sagemaker_submit_directory": "/opt/ml/code"}


def test_what_has_no_effect_is_named():
    """Each key that has no effect locally causes a warning."""
    job = replace(
        JOB,
        spot=Spot(9),
        request={"VpcConfig": {}},
        tune=Tune("val_acc", {}, "maximize"),
        channels={"a": InputChannel("s3://b/a", mode="FastFile")},
        retries=Retries(1),
        checkpoints="s3://b/c",
    )
    assert [warning.split()[0] for warning in local.ignored_keys(job)] == [
        "spot",
        "tune",
        "request",
        "channels.a",
        "checkpoints",
    ]
