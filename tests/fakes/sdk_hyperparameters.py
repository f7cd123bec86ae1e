"""Hyperparameters in the format in which each version of the SDK sends them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from lightning_sm.job.hyperparameters import encode


def sdk_v2_generic(config: Mapping[str, Any]) -> dict[str, str]:
    """Encode like SDK v2's ``Estimator`` without ``source_dir`` (sagemaker 2.257, ``estimator.py``, ``to_string``)."""
    return {key: str(value) for key, value in config.items()}


def sdk_v2_framework(config: Mapping[str, Any]) -> dict[str, str]:
    """Encode like SDK v2's framework estimators (``_json_encode_hyperparameters``), with two keys that they add."""
    own = {"sagemaker_program": "train.py", "sagemaker_container_log_level": 20}
    return {key: json.dumps(value) for key, value in {**config, **own}.items()}


def sdk_v3(config: Mapping[str, Any]) -> dict[str, str]:
    """Encode like SDK v3's ``ModelTrainer`` (``safe_serialize``)."""
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in config.items()}


Route = Callable[[Mapping[str, Any]], dict[str, str]]
ROUTES = [sdk_v2_generic, sdk_v2_framework, sdk_v3, encode]
