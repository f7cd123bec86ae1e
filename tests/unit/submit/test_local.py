"""A job file as an emulated cluster of containers."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from botocore.exceptions import ClientError

from lightning_sm.errors import SubmitError
from lightning_sm.job.emulated_service import GroupSpec
from lightning_sm.submit import local
from lightning_sm.submit.job_file import InputChannel, Retries, Spot, Tune
from lightning_sm.submit.request import encode_hyperparameters, make_request
from tests.unit.submit.test_request import JOB


class Bucket:
    """A stand-in for boto3's S3 client, with the objects of one bucket."""

    def __init__(self, objects):
        self._objects = objects

    def get_paginator(self, _name):
        return self

    def paginate(self, **place):
        if place["Bucket"] != "bucket":
            raise ClientError({"Error": {"Code": "NoSuchBucket"}}, "ListObjectsV2")
        keys = [key for key in self._objects if key.startswith(place["Prefix"])]
        return [{"Contents": [{"Key": key}]} for key in keys] or [{}]

    def download_file(self, _bucket, key, path):
        with open(path, "w") as file:
            file.write(self._objects[key])


@pytest.fixture
def objects(monkeypatch):
    """The objects of the bucket, by key."""
    found = {}
    monkeypatch.setattr(local, "new_session", lambda: None)
    monkeypatch.setattr(local, "Clients", lambda _session: SimpleNamespace(s3=Bucket(found)))
    return found


def spec_of(job, folder):
    """The cluster of a job."""
    return local.cluster_spec(make_request(job, encode_hyperparameters(job)), folder)


def test_groups_channels_and_variables_are_those_of_the_job(tmp_path):
    """Channels keep their groups; an address may have spaces; the job states no number of processes."""
    (tmp_path / "my data").mkdir()
    channels = {"a": InputChannel((tmp_path / "my data").as_uri(), ["data"]), "b": InputChannel(tmp_path.as_uri())}
    job = replace(JOB, channels=channels, environment={"A": "1"}, hyperparameters={"x": 1}, checkpoints="s3://b/c")
    spec = spec_of(job, tmp_path)
    assert spec.groups == [GroupSpec("trainer", 2, "ml.g5.xlarge"), GroupSpec("data", 1, "ml.c5.xlarge")]
    assert spec.channels_of("data") == {"a": tmp_path / "my data", "b": tmp_path}
    assert spec.channels_of("trainer") == {"b": tmp_path}
    assert (spec.devices, spec.keeps_checkpoints, spec.environment["A"]) == (None, True, "1")
    assert spec.hyperparameters == {"x": 1}


def test_own_code_is_where_the_containers_have_it(tmp_path):
    """The hyperparameters name the script and its folder, as SDK v2 does with local_code."""
    spec = spec_of(replace(JOB, source_dir=str(tmp_path), script="go.py"), tmp_path)
    assert spec.hyperparameters == {"sagemaker_program": "go.py", "sagemaker_submit_directory": "/opt/ml/code"}


def test_a_channel_in_s3_is_copied(objects, tmp_path):
    """All objects below the prefix, by their names behind it; what the console makes for folders is none."""
    objects.update({"in/": "", "in/a/": "", "in/a/one": "1", "in/two": "2", "out/three": "3"})
    spec = spec_of(replace(JOB, channels={"c": InputChannel("s3://bucket/in")}), tmp_path)
    folder = spec.channels["c"]
    files = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert files == {"a/one": "1", "two": "2"}


@pytest.mark.parametrize(
    ("uri", "reason"),
    [("s3://bucket/in", r"leads out of the channel's folder"), ("s3://other/in", r"channels\.c: s3://other/in cannot")],
)
def test_a_channel_in_s3_that_cannot_be_copied_is_an_error(objects, tmp_path, uri, reason):
    """A key cannot name a file elsewhere on this machine, and AWS's own error is shown."""
    objects["in/../../../evil"] = ""
    with pytest.raises(SubmitError, match=reason):
        spec_of(replace(JOB, channels={"c": InputChannel(uri)}), tmp_path)


def test_what_has_no_effect_is_named():
    """With a warning for each thing that the script might miss."""
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
