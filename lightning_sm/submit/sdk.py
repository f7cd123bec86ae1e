"""Which version of the SageMaker SDK is installed, and what to tell either of them."""

from __future__ import annotations

import copy
import importlib
import os
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from lightning_sm.errors import SDKError
from lightning_sm.submit.spec import Job

_FIRST_WITHOUT_ESTIMATOR = 3


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
        return _FIRST_WITHOUT_ESTIMATOR if distribution == "sagemaker-train" else int(found.split(".")[0])
    raise SDKError(
        "No SageMaker SDK is installed here. Version 2: pip install 'lightning-sm[launch]'; version 3: "
        "pip install sagemaker-train. Without either: lightning-sm local runs the script on an emulated cluster."
    )


def adapter() -> Any:
    """Import the module that speaks with the installed SDK: ``estimator`` or ``model_trainer``.

    Raises:
        SDKError: There is no SDK.
    """
    os.environ.setdefault("SAGEMAKER_SUPPRESS_V2_WARNING", "1")  # version 2 tells its end three times per command
    name = "estimator" if sdk_version() < _FIRST_WITHOUT_ESTIMATOR else "model_trainer"
    return importlib.import_module(f"lightning_sm.submit.{name}")


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
    own = f"{job.name}/code/{time.strftime('%Y-%m-%d-%H-%M-%S', time.gmtime())}"
    if job.output is None:
        return {"key_prefix": own}
    bucket, _, prefix = job.output.removeprefix("s3://").partition("/")
    return {"bucket": bucket, "key_prefix": "/".join(filter(None, (prefix.strip("/"), own)))}
