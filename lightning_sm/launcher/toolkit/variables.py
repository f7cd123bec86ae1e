"""The environment variables of sagemaker-training that describe a job to its script: ``SM_HOSTS``, ``SM_HP_*`` etc.

Scripts written for the toolkit read these variables; lightning_sm itself reads SageMaker's files. This module does not
use the toolkit's ``Environment``, which imports boto3, starts ``nvidia-smi``, ``neuron-ls`` and ``which``, creates
folders, and changes the calling process's environment. A test compares each variable with the toolkit's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_sm._log import command_logger
from lightning_sm.job.facts import SINGLE_GROUP, SageMakerJob, read_json_file
from lightning_sm.job.hyperparameters import TUNING_OBJECTIVE, json_or_text

_LOG = command_logger(__name__)

_PREFIX = "sagemaker_"
# Hyperparameters that the toolkit hides from scripts although they lack its prefix (params.SAGEMAKER_HYPERPARAMETERS).
_NOT_FOR_SCRIPTS = (TUNING_OBJECTIVE, "default_user_module_name")
# Hyperparameters that are not framework parameters although they have the prefix.
_OWN = (
    "program",
    "submit_directory",
    "enable_cloudwatch_metrics",
    "region",
    "container_log_level",
    "job_name",
    "s3_output",
)
_INFO = 20
# Linux's MAX_ARG_STRLEN: the limit for "NAME=value" and its zero byte. With a longer variable, no process can start.
_MAX_BYTES = 128 * 1024


def toolkit_variables(
    job: SageMakerJob, entry_point: str, args: Sequence[str], env: Mapping[str, str]
) -> dict[str, str]:
    """Build the variables that the toolkit's ``train`` sets for a script.

    Args:
        job: The job.
        entry_point: Name of the script, as given by the user.
        args: Arguments of the script. (The toolkit formats them differently.)
        env: Environment variables.

    Returns:
        The variables, except those too long for an environment. Empty if SageMaker's files are missing, because another
        launcher has then already set the variables.

    Raises:
        JobConfigError: One of SageMaker's files cannot be read.

    Source:
        sagemaker-training 5.1, ``environment.Environment`` and ``mapping.to_env_vars``.
    """
    resources = read_json_file(job.base_dir / "input" / "config" / "resourceconfig.json", dict[str, Any])
    if not resources:
        return {}
    decoded = {name: json_or_text(text) for name, text in job.hyperparameters.items()}
    own = {name: decoded[name] for name in decoded if name.startswith(_PREFIX) or name in _NOT_FOR_SCRIPTS}
    for_script = {name: decoded[name] for name in decoded if name not in own}
    not_of_framework = (*_NOT_FOR_SCRIPTS, *(_PREFIX + name for name in _OWN))
    framework = {name: value for name, value in own.items() if name not in not_of_framework}
    facts = _facts(job, resources, entry_point, own, env)
    channels = {name: str(job.base_dir / "input" / "data" / name) for name in facts["input_data_config"]}
    only_together = {
        "additional_framework_parameters": framework,
        "channel_input_dirs": channels,
        "hyperparameters": for_script,
        "job_name": env.get("TRAINING_JOB_NAME"),
    }
    variables = {
        **facts,
        "hps": for_script,
        "framework_params": framework,
        "channels": sorted(channels),
        "user_args": list(args),
        "training_env": {**facts, **only_together},
        **{f"channel_{name}": path for name, path in channels.items()},
        **{f"hp_{name}": value for name, value in for_script.items()},
    }
    texts = {
        **{f"SM_{name.upper()}": _text(value) for name, value in variables.items()},
        "CURRENT_HOST": job.current_host,
        # If the hyperparameters lack these two, the toolkit empties the variables. Here, the environment's values are
        # kept.
        "SAGEMAKER_JOB_NAME": _text(own.get("sagemaker_job_name") or env.get("SAGEMAKER_JOB_NAME")),
        "SAGEMAKER_REGION": _text(
            own.get("sagemaker_region") or env.get("AWS_DEFAULT_REGION") or env.get("AWS_REGION")
        ),
    }
    return {name: text for name, text in texts.items() if _is_possible(name, text)}


def _facts(
    job: SageMakerJob, resources: Mapping[str, Any], entry_point: str, own: Mapping[str, Any], env: Mapping[str, str]
) -> dict[str, Any]:
    """Return the properties of the toolkit's ``Environment``, except those that only its launchers use."""
    base = job.base_dir
    groups = {group["instance_group_name"]: group for group in resources.get("instance_groups") or []}  # none locally
    current = resources.get("current_group_name", SINGLE_GROUP)
    return {
        "current_host": job.current_host,
        "current_instance_group": current,
        "current_instance_group_hosts": groups[current]["hosts"] if current in groups else [],
        "current_instance_type": resources.get("current_instance_type", "local"),
        "framework_module": env.get("SAGEMAKER_TRAINING_MODULE"),
        "hosts": list(job.hosts),
        "input_config_dir": str(base / "input" / "config"),
        "input_data_config": read_json_file(base / "input" / "config" / "inputdataconfig.json", dict[str, Any]) or {},
        "input_dir": str(base / "input"),
        "instance_groups": list(groups),
        "instance_groups_dict": groups,
        "is_hetero": len(groups) > 1,
        "log_level": own.get("sagemaker_container_log_level", _INFO),
        "model_dir": str(job.model_dir),
        "module_dir": str(own.get("sagemaker_submit_directory", job.code_dir)),
        "module_name": entry_point.removesuffix(".py"),
        "network_interface_name": resources.get("network_interface_name", "eth0"),
        "num_cpus": os.cpu_count(),
        "num_gpus": job.num_gpus,
        "num_neurons": 0,
        "output_data_dir": str(job.output_dir / "data"),
        "output_dir": str(job.output_dir),
        "output_intermediate_dir": str(job.output_dir / "intermediate"),
        "resource_config": resources,
        "user_entry_point": entry_point,
    }


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def _is_possible(name: str, text: str) -> bool:
    size = len(os.fsencode(name)) + len(text.encode("utf-8", "surrogatepass")) + 2
    if size <= _MAX_BYTES and not {"=", "\0"} & set(name) and "\0" not in text:
        return True
    _LOG.info(
        "not setting %.80s for the script: it is too long (%d bytes), or has characters that an environment "
        "variable cannot hold. The job's files contain it.",
        name,
        size,
    )
    return False
