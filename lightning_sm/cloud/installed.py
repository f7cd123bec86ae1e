"""Whether boto3 is installed, which only machines that submit jobs and look after them need."""

from __future__ import annotations

from importlib.util import find_spec

from lightning_sm.errors import SDKError

# The same as the extra "submit" in pyproject.toml.
_INSTALL = "pip install 'boto3>=1.36,<2'"


def check_boto3(command: str) -> None:
    """Check that boto3 can be imported.

    Args:
        command: What needs it.

    Raises:
        SDKError: It is not installed.
    """
    if find_spec("boto3") is None:
        raise SDKError(f"{command} needs boto3, which is not installed: {_INSTALL}")
