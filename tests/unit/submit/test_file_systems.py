"""Channels in file systems."""

from dataclasses import replace

import pytest

from lightning_sm.submit.file_systems import FileSystemFolder, file_system_folder, file_system_problems
from lightning_sm.submit.job_file import InputChannel, Vpc
from lightning_sm.submit.preflight import check, with_placeholders
from lightning_sm.submit.request import make_request
from tests.unit.submit.test_preflight import JOB

FSX = "fsx://fs-0123456789abcdef0/abcdefgh/data"
IN_NETWORK = replace(JOB, vpc=Vpc(["subnet-1"], ["sg-1"]))


def problems(channel, job=IN_NETWORK):
    """What is wrong with a channel."""
    return list(file_system_problems(replace(job, channels={"a": channel})))


@pytest.mark.parametrize(
    ("uri", "folder"),
    [
        (FSX, FileSystemFolder("FSxLustre", "fs-0123456789abcdef0", "/abcdefgh/data")),
        ("efs://fs-01234567/a/b/", FileSystemFolder("EFS", "fs-01234567", "/a/b")),
        ("efs://fs-01234567", FileSystemFolder("EFS", "fs-01234567", "/")),
        ("s3://bucket/a", None),
        ("fsx://data/a", None),
        ("efs://fs-0123/a", None),
    ],
)
def test_addresses_name_kind_id_and_folder(uri, folder):
    """Everything else is no file system."""
    assert file_system_folder(uri) == folder


@pytest.mark.parametrize(
    ("channel", "words"),
    [
        (InputChannel("fsx://fs-01234567"), "lacks the mount name"),
        (InputChannel(FSX, ["data"]), "channels.a.groups"),
        (InputChannel(FSX, mode="FastFile"), "channels.a is FastFile"),
        (InputChannel(FSX, distribution="ShardedByS3Key"), "ShardedByS3Key"),
        (InputChannel("s3://bucket/a", access="rw"), "channels.a.access is rw"),
    ],
)
def test_what_a_file_system_does_not_have_is_a_problem(channel, words):
    """It is mounted by all hosts as it is, and only it can be written to."""
    (problem,) = problems(channel)
    assert words in problem.text


def test_a_file_system_needs_its_network():
    """Hosts outside of a VPC do not reach it."""
    assert problems(InputChannel(FSX, access="rw")) == []
    (problem,) = problems(InputChannel(FSX), JOB)
    assert "vpc is missing" in problem.text


def test_a_file_system_passes_the_checks_of_addresses_and_keeps_no_groups():
    """Also beside a channel with groups; the SDK gets the address as it is."""
    job = replace(IN_NETWORK, channels={"a": InputChannel(FSX), "b": InputChannel("s3://bucket/b", ["data"])})
    assert check(job, "cloud", "us-east-1").problems == []
    assert with_placeholders(job).channels["a"].uri == FSX
    channels = make_request(job, {}).channels
    assert (channels["a"].groups, channels["b"].groups) == (None, ["data"])
