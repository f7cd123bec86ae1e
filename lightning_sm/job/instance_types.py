"""SageMaker's instance types: their accelerators, GPUs and vCPUs.

Source:
    Amazon EC2 instance types, "Accelerated computing" and "Instance type specifications".
"""

from __future__ import annotations

import re

_NVIDIA_FAMILIES = frozenset({"p", "g", "gr"})
# Neuron (Trn, Inf) and Gaudi (DL).
_OTHER_ACCELERATED_FAMILIES = frozenset({"trn", "inf", "dl"})

_SMALL = {"medium": 2, "large": 2}
_XLARGE = re.compile(r"(?P<times>[1-9]\d*)?xlarge")
_VCPUS_OF_XLARGE = 4
_G_SIZES = {
    **dict.fromkeys(("xlarge", "2xlarge", "4xlarge", "8xlarge", "16xlarge"), 1),
    **dict.fromkeys(("12xlarge", "24xlarge"), 4),
    "48xlarge": 8,
}
# GPUs by family and size. Types that are not listed count as unknown, since new ones appear every year.
_GPUS = {
    **dict.fromkeys(("g4dn", "g5", "g6", "g6e"), _G_SIZES),
    "p3": {"2xlarge": 1, "8xlarge": 4, "16xlarge": 8},
    "p3dn": {"24xlarge": 8},
    "p4d": {"24xlarge": 8},
    "p4de": {"24xlarge": 8},
    "p5": {"4xlarge": 1, "48xlarge": 8},
    "p5e": {"48xlarge": 8},
    "p5en": {"48xlarge": 8},
    "p6-b200": {"48xlarge": 8},
}


def is_accelerated(instance_type: str | None) -> bool | None:
    """Return whether the instances have accelerators, or None for local mode's "local", which is not an EC2 type."""
    family = _family(instance_type)
    return None if family is None else family in _NVIDIA_FAMILIES | _OTHER_ACCELERATED_FAMILIES


def has_gpus(instance_type: str | None) -> bool:
    """Return whether the instances are known to have NVIDIA GPUs."""
    return _family(instance_type) in _NVIDIA_FAMILIES


def num_vcpus(instance_type: str | None) -> int | None:
    """Return an instance's number of vCPUs, derived from its size, or None if the size is unknown."""
    if _family(instance_type) is None:
        return None
    size = (instance_type or "").rpartition(".")[2]
    if size in _SMALL:
        return _SMALL[size]
    found = _XLARGE.fullmatch(size)
    return None if found is None else _VCPUS_OF_XLARGE * int(found["times"] or 1)


def num_gpus(instance_type: str | None) -> int | None:
    """Return an instance's number of GPUs: 0 for CPU families, None for types that are not listed."""
    if is_accelerated(instance_type) is False:
        return 0
    family, _, size = (instance_type or "").removeprefix("ml.").partition(".")
    return _GPUS.get(family, {}).get(size)


def _family(instance_type: str | None) -> str | None:
    match = re.match(r"ml\.([a-z]+)\d", instance_type or "")
    return match.group(1) if match else None
