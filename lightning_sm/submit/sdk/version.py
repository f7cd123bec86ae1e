"""The installed version of the SageMaker SDK, and its adapter."""

from __future__ import annotations

import copy
import importlib
import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from lightning_sm.errors import SDKError

# The same as the extra "launch" in pyproject.toml.
INSTALL_V2 = "pip install 'sagemaker[local]>=2.257.1,<3'"
_INSTALL_V3 = "pip install 'sagemaker-train>=1.27,<2'"
# Older versions keep the first session of the process for everything: a rehearsal of a second job would submit it.
_FIRST_CORE = "2.24"


def sdk_version() -> Literal["v2", "v3"]:
    """Return the version of the installed SDK: v2 has ``Estimator``, v3 has ``ModelTrainer``.

    Raises:
        SDKError: The SDK is not installed.
    """
    # Version 3 is the distribution sagemaker-train 1; its distribution "sagemaker" is empty.
    for distribution in ("sagemaker-train", "sagemaker"):
        try:
            found = version(distribution)
        except PackageNotFoundError:
            continue
        return "v2" if distribution == "sagemaker" and found.startswith("2.") else "v3"
    raise SDKError(
        f"The SageMaker SDK is not installed. For version 2: {INSTALL_V2}. For version 3: {_INSTALL_V3}. Without the "
        "SDK, 'lightning-sm local' runs the script on an emulated cluster."
    )


def adapter() -> Any:
    """Import the adapter of the installed SDK: the module ``v2`` or ``v3``, with ``submit`` and ``run_locally``.

    Raises:
        SDKError: The SDK is not installed, or is too old.
    """
    os.environ.setdefault("SAGEMAKER_SUPPRESS_V2_WARNING", "1")  # printed three times per command
    name = sdk_version()
    from packaging.version import Version  # noqa: PLC0415 - comes with either SDK

    if name == "v3" and Version(found := version("sagemaker-core")) < Version(_FIRST_CORE):
        raise SDKError(f"sagemaker-core {found} is installed; {_FIRST_CORE} or newer is needed. {_INSTALL_V3}")
    return importlib.import_module(f"lightning_sm.submit.sdk.{name}")


def without_telemetry(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the SDK's configuration with its telemetry disabled: a dry run must not send anything."""
    changed = copy.deepcopy(dict(config))
    changed.setdefault("SchemaVersion", "1.0")
    node = changed
    for name in ("SageMaker", "PythonSDK", "Modules"):
        node = node.setdefault(name, {})
    node["TelemetryOptOut"] = True
    return changed
