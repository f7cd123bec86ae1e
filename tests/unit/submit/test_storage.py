"""Locations of a job's output and code in S3."""

import os
import tarfile

import pytest

from lightning_sm.errors import SubmitError
from lightning_sm.submit.job_file import Group, Job
from lightning_sm.submit.storage import code_address, create_output, output_of, upload_code
from tests.fakes.aws import stubbed_clients

BUCKET = "sagemaker-eu-west-1-111122223333"
EXPECTED = {"Bucket": BUCKET, "ExpectedBucketOwner": "111122223333"}


def job(**keys):
    """Return a job of this account."""
    return Job("x", {"trainer": Group("ml.g5.xlarge")}, "arn:aws:iam::111122223333:role/training", **keys)


@pytest.fixture
def clients():
    """Return clients whose answers the test prepares."""
    with stubbed_clients() as found:
        yield found


@pytest.mark.parametrize(
    ("output", "address"),
    [
        ("s3://bucket/a/b/", "s3://bucket/a/b/job-1/source/sourcedir.tar.gz"),
        ("s3://bucket", "s3://bucket/job-1/source/sourcedir.tar.gz"),
        (None, f"s3://{BUCKET}/job-1/source/sourcedir.tar.gz"),
    ],
)
def test_code_lies_beside_the_output_of_its_job(output, address):
    """The code is below the output, as in SDK v2, so that one rule in the role's policy covers both."""
    assert code_address(output_of(job(output=output), "eu-west-1"), "job-1") == address


def test_a_bucket_of_the_job_file_is_left_alone(clients):
    """A configured bucket is neither checked nor created, because the user may only have access to a prefix."""
    create_output(clients.s3, job(output="s3://bucket/a"), "eu-west-1")


def test_the_default_bucket_is_used_if_it_is_the_accounts_own(clients):
    """The default bucket's name follows from account and region, so another account may already own it."""
    clients.answers("s3", "head_bucket", {}, **EXPECTED)
    create_output(clients.s3, job(), "eu-west-1")
    clients.stubbers["s3"].add_client_error("head_bucket", "403", "Forbidden", 403, expected_params=EXPECTED)
    with pytest.raises(SubmitError, match=rf"{BUCKET}.*an account other than 111122223333.*Set output: s3://"):
        create_output(clients.s3, job(), "eu-west-1")


@pytest.mark.parametrize(
    ("region", "arguments"),
    [
        ("eu-west-1", {"Bucket": BUCKET, "CreateBucketConfiguration": {"LocationConstraint": "eu-west-1"}}),
        ("us-east-1", {"Bucket": "sagemaker-us-east-1-111122223333"}),
    ],
)
def test_the_default_bucket_is_created(clients, region, arguments):
    """A missing default bucket is created."""
    clients.refuses("s3", "head_bucket", "404", "Not Found")
    clients.answers("s3", "create_bucket", {}, **arguments)
    create_output(clients.s3, job(), region)


@pytest.mark.parametrize(
    ("keys", "settings"),
    [
        ({"output": "s3://bucket/a"}, {}),
        (
            {"output": "s3://bucket/a", "request": {"OutputDataConfig": {"KmsKeyId": "alias/models"}}},
            {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "alias/models"},
        ),
    ],
)
def test_code_is_encrypted_like_the_output(tmp_path, keys, settings):
    """The code is encrypted with the job file's key, or else by the bucket's default."""
    (tmp_path / "train.py").write_text("print(1)")
    members, sent = uploaded(tmp_path, **keys)
    assert list(members) == ["train.py"]
    assert sent == {"place": "s3://bucket/a/job-1/source/sourcedir.tar.gz", "settings": settings}


def uploaded(folder, **keys):
    """Upload a folder, and return the archive's members by name and the destination."""
    members, sent = {}, {}

    class Client:
        """A stand-in for boto3's client that supports uploads only."""

        def upload_file(self, path, bucket, key, ExtraArgs):  # noqa: N803 - the name is boto3's
            """Record the upload."""
            with tarfile.open(path) as archive:
                members.update((member.name, member) for member in archive.getmembers())
            sent.update(place=f"s3://{bucket}/{key}", settings=ExtraArgs)

    upload_code(Client(), job(source_dir=str(folder), **keys), "s3://bucket/a/job-1/source/sourcedir.tar.gz")
    return members, sent


@pytest.fixture
def folder(tmp_path):
    """Create a folder with code at two levels."""
    (tmp_path / "src" / "package").mkdir(parents=True)
    (tmp_path / "src" / "package" / "go.py").write_text("print(1)")
    (tmp_path / "src" / "train.py").write_text("print(2)")
    return tmp_path / "src"


def test_what_is_below_the_folder_is_at_the_top_of_the_archive(folder):
    """The archive keeps file modes, since scripts may be executable, but not the owners."""
    (folder / "run.sh").touch(mode=0o755)
    members, _ = uploaded(folder)
    assert list(members) == ["package", "package/go.py", "run.sh", "train.py"]
    assert members["run.sh"].mode == 0o755
    assert {(one.uid, one.gid, one.uname, one.gname) for one in members.values()} == {(0, 0, "", "")}


def test_links_are_replaced_by_what_they_lead_to(folder, tmp_path):
    """Links to files and folders are replaced by their targets, inside or outside; hard links become two files."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "tool.py").write_text("x = 1")
    (folder / "shared").symlink_to(tmp_path / "shared")
    (folder / "again").symlink_to("package")
    os.link(folder / "train.py", folder / "train2.py")
    members, _ = uploaded(folder)
    assert {"shared/tool.py", "again/go.py", "package/go.py", "train2.py"} <= members.keys()
    assert all(one.isdir() or one.isreg() for one in members.values())


@pytest.mark.parametrize("target", ["nowhere", "odd", "."])
def test_what_cannot_be_archived_is_an_error(folder, target):
    """A broken or circular link is an error, because its target would be missing on the hosts."""
    (folder / "package" / "odd").symlink_to(target)
    with pytest.raises(OSError, match="package/odd"):
        uploaded(folder)
