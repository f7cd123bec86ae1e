"""The S3 addresses of a job's output and code, and the upload of the code."""

from __future__ import annotations

import tarfile
import tempfile
from pathlib import Path
from typing import Any

from botocore.exceptions import ClientError

from lightning_sm._log import command_logger
from lightning_sm.cloud.aws import error_code
from lightning_sm.errors import SubmitError
from lightning_sm.submit.job_file import Job

_LOG = command_logger(__name__)

_US_EAST_1 = "us-east-1"  # the only region that must not be passed to CreateBucket
# sagemaker 2.257.7, fw_utils.py: tar_and_upload_dir.
_ARCHIVE_NAME = "sourcedir.tar.gz"


def output_of(job: Job, region: str) -> str:
    """Return the S3 prefix for the model and output; it defaults to the bucket that SageMaker's SDKs use."""
    # sagemaker 2.257.7, session.py: generate_default_sagemaker_bucket_name.
    return job.output or f"s3://sagemaker-{region}-{_account(job)}/"


def code_address(output: str, job_name: str) -> str:
    """Return the S3 address of a training job's code, next to the job's output, as in SDK v2.

    Args:
        output: The result of ``output_of``.
        job_name: Name of the training job.
    """
    return f"{output.rstrip('/')}/{job_name}/source/{_ARCHIVE_NAME}"


def create_output(s3: Any, job: Job, region: str) -> None:
    """Create the output bucket if it is the default one and does not exist.

    Args:
        s3: boto3's S3 client.
        job: The job.
        region: Region of the job.

    Raises:
        ClientError: AWS rejects the request.
        SubmitError: The bucket belongs to another account, or permission to use it is missing.
    """
    if job.output is not None:
        return
    bucket = output_of(job, region).split("/")[2]
    try:
        s3.head_bucket(Bucket=bucket, ExpectedBucketOwner=_account(job))
    except ClientError as error:
        if error_code(error) != "404":
            raise SubmitError(
                f"output is not set, and you cannot use its default, the bucket {bucket} ({error}): it belongs to an "
                f"account other than {_account(job)}, or you lack s3:ListBucket on it. Set output: s3://bucket/prefix."
            ) from error
        place = {} if region == _US_EAST_1 else {"CreateBucketConfiguration": {"LocationConstraint": region}}
        s3.create_bucket(Bucket=bucket, **place)
        _LOG.info("output is not set: created the bucket %s for it.", bucket)


def upload_code(s3: Any, job: Job, address: str) -> None:
    """Upload ``source_dir`` as an archive, with links replaced by their targets, as in SDK v2.

    Args:
        s3: boto3's S3 client.
        job: The job, which has a ``source_dir``.
        address: The result of ``code_address``.

    Raises:
        Boto3Error: AWS rejects the upload.
        OSError: A file cannot be read.
    """
    folder = Path(job.source_dir or "")
    bucket, _, key = address.removeprefix("s3://").partition("/")
    kms_key = job.requested("OutputDataConfig.KmsKeyId")
    settings = {} if kms_key is None else {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": kms_key}
    with tempfile.TemporaryDirectory(prefix="lightning-sm-submit-") as scratch:
        archive = Path(scratch) / _ARCHIVE_NAME
        with tarfile.open(archive, "w:gz", dereference=True) as tar:
            for path in sorted(folder.iterdir()):
                tar.add(path, path.name, filter=_without_owner)
        _LOG.info("Uploading %s (compressed: %.1f MB) to %s", folder, archive.stat().st_size / 1e6, address)
        s3.upload_file(str(archive), bucket, key, ExtraArgs=settings)


def _account(job: Job) -> str:
    return (job.role or "").split(":")[4]


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member
