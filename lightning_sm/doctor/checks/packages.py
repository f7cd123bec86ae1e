"""Checks of what is installed, from the metadata alone: an import of torch takes seconds and may fail."""

from __future__ import annotations

import platform
from collections.abc import Collection, Iterator
from importlib import metadata

from lightning_sm.doctor.context import Context
from lightning_sm.doctor.report import Result, ok, problem, warning

_SHOWN = (
    "lightning-sm",
    "torch",
    "pytorch-lightning",
    "lightning",
    "torchmetrics",
    "jsonargparse",
    "numpy",
    "grpcio",
    "protobuf",
    "sagemaker-training",
    "sagemaker",
    "smdistributed-dataparallel",
    "nvidia-nccl-cu11",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)
# Whose requirements are compared with what is installed. lightning-bolts asks for pytorch-lightning<2 and is installed
# without its requirements on purpose.
_COMPARED = (
    "torch",
    "pytorch-lightning",
    "lightning",
    "torchmetrics",
    "jsonargparse",
    "grpcio",
    "sagemaker-training",
    "sagemaker",
    "tensorboard",
    "torchvision",
)
_LIGHTNINGS = ("pytorch-lightning", "lightning")
_COMPROMISED = frozenset({"2.6.2", "2.6.3"})  # Lightning issue 21691
# The extras that users install; those of developers are of no interest to a job.
_EXTRAS = ("", "container", "vision", "launch", "compression")
# Pairs that their own metadata does not exclude: package, its versions, other package, its versions, what happens.
_PAIRS = (
    (
        "sagemaker-training",
        "<5",
        "protobuf",
        ">=4",
        "train fails at its first import ('Descriptors cannot be created directly')",
        "pip install 'sagemaker-training>=5.1'",
    ),
    *(
        (
            "smdistributed-dataparallel",
            ">=0",
            name,
            ">=2.3",
            "SMDDP knows no ReduceOp.AVG (Lightning issue 20409)",
            "Use NCCL, or lightning 2.2",
        )
        for name in _LIGHTNINGS
    ),
)


def versions(_context: Context) -> Iterator[Result]:
    """List versions.

    Args:
        _context: The host.
    """
    found = [f"{name} {version}" for name in _SHOWN if (version := _version(name))]
    yield ok("versions", ", ".join([f"Python {platform.python_version()}", *found]))


def lightnings(_context: Context) -> Iterator[Result]:
    """Find out which of the two Lightnings are installed: lightning needs pytorch-lightning, and so do we.

    Args:
        _context: The host.
    """
    found = {name: version for name in _LIGHTNINGS if (version := _version(name))}
    shown = " and ".join(f"{name} {version}" for name, version in found.items())
    if not found:
        yield problem("Lightning", "not installed", "pip install pytorch-lightning")
    elif len(set(found.values())) > 1:
        yield warning(
            "Lightning",
            f"{shown}: two versions of the same code.",
            "Install both in one version. A script imports either pytorch_lightning or lightning.pytorch, never both.",
        )
    else:
        yield ok("Lightning", shown)
    for name, version in found.items():
        if version in _COMPROMISED:
            yield problem("Lightning", f"{name} {version} was a compromised release.", f"pip install -U {name}")


def requirements(_context: Context) -> Iterator[Result]:
    """Compare what packages ask for with what is installed.

    Args:
        _context: The host.
    """
    unmet = [*_unmet("lightning-sm", _EXTRAS)]
    conflicts = [text for name in _COMPARED for text in _unmet(name, ("",))]
    for text in unmet:
        yield problem("requirements", text, "pip install lightning-sm, in the same command as your own packages")
    for text in conflicts:
        yield warning("requirements", text, "pip install both in one command; pip check lists all")
    clashes = [*_clashes()]
    yield from clashes
    if not unmet and not conflicts and not clashes:
        yield ok("requirements", "met")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _unmet(name: str, extras: Collection[str], *, are_needed: bool = False) -> Iterator[str]:
    """What a package asks for and does not get. Extras that are not needed ask only for what is installed anyway."""
    # A requirement of Lightning, and so not there on the host that lacks it: only imported where it is used.
    from packaging.requirements import Requirement  # noqa: PLC0415

    try:
        lines = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return
    for line in lines:
        wanted = Requirement(line)
        if wanted.marker is not None and not any(wanted.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        version = _version(wanted.name)
        is_lightning = wanted.name in _LIGHTNINGS and any(map(_version, _LIGHTNINGS))
        is_needed = are_needed or "extra" not in line
        if version is None and is_needed and not is_lightning:
            yield f"{name} needs {wanted.name}{wanted.specifier}, which is not installed."
        elif version is not None and not wanted.specifier.contains(version, prereleases=True):
            yield f"{name} needs {wanted.name}{wanted.specifier}, but {version} is installed."
        elif version is not None and wanted.extras and is_needed:
            yield from _unmet(wanted.name, wanted.extras, are_needed=True)


def _clashes() -> Iterator[Result]:
    from packaging.specifiers import SpecifierSet  # noqa: PLC0415 - as above

    for name, versions_, other, other_versions, consequence, advice in _PAIRS:
        found, other_found = _version(name), _version(other)
        if found is None or other_found is None:
            continue
        if SpecifierSet(versions_).contains(found) and SpecifierSet(other_versions).contains(other_found):
            yield problem("requirements", f"{name} {found} with {other} {other_found}: {consequence}.", advice)
