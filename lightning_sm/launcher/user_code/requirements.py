"""The installation of the user's requirements with pip, without replacing the image's core packages."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from lightning_sm._installed import installed_version
from lightning_sm._log import command_logger
from lightning_sm._text import shortened
from lightning_sm.job.variables import INSTALL_REQUIREMENTS, Install
from lightning_sm.launcher.failure import failure_reason
from lightning_sm.launcher.user_code.script import Script

_LOG = command_logger(__name__)

_FILE = "requirements.txt"
# The packages that an image is built around: pip must keep their versions, but may install any supported version of
# lightning_sm's other dependencies.
_PINNED = ("lightning-sm", "torch", "torchvision", "torchaudio", "pytorch-lightning", "lightning")
_MAX_REASON_CHARS = 600
_NAME = re.compile(r"[^A-Za-z0-9._-]")
_ERROR = re.compile(r"^[ \t]*(ERROR|error):", re.MULTILINE)


def is_wanted(script: Script, env: Mapping[str, str]) -> bool:
    """Return whether requirements must be installed before the script starts.

    Like sagemaker-training, this looks for ``requirements.txt`` in the top folder of the code, not in a subfolder that
    contains the script.

    Raises:
        JobConfigError: ``LIGHTNING_SM_INSTALL_REQUIREMENTS`` is invalid.
    """
    setting = INSTALL_REQUIREMENTS.read(env)
    if not (script.source_dir / _FILE).is_file():
        return False
    why_not = ""
    if setting is Install.NEVER:
        why_not = f"{INSTALL_REQUIREMENTS.name}=0"
    elif setting is Install.IF_SUBMITTED and script.submitted is None:
        why_not = f"it did not come with the job (set {INSTALL_REQUIREMENTS.name}=1 to install it)"
    if why_not:
        _LOG.info("not installing %s from %s: %s.", _FILE, script.source_dir, why_not)
    return not why_not


def constraints() -> list[str]:
    """Return the lines of a constraints file with the versions that pip must keep."""
    versions = {name: installed_version(name) for name in _PINNED}
    return [f"{name}=={version}" for name, version in versions.items() if version] + list(_needed())


def command(constraints_file: Path | None) -> list[str]:
    """Return the command that runs pip in the code's folder, and sends all output to stderr, which the launcher keeps.

    Args:
        constraints_file: A file with the lines of ``constraints``; None if pip may replace the image's packages.
    """
    # Keep the user's modules from shadowing Python's. -P does not affect package builds, which may import the user's
    # modules.
    python = [sys.executable, "-P" if sys.version_info >= (3, 11) else "-I"]
    options = ["--disable-pip-version-check", "--no-input", "--root-user-action=ignore", "-r", _FILE]
    if constraints_file is not None:
        options += ["-c", str(constraints_file)]
    return ["/bin/sh", "-c", 'exec "$@" >&2', "pip", *python, "-m", "pip", "install", *options]


def failure(output: str, exit_code: int, directory: Path, *, is_protected: bool) -> str:
    """Return pip's error message, followed by advice if the cause is known.

    Args:
        output: The output of pip.
        exit_code: The exit code of pip.
        directory: The code's folder.
        is_protected: Whether pip had to keep the versions of the image's packages.
    """
    found = _ERROR.search(output)
    message = failure_reason(output, exit_code).text if found is None else output[found.start() :].rstrip()
    reason = f"pip could not install the requirements of {directory} (exit code {exit_code}).\n"
    reason += shortened(message, _MAX_REASON_CHARS)
    if is_protected and "(constraint)" in output:
        reason += (
            "\nConstraints are the versions that the image is built around. Require these, or build an image with "
            f"others ({INSTALL_REQUIREMENTS.name}={Install.UNPROTECTED.value} lets pip replace them)."
        )
    elif "No matching distribution found" in message:
        reason += "\nCheck that the job's network can reach the package index. PIP_INDEX_URL selects another index."
    return reason


def _needed() -> Iterator[str]:
    """Yield the declared dependencies of lightning_sm, without extras, which pip rejects in constraints."""
    try:
        declared = importlib.metadata.requires("lightning-sm") or []
    except importlib.metadata.PackageNotFoundError:  # lightning_sm is not installed, but runs from source
        return
    for requirement in declared:
        specifier, marker, _ = requirement.partition(";")
        if not marker and _NAME.split(specifier, maxsplit=1)[0] not in _PINNED:
            yield re.sub(r"\[.*?\]", "", specifier).strip()
