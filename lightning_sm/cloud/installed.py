"""The check for boto3, which is only needed on machines that submit or manage jobs."""

from __future__ import annotations

from importlib.util import find_spec

from lightning_sm.errors import SDKError

# Keep in sync with the extra "submit" in pyproject.toml.
_INSTALL = "pip install 'boto3>=1.36,<2'"


def check_boto3(command: str) -> None:
    """Check that boto3 can be imported.

    Args:
        command: The command or function that needs it.

    Raises:
        SDKError: boto3 is not installed.
    """
    if find_spec("boto3") is None:
        raise SDKError(f"{command} needs boto3, which is not installed: {_INSTALL}")
