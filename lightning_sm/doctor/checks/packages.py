"""Checks of the installed packages, by their metadata, because an import of torch takes seconds and may fail."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib import metadata

from lightning_sm._version import installed_version
from lightning_sm.doctor.context import Context
from lightning_sm.doctor.report import Result, ok, problem

_SHOWN = (
    "lightning-sm",
    "torch",
    "pytorch-lightning",
    "lightning",
    "torchmetrics",
    "jsonargparse",
    "numpy",
    "grpcio",
    "h2",
    "protobuf",
    "sagemaker-training",
    "sagemaker",
    "nvidia-nccl-cu11",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)
# Either of them is enough.
_LIGHTNINGS = ("pytorch-lightning", "lightning")


def versions(_context: Context) -> Iterator[Result]:
    """Show the versions of Python and of the packages that matter."""
    found = [f"{name} {version}" for name in _SHOWN if (version := installed_version(name))]
    yield ok("versions", ", ".join([f"Python {platform.python_version()}", *found]))


def requirements(_context: Context) -> Iterator[Result]:
    """Find requirements of lightning_sm that are not met; ``pip check`` finds those of other packages."""
    # Imported late: Lightning brings this package along, so without Lightning it may be missing.
    from packaging.requirements import Requirement  # noqa: PLC0415

    try:
        lines = metadata.requires("lightning-sm") or []
    except metadata.PackageNotFoundError:  # lightning_sm runs from its sources
        return
    has_lightning = any(map(installed_version, _LIGHTNINGS))
    unmet = []
    for line in lines:
        required = Requirement(line)
        if required.marker is not None and not required.marker.evaluate({"extra": ""}):
            continue
        version = installed_version(required.name)
        if version is None and not (required.name in _LIGHTNINGS and has_lightning):
            unmet.append(f"lightning-sm needs {required.name}{required.specifier}, which is not installed.")
        elif version is not None and not required.specifier.contains(version, prereleases=True):
            unmet.append(f"lightning-sm needs {required.name}{required.specifier}, but {version} is installed.")
    for text in unmet:
        yield problem("requirements", text, "Install lightning-sm and your own packages in one pip command.")
    if not unmet:
        yield ok("requirements", "met")
