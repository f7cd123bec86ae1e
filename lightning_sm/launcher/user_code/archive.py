"""``python -m lightning_sm.launcher.user_code.archive ADDRESS FOLDER``: fetch and unpack a code archive.

If this fails, the exit code is 2, and the last line of stderr gives the reason. A separate process does the work, so
that the launcher can kill it at any time and does not have to import boto3.

``sagemaker_training.files.download_and_extract`` does the same, but keeps the image's code if the folder is not empty,
skips unsafe members with a warning, and has no timeout.
"""

from __future__ import annotations

import os
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from lightning_sm.errors import ScriptError

# Without a route to S3, every attempt to connect times out. With this limit, that takes one minute rather than five.
_CONNECT_S = 10
_USAGE_EXIT_CODE = 2


def unpack(address: str, folder: Path, env: Mapping[str, str] = os.environ) -> None:
    """Fetch and unpack an archive.

    Args:
        address: ``s3://bucket/key``, or a path.
        folder: An existing, empty folder to unpack it into.
        env: Environment variables.

    Raises:
        ScriptError: The archive cannot be fetched, is not a tar archive, or has members outside the folder.
    """
    with tempfile.TemporaryDirectory(prefix="lightning-sm-") as scratch:
        path = Path(address)
        if "://" in address:
            path = Path(scratch) / "code.tar"
            _download(address, path, env)
        _extract(path, address, folder)


def _download(address: str, path: Path, env: Mapping[str, str]) -> None:
    parts = urlsplit(address)
    bucket = parts.netloc
    key = parts.path.lstrip("/")
    if parts.scheme != "s3" or not bucket or not key:
        raise ScriptError(f"The code's address is {address!r}; expected s3://bucket/key of a tar archive, or a folder.")
    try:  # images have boto3 (it comes with sagemaker-training), but laptops may not
        import boto3.exceptions  # noqa: PLC0415
        import botocore.config  # noqa: PLC0415
        import botocore.exceptions  # noqa: PLC0415
    except ImportError as error:
        raise ScriptError(
            f"The job's code is in S3, but boto3 is not installed in the image ({error}). Install boto3 there."
        ) from error
    try:
        # boto3 ignores AWS_REGION, which SageMaker sets.
        client = boto3.session.Session().client(
            "s3",
            region_name=env.get("AWS_REGION") or env.get("SAGEMAKER_REGION") or None,
            config=botocore.config.Config(connect_timeout=_CONNECT_S),
        )
        client.download_file(bucket, key, str(path))
    except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError, boto3.exceptions.Boto3Error) as error:
        raise ScriptError(
            f"Cannot fetch the job's code, {address}: {error}. Check that the job's role has s3:GetObject, and "
            "that its network can reach S3 (a VPC needs an endpoint)."
        ) from error
    except OSError as error:
        raise ScriptError(f"Cannot write the job's code, {address}, to {path.parent}: {error}.") from error


def _extract(path: Path, address: str, folder: Path) -> None:
    try:
        with tarfile.open(path, "r:*") as archive:
            archive.extractall(folder, filter="data")
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise ScriptError(f"Cannot unpack the job's code, {address}, into {folder}: {error}.") from error


def main() -> int:
    """Fetch and unpack the archive named on the command line; return the exit code."""
    address, folder = sys.argv[1:]
    try:
        unpack(address, Path(folder))
    except ScriptError as error:
        sys.stderr.write(" ".join(str(error).splitlines()) + "\n")
        return _USAGE_EXIT_CODE
    return 0


if __name__ == "__main__":
    sys.exit(main())
