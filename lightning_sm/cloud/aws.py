"""Access to the AWS APIs through one session, with one-line errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from lightning_sm.errors import AWSError

# Retry often: following a job takes hours, and requests are sometimes throttled.
_CONFIG = Config(retries={"mode": "adaptive", "max_attempts": 10})
# Do not retry: if a response is lost, the service rejects the second request because the name is already taken.
_ONCE_CONFIG = Config(retries={"total_max_attempts": 1})
# For optional requests, which should fail quickly, for example if the network only reaches some services.
_QUICK_CONFIG = Config(connect_timeout=5, read_timeout=20, retries={"mode": "standard", "max_attempts": 3})


class Clients:
    """boto3's clients for one session, each created on first use.

    Args:
        session: The session.
    """

    def __init__(self, session: boto3.Session) -> None:
        self._session = session

    @cached_property
    def sagemaker(self) -> Any:
        """The client for training jobs and tuning jobs."""
        return self._session.client("sagemaker", config=_CONFIG)

    @cached_property
    def creator(self) -> Any:
        """The client for creating jobs, which sends each request once."""
        return self._session.client("sagemaker", config=_ONCE_CONFIG)

    @cached_property
    def logs(self) -> Any:
        """The client for CloudWatch Logs."""
        return self._session.client("logs", config=_CONFIG)

    @cached_property
    def s3(self) -> Any:
        """The client for S3, which holds the files that jobs write."""
        return self._session.client("s3", config=_CONFIG)

    def look(self, service: str, region: str | None = None) -> Any:
        """Return a client for any service, with short timeouts and few retries.

        Args:
            service: boto3's name for the service.
            region: Region of the service. Defaults to the region of the session.
        """
        return self._session.client(service, region_name=region, config=_QUICK_CONFIG)


def new_session(default_region: str | None = None, **settings: str | None) -> boto3.Session:
    """Open a session.

    Args:
        default_region: Region to use if neither the settings nor the user's configuration set one.
        settings: Arguments of ``boto3.Session``, such as ``region_name``.

    Raises:
        AWSError: No region is configured, or the profile does not exist.
    """
    try:
        session = boto3.Session(**settings)
        if session.region_name is None and default_region is not None:
            session = boto3.Session(**{**settings, "region_name": default_region})
    except BotoCoreError as error:  # such as an unknown AWS_PROFILE
        raise AWSError(f"No AWS session: {error}") from error
    if session.region_name is None:
        raise AWSError("No AWS region: set AWS_DEFAULT_REGION, or 'region' in ~/.aws/config.")
    return session


def check_credentials(session: boto3.Session) -> None:
    """Check that credentials exist; only AWS can tell whether they are valid.

    Raises:
        AWSError: Credentials are missing or incomplete.
    """
    try:
        credentials = session.get_credentials()
    except BotoCoreError as error:
        raise AWSError(f"AWS credentials cannot be read: {error}") from error
    if credentials is None:
        raise AWSError(
            "No AWS credentials: run 'aws configure' or 'aws sso login', or set AWS_PROFILE, or AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY. 'lightning-sm submit' with --dry-run or --local needs none."
        )


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn botocore's errors into an ``AWSError``.

    Raises:
        AWSError: AWS rejects a request or cannot be reached.
    """
    try:
        yield
    except (ClientError, BotoCoreError) as error:
        raise AWSError(f"AWS rejected the request or cannot be reached: {error}") from error


def error_code(error: ClientError) -> str:
    """Return the error code of the service, such as ``ValidationException``."""
    return str(error.response.get("Error", {}).get("Code", ""))
