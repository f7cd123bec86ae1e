"""The AWS APIs: one session for all of them, and every refusal in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from lightning_sm.errors import AWSError

# Retry often: following a job takes hours, during which the API is throttled at times.
_CONFIG = Config(retries={"mode": "adaptive", "max_attempts": 10})
# The service refuses a second request of the same name, so one whose answer was lost would become an error.
_ONCE_CONFIG = Config(retries={"total_max_attempts": 1})
# For questions that may go without an answer, for example because the network leads to some services only.
_QUICK_CONFIG = Config(connect_timeout=5, read_timeout=20, retries={"mode": "standard", "max_attempts": 3})


class Clients:
    """boto3's clients of one session, each made when it is first used.

    Args:
        session: The session.
    """

    def __init__(self, session: boto3.Session) -> None:
        self._session = session

    @cached_property
    def sagemaker(self) -> Any:
        """Training jobs and tuning jobs."""
        return self._session.client("sagemaker", config=_CONFIG)

    @cached_property
    def creator(self) -> Any:
        """SageMaker's client that creates jobs: it sends each request once."""
        return self._session.client("sagemaker", config=_ONCE_CONFIG)

    @cached_property
    def logs(self) -> Any:
        """CloudWatch Logs."""
        return self._session.client("logs", config=_CONFIG)

    @cached_property
    def s3(self) -> Any:
        """S3, which holds the files that jobs leave."""
        return self._session.client("s3", config=_CONFIG)

    def look(self, service: str, region: str | None = None) -> Any:
        """Return a client of any service, whose questions are answered soon or not at all.

        Args:
            service: boto3's name of it.
            region: Where it is asked, if not in the region of the session.
        """
        return self._session.client(service, region_name=region, config=_QUICK_CONFIG)


def new_session(default_region: str | None = None, **settings: str | None) -> boto3.Session:
    """Open a session.

    Args:
        default_region: Its region, where neither the settings nor the user's configuration name one.
        settings: Arguments of ``boto3.Session``, such as ``region_name``.

    Raises:
        AWSError: No region is configured, or the profile does not exist.
    """
    try:
        session = boto3.Session(**settings)
        if session.region_name is None and default_region is not None:
            session = boto3.Session(**{**settings, "region_name": default_region})
    except BotoCoreError as error:  # for example, AWS_PROFILE names an unknown profile
        raise AWSError(f"No AWS session: {error}") from error
    if session.region_name is None:
        raise AWSError("No AWS region: set AWS_DEFAULT_REGION, or 'region' in ~/.aws/config.")
    return session


def check_credentials(session: boto3.Session) -> None:
    """Check that there are credentials; only AWS knows whether they are valid.

    Raises:
        AWSError: There are none, or they are incomplete.
    """
    try:
        found = session.get_credentials()
    except BotoCoreError as error:
        raise AWSError(f"AWS credentials cannot be read: {error}") from error
    if found is None:
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
    """Return the service's word for an error, such as ``ValidationException``."""
    return str(error.response.get("Error", {}).get("Code", ""))
