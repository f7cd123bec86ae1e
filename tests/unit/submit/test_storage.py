"""Where output and code of a job are in S3."""

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
    """A job of this account."""
    return Job("x", {"trainer": Group("ml.g5.xlarge")}, "arn:aws:iam::111122223333:role/training", **keys)


@pytest.fixture
def clients():
    """Clients whose answers the test prepares."""
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
    """Where SDK v2 has it, so that one rule of a role's policy covers both."""
    assert code_address(output_of(job(output=output), "eu-west-1"), "job-1") == address


def test_a_bucket_of_the_job_file_is_left_alone(clients):
    """It is neither looked for nor created: the one who submits may only be allowed to write below a prefix."""
    create_output(clients.s3, job(output="s3://bucket/a"), "eu-west-1")


def test_the_default_bucket_is_used_if_it_is_the_accounts_own(clients):
    """Its name follows from account and region, and somebody else may have taken it."""
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
    """Where there is none."""
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
    """With the key of the job file, else as the bucket is."""
    (tmp_path / "train.py").write_text("print(1)")
    members, sent = uploaded(tmp_path, **keys)
    assert list(members) == ["train.py"]
    assert sent == {"place": "s3://bucket/a/job-1/source/sourcedir.tar.gz", "settings": settings}


def uploaded(folder, **keys):
    """Upload a folder; return the members of the archive by name, and where it went."""
    members, sent = {}, {}

    class Client:
        """boto3's client, of which only the upload is needed."""

        def upload_file(self, path, bucket, key, ExtraArgs):  # noqa: N803 - the name is boto3's
            """Note what is uploaded."""
            with tarfile.open(path) as archive:
                members.update((member.name, member) for member in archive.getmembers())
            sent.update(place=f"s3://{bucket}/{key}", settings=ExtraArgs)

    upload_code(Client(), job(source_dir=str(folder), **keys), "s3://bucket/a/job-1/source/sourcedir.tar.gz")
    return members, sent


@pytest.fixture
def folder(tmp_path):
    """Code in a folder and a folder below it."""
    (tmp_path / "src" / "package").mkdir(parents=True)
    (tmp_path / "src" / "package" / "go.py").write_text("print(1)")
    (tmp_path / "src" / "train.py").write_text("print(2)")
    return tmp_path / "src"


def test_what_is_below_the_folder_is_at_the_top_of_the_archive(folder):
    """Modes are kept, as scripts may be executable; who owns the files here is nobody's business."""
    (folder / "run.sh").touch(mode=0o755)
    members, _ = uploaded(folder)
    assert list(members) == ["package", "package/go.py", "run.sh", "train.py"]
    assert members["run.sh"].mode == 0o755
    assert {(one.uid, one.gid, one.uname, one.gname) for one in members.values()} == {(0, 0, "", "")}


def test_links_are_replaced_by_what_they_lead_to(folder, tmp_path):
    """Files and folders, outside and inside; two links to one file are two files."""
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
    """A link that leads nowhere, or in a circle: files that are missing in the archive would be missed on the hosts."""
    (folder / "package" / "odd").symlink_to(target)
    with pytest.raises(OSError, match="package/odd"):
        uploaded(folder)
