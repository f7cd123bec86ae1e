"""Where output and code of a job are in S3."""

import tarfile

import pytest

from lightning_sm.errors import SubmitError
from lightning_sm.submit.job_file import Group, Job
from lightning_sm.submit.storage import JobStorage
from tests.fakes.aws import stubbed_clients

ROLE = "arn:aws:iam::111122223333:role/training"
BUCKET = "sagemaker-eu-west-1-111122223333"
EXPECTED = {"Bucket": BUCKET, "ExpectedBucketOwner": "111122223333"}


def storage(region="eu-west-1", **keys):
    """The places of a job."""
    return JobStorage(Job("x", {"trainer": Group("ml.g5.xlarge")}, ROLE, **keys), region)


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
    assert storage(output=output).code_address("job-1") == address


def test_a_bucket_of_the_job_file_is_left_alone(clients):
    """It is neither looked for nor created: the one who submits may only be allowed to write below a prefix."""
    storage(output="s3://bucket/a").prepare(clients.s3)


def test_the_default_bucket_is_used_if_it_is_the_accounts_own(clients):
    """Its name follows from account and region, and somebody else may have taken it."""
    clients.answers("s3", "head_bucket", {}, **EXPECTED)
    storage().prepare(clients.s3)
    clients.stubbers["s3"].add_client_error("head_bucket", "403", "Forbidden", 403, expected_params=EXPECTED)
    with pytest.raises(SubmitError, match=rf"{BUCKET}.*another account than 111122223333.*Set output: s3://"):
        storage().prepare(clients.s3)


@pytest.mark.parametrize(
    ("region", "arguments"),
    [
        ("eu-west-1", {"Bucket": BUCKET, "CreateBucketConfiguration": {"LocationConstraint": "eu-west-1"}}),
        ("us-east-1", {"Bucket": "sagemaker-us-east-1-111122223333"}),
    ],
)
@pytest.mark.parametrize("refusal", [None, "BucketAlreadyOwnedByYou", "OperationAborted"])
def test_the_default_bucket_is_created_once(clients, region, arguments, refusal):
    """Also where two submissions do so at the same time."""
    clients.refuses("s3", "head_bucket", "404", "Not Found")
    if refusal is None:
        clients.answers("s3", "create_bucket", {}, **arguments)
    else:
        clients.stubbers["s3"].add_client_error("create_bucket", refusal, expected_params=arguments)
    storage(region).prepare(clients.s3)


@pytest.mark.parametrize(
    ("keys", "settings"),
    [
        ({"output": "s3://bucket/a"}, {}),
        (
            {"output": "s3://bucket/a", "request": {"OutputDataConfig": {"KmsKeyId": "alias/models"}}},
            {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "alias/models"},
        ),
        ({}, {"ExpectedBucketOwner": "111122223333"}),
    ],
)
def test_code_is_encrypted_like_the_output(tmp_path, keys, settings):
    """With the key of the job file, else as the bucket is; a bucket that was not named must be the account's."""
    (tmp_path / "train.py").write_text("print(1)")
    sent = {}

    class Client:
        """boto3's client, of which only the upload is needed."""

        def upload_file(self, path, bucket, key, ExtraArgs):  # noqa: N803 - the name is boto3's
            """Note what is uploaded."""
            with tarfile.open(path) as archive:
                sent.update(names=archive.getnames(), place=f"s3://{bucket}/{key}", settings=ExtraArgs)

    places = storage(source_dir=str(tmp_path), **keys)
    places.upload_code(Client(), places.code_address("job-1"))
    assert sent == {"names": ["train.py"], "place": places.code_address("job-1"), "settings": settings}
