"""A check that the internals of SDK v2 are those for which its subclasses here were written."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_sm._version import installed_version
from lightning_sm.errors import SDKError
from lightning_sm.submit.sdk.version import INSTALL_V2, sdk_version

# The oldest and the newest version with which the subclasses were tested.
OLDEST_TESTED = "2.257.1"
NEWEST_TESTED = "2.257.7"


@dataclass(frozen=True)
class Method:
    """A method of the SDK that a subclass overrides or calls.

    Attributes:
        owner: The class that has it.
        name: Its name.
        parameters: Names of its parameters in their order, ``self`` included, separated by ``", "``.
    """

    owner: type
    name: str
    parameters: str


def missing_sdk(cause: ImportError) -> SDKError:
    """Explain why SDK v2 cannot be imported, and what to install."""
    needed = (
        f"Local mode with instance groups needs version 2 of the SageMaker SDK (tested: {OLDEST_TESTED} to "
        f"{NEWEST_TESTED})"
    )
    version_3, version = installed_version("sagemaker-train"), installed_version("sagemaker")
    if version_3 is None and version is None:
        return SDKError(f"{needed}, and no version is installed ({cause}). Install it: {INSTALL_V2}")
    installed = f"sagemaker {version}" if version_3 is None else f"sagemaker-train {version_3}"
    if sdk_version() == "v3":
        return SDKError(
            f"{needed}, but {installed} is installed, which belongs to version 3. Version 3 has no Estimator, and its "
            f"local mode has no instance groups. Install version 2 in a separate virtual environment: {INSTALL_V2}"
        )
    return SDKError(
        f"{needed}; {installed} is installed but cannot be imported: {cause}. Local mode needs additional packages: "
        f"{INSTALL_V2}"
    )


def check_methods(methods: Sequence[Method]) -> None:
    """Check that the SDK has the methods that a subclass overrides or calls.

    A method that was renamed would otherwise simply not be overridden, and hosts would, for example, see the channels
    of other groups.

    Raises:
        SDKError: A method is missing or has other parameters; the message lists all of them and the versions.
    """
    changes = [change for change in map(_change, methods) if change]
    if changes:
        raise SDKError(
            f"The installed SageMaker SDK (sagemaker {installed_version('sagemaker') or 'of unknown version'}) differs "
            f"from the versions that lightning_sm was tested with (sagemaker {OLDEST_TESTED} to {NEWEST_TESTED}): "
            f"{'; '.join(changes)}. "
            f"Install a tested version: pip install 'sagemaker[local]=={NEWEST_TESTED}'"
        )


def _change(method: Method) -> str | None:
    place = f"{method.owner.__name__}.{method.name}"
    function: Any = getattr(method.owner, method.name, None)
    if function is None:
        return f"{place} is missing"
    found = ", ".join(inspect.signature(function).parameters)
    if found != method.parameters:
        return f"{place} takes ({found}), not ({method.parameters})"
    return None
