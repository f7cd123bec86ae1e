"""Which version of the SageMaker SDK is installed, and what to tell either of them."""

from __future__ import annotations

import copy
import importlib
import os
import secrets
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from lightning_sm.errors import SDKError
from lightning_sm.submit.job_file import Job

SDK_WITHOUT_ESTIMATOR = 3
# What pyproject.toml calls the extra "launch".
INSTALL_V2 = "pip install 'sagemaker[local]>=2.257.1,<3'"
_INSTALL_V3 = "pip install 'sagemaker-train>=1.27,<2'"
# Older ones send everything with the first session of the process: a rehearsal of a second job would send it.
_FIRST_CORE = "2.24"


def sdk_version() -> int:
    """Major version of the installed SDK: 2 has ``Estimator``, 3 has ``ModelTrainer``.

    Raises:
        SDKError: There is none.
    """
    for distribution in ("sagemaker-train", "sagemaker"):
        try:
            found = version(distribution)
        except PackageNotFoundError:
            continue
        # Version 3 is sagemaker-train 1, beside which the distribution "sagemaker" is empty.
        return SDK_WITHOUT_ESTIMATOR if distribution == "sagemaker-train" else int(found.split(".")[0])
    raise SDKError(
        f"No SageMaker SDK is installed here. Version 2: {INSTALL_V2}; version 3: {_INSTALL_V3}. Without either: "
        "lightning-sm local runs the script on an emulated cluster."
    )


def adapter() -> Any:
    """Import the module that speaks with the installed SDK: ``v2`` or ``v3``.

    Raises:
        SDKError: There is no SDK, or it is too old.
    """
    os.environ.setdefault("SAGEMAKER_SUPPRESS_V2_WARNING", "1")  # version 2 tells its end three times per command
    name = "v2" if sdk_version() < SDK_WITHOUT_ESTIMATOR else "v3"
    from packaging.version import Version  # noqa: PLC0415 - comes with either SDK

    if name == "v3" and Version(found := version("sagemaker-core")) < Version(_FIRST_CORE):
        raise SDKError(f"sagemaker-core {found} is installed; {_FIRST_CORE} or newer is needed. {_INSTALL_V3}")
    return importlib.import_module(f"lightning_sm.submit.sdk.{name}")


def without_telemetry(config: Mapping[str, Any]) -> dict[str, Any]:
    """The SDK's configuration, with its reports to its makers switched off: a dry run sends nothing to anybody.

    Args:
        config: The configuration as the SDK loaded it.
    """
    changed = copy.deepcopy(dict(config))
    changed.setdefault("SchemaVersion", "1.0")
    node = changed
    for name in ("SageMaker", "PythonSDK", "Modules"):
        node = node.setdefault(name, {})
    node["TelemetryOptOut"] = True
    return changed


def code_location(job: Job) -> dict[str, str]:
    """Where the code of one submission goes: beside the output, else into the SDK's own bucket.

    Args:
        job: What the file says.

    Returns:
        ``bucket``, if known, and ``key_prefix``, as ``Session.upload_data`` calls them.
    """
    # Two submissions may fall into one second.
    own = f"{job.name}/code/{time.strftime('%Y-%m-%d-%H-%M-%S', time.gmtime())}-{secrets.token_hex(2)}"
    if job.output is None:
        return {"key_prefix": own}
    bucket, _, prefix = job.output.removeprefix("s3://").partition("/")
    return {"bucket": bucket, "key_prefix": "/".join(filter(None, (prefix.strip("/"), own)))}
