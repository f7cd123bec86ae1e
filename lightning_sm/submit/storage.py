"""Where a job's output and code are in S3, and how the code gets there."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from botocore.exceptions import ClientError

from lightning_sm._log import command_logger
from lightning_sm.cloud.aws import error_code
from lightning_sm.errors import SubmitError
from lightning_sm.submit.job_file import Job
from lightning_sm.submit.source_archive import ARCHIVE_NAME, write_archive

_LOG = command_logger(__name__)

_US_EAST_1 = "us-east-1"  # the only region that CreateBucket must not be told


class JobStorage:
    """The places of a job in S3: those that the job file names, else the bucket that SageMaker's SDKs use.

    Args:
        job: The content of the job file; its role names the account.
        region: Region of the job.

    Attributes:
        output: Prefix for model and output.
    """

    def __init__(self, job: Job, region: str) -> None:
        self._job = job
        self._region = region
        self._account = (job.role or "").split(":")[4]
        # The SDKs' own default: sagemaker 2.257.7, session.py, generate_default_sagemaker_bucket_name.
        self._default_bucket = f"sagemaker-{region}-{self._account}"
        self.output = job.output or f"s3://{self._default_bucket}/"

    def code_address(self, job_name: str) -> str:
        """Return the address of the code of one training job: beside its output, as SDK v2 has it.

        Args:
            job_name: Name of the training job.
        """
        return f"{self.output.rstrip('/')}/{job_name}/source/{ARCHIVE_NAME}"

    def prepare(self, s3: Any) -> None:
        """Make sure that the bucket of the output exists, if it is the default one; create it if it does not.

        Args:
            s3: boto3's client.

        Raises:
            ClientError: AWS rejects the request.
            SubmitError: The bucket belongs to somebody else, or may not be used.
        """
        if self._job.output is not None:
            return
        try:
            s3.head_bucket(Bucket=self._default_bucket, ExpectedBucketOwner=self._account)
        except ClientError as error:
            if error_code(error) == "403":
                raise SubmitError(
                    f"output is missing, and its default, the bucket {self._default_bucket}, is not one that you may "
                    f"use: it belongs to another account than {self._account}, or s3:ListBucket on it is missing. Set "
                    "output: s3://bucket/prefix."
                ) from error
            if error_code(error) != "404":
                raise
            self._create_bucket(s3)

    def upload_code(self, s3: Any, address: str) -> None:
        """Upload ``source_dir`` as an archive.

        Args:
            s3: boto3's client.
            address: The result of ``code_address``.

        Raises:
            Boto3Error: AWS rejects the upload.
            OSError: A file cannot be read.
            SubmitError: The folder has something that cannot be uploaded.
        """
        folder = Path(self._job.source_dir or "")
        bucket, _, key = address.removeprefix("s3://").partition("/")
        settings: dict[str, str] = {}
        if self._job.output is None:  # anybody could have taken the name, which follows from the account
            settings["ExpectedBucketOwner"] = self._account
        elif (kms_key := self._job.requested("OutputDataConfig.KmsKeyId")) is not None:
            settings |= {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": kms_key}
        with tempfile.TemporaryDirectory(prefix="lightning-sm-submit-") as scratch:
            archive = Path(scratch) / ARCHIVE_NAME
            count = write_archive(folder, archive)
            _LOG.info(
                "Uploading %s (files: %d, compressed: %.1f MB) to %s", folder, count, _megabytes(archive), address
            )
            s3.upload_file(str(archive), bucket, key, ExtraArgs=settings)

    def _create_bucket(self, s3: Any) -> None:
        place = {} if self._region == _US_EAST_1 else {"LocationConstraint": self._region}
        arguments = {"CreateBucketConfiguration": place} if place else {}
        try:
            s3.create_bucket(Bucket=self._default_bucket, **arguments)
        except ClientError as error:
            # Another submission may have created it meanwhile; S3 reports the same while that goes on.
            if error_code(error) not in {"BucketAlreadyOwnedByYou", "OperationAborted"}:
                raise
        _LOG.info("output is missing: created the bucket %s for it.", self._default_bucket)


def _megabytes(path: Path) -> float:
    return path.stat().st_size / 1e6
