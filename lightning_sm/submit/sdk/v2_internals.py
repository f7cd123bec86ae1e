"""The inside of version 2 of the SageMaker SDK: whether it is what its subclasses here were written for."""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_sm.errors import SDKError
from lightning_sm.submit.sdk.version import INSTALL_V2

# The oldest and the newest version that the tests of the subclasses were run with.
OLDEST_TESTED, NEWEST_TESTED = "2.257.1", "2.257.7"


@dataclass(frozen=True)
class Method:
    """A function of the SDK that a subclass overrides or calls.

    Attributes:
        owner: The class that has it.
        name: Its name.
        parameters: Names of its parameters in their order, ``self`` included.
    """

    owner: type
    name: str
    parameters: tuple[str, ...]


def missing_sdk(cause: ImportError) -> SDKError:
    """Say why version 2 of the SDK cannot be imported, and what to do.

    Args:
        cause: The error of the import.
    """
    major_3 = _version("sagemaker-train") or _version("sagemaker")
    needed = (
        f"Local mode with instance groups needs version 2 of the SageMaker SDK (tested: {OLDEST_TESTED} to "
        f"{NEWEST_TESTED})"
    )
    if major_3 is None:
        return SDKError(f"{needed}, and none is installed ({cause}). Install it: {INSTALL_V2}")
    if not major_3.startswith("sagemaker 2."):
        return SDKError(
            f"{needed}, but {major_3} is installed, which belongs to version 3. Version 3 has no Estimator, and its "
            "local mode has no instance groups. Install version 2 in a virtual environment of its own: "
            f"{INSTALL_V2}"
        )
    return SDKError(
        f"{needed}; {major_3} is installed, but cannot be imported: {cause}. "
        f"Local mode has requirements of its own: {INSTALL_V2}"
    )


def check_methods(methods: Sequence[Method]) -> None:
    """Check that the SDK has what a subclass builds on.

    Args:
        methods: Everything that it overrides or calls.

    Raises:
        SDKError: A method is gone or has other parameters; the message names all of them and both versions.
    """
    changes = [change for change in map(_change, methods) if change]
    if changes:
        raise changed_sdk(changes)


def check_attributes(instance: object, names: Sequence[str]) -> None:
    """Check that an object of the SDK has the attributes that a subclass reads.

    Args:
        instance: The object.
        names: Names of the attributes.

    Raises:
        SDKError: One is missing.
    """
    missing = [f"{type(instance).__name__} has no attribute {name!r}" for name in names if not hasattr(instance, name)]
    if missing:
        raise changed_sdk(missing)


def changed_sdk(changes: Sequence[str]) -> SDKError:
    """Say that the SDK is not what a subclass was written for.

    Args:
        changes: What is different.
    """
    found = _version("sagemaker") or "an unknown version"
    return SDKError(
        f"The SageMaker SDK that is installed ({found}) is not, inside, what lightning_sm was tested with (sagemaker "
        f"{OLDEST_TESTED} to {NEWEST_TESTED}): {'; '.join(changes)}. "
        f"Install a tested one: pip install 'sagemaker[local]=={NEWEST_TESTED}'"
    )


def _change(method: Method) -> str | None:
    place = f"{method.owner.__name__}.{method.name}"
    function: Any = getattr(method.owner, method.name, None)
    if function is None:
        return f"{place} is gone"
    found = tuple(inspect.signature(function).parameters)
    if found != method.parameters:
        return f"{place} takes ({', '.join(found)}), not ({', '.join(method.parameters)})"
    return None


def _version(distribution: str) -> str | None:
    try:
        return f"{distribution} {importlib.metadata.version(distribution)}"
    except importlib.metadata.PackageNotFoundError:
        return None
