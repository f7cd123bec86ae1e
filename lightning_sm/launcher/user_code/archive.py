"""``python -m lightning_sm.launcher.user_code.archive ADDRESS FOLDER``: fetch an archive of code and unpack it.

A process of its own, which the launcher can end at any moment, and which takes boto3 along when it leaves.

``sagemaker_training.files.download_and_extract`` does the same, but leaves it at the code of the image if its folder is
not empty, skips members that it does not like with a warning, and has no deadline.
"""

from __future__ import annotations

import os
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lightning_sm.errors import ScriptError

_CONNECT_S, _READ_S, _ATTEMPTS = 10, 30, 6
_USAGE_EXIT_CODE = 2


def unpack(address: str, folder: Path, env: Mapping[str, str] = os.environ) -> None:
    """Fetch and unpack an archive.

    Args:
        address: ``s3://bucket/key``, or a path.
        folder: Where to unpack it; it exists and is empty.
        env: Environment variables.

    Raises:
        ScriptError: It cannot be fetched, is no tar archive, or has members that would land outside of the folder.
    """
    with tempfile.TemporaryDirectory(prefix="lightning-sm-") as scratch:
        path = Path(address)
        if "://" in address:
            path = Path(scratch) / "code.tar"
            _download(address, path, env)
        _extract(path, address, folder)


def _download(address: str, path: Path, env: Mapping[str, str]) -> None:
    parts = urlsplit(address)
    bucket, key = parts.netloc, parts.path.lstrip("/")
    if parts.scheme != "s3" or not bucket or not key:
        raise ScriptError(f"The code is at {address!r}; expected s3://bucket/key of a tar archive, or a folder.")
    boto3, botocore = _aws()
    try:
        # Without a session of its own, AWS_REGION, which the service sets, is no region to boto3.
        client = boto3.session.Session().client(
            "s3",
            region_name=env.get("AWS_REGION") or env.get("SAGEMAKER_REGION") or None,
            endpoint_url=env.get("S3_ENDPOINT_URL") or None,  # the toolkit's; AWS_ENDPOINT_URL is botocore's own
            config=botocore.config.Config(
                connect_timeout=_CONNECT_S,
                read_timeout=_READ_S,
                retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
            ),
        )
        client.download_file(bucket, key, str(path))
    except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError, boto3.exceptions.Boto3Error) as error:
        raise ScriptError(
            f"The code of the job, {address}, cannot be fetched: {error}. Look for s3:GetObject in the job's role, "
            "and for a way to S3 from its network (a VPC needs an endpoint)."
        ) from error
    except OSError as error:
        raise ScriptError(f"The code of the job, {address}, cannot be written to {path.parent}: {error}.") from error


def _aws() -> tuple[Any, Any]:
    try:  # installed in images (it comes with sagemaker-training), not on laptops
        import boto3  # noqa: PLC0415
        import boto3.exceptions  # noqa: PLC0415
        import botocore.config  # noqa: PLC0415
        import botocore.exceptions  # noqa: PLC0415
    except ImportError as error:
        raise ScriptError(
            f"The code of the job is in S3, and boto3 is not installed in the image ({error}). Install boto3 there."
        ) from error
    return boto3, botocore


def _extract(path: Path, address: str, folder: Path) -> None:
    if not hasattr(tarfile, "data_filter"):
        raise ScriptError(
            f"Python {sys.version.split()[0]} cannot unpack {address} safely; Python 3.10.12, 3.11.4 and later can."
        )
    try:
        with tarfile.open(path, "r:*") as archive:
            archive.extractall(folder, filter="data")
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise ScriptError(f"The code of the job, {address}, cannot be unpacked into {folder}: {error}.") from error


def main() -> int:
    """Fetch and unpack what the command line says, and return the exit code."""
    address, folder = sys.argv[1:]
    try:
        unpack(address, Path(folder))
    except ScriptError as error:
        sys.stderr.write(f"error: {error}\n")
        return _USAGE_EXIT_CODE
    return 0


if __name__ == "__main__":
    sys.exit(main())
