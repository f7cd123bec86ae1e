"""The installation of the user's requirements by pip, without replacing the image's core packages."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lightning_sm._log import command_logger
from lightning_sm._text import shortened
from lightning_sm._version import installed_version
from lightning_sm.job.variables import INSTALL_REQUIREMENTS, Install
from lightning_sm.launcher.failure import failure_reason
from lightning_sm.launcher.user_code.script import Script

_LOG = command_logger(__name__)

_FILE = "requirements.txt"
_SETUP = "setup.py"
# The packages that an image is built around, which keep their versions. Of the others that lightning_sm needs, pip may
# install any version that lightning_sm works with.
_PINNED = ("lightning-sm", "torch", "torchvision", "torchaudio", "pytorch-lightning", "lightning")
_MAX_REASON_CHARS = 600
_NAME = re.compile(r"[^A-Za-z0-9._-]")
_ERROR = re.compile(r"\s*(ERROR|error):")
# The beginnings of what pip adds to a conflict: that the other version is not available, and general advice.
_ADVICE = re.compile(r"^(Additionally, some packages in|To fix this you could try)", re.MULTILINE)


def wanted(script: Script, env: Mapping[str, str]) -> list[str]:
    """Return the arguments of pip for what must be installed before the script starts.

    Like sagemaker-training, this looks for ``requirements.txt`` in the top folder of the code, not in the folder of a
    script below. A ``setup.py`` there makes the code a package, which is installed, too.

    Returns:
        For example ``["-r", "requirements.txt"]``; empty if there is nothing to install.

    Raises:
        JobConfigError: ``LIGHTNING_SM_INSTALL_REQUIREMENTS`` is invalid.
    """
    found = [name for name in (_SETUP, _FILE) if (script.source_dir / name).is_file()]
    stated = INSTALL_REQUIREMENTS.read(env)
    if not found:
        return []
    names = " and ".join(found)
    if stated is Install.NEVER:
        _LOG.info("not installing %s of %s: %s=0.", names, script.source_dir, INSTALL_REQUIREMENTS.name)
        return []
    if stated is Install.IF_SUBMITTED and script.submitted is None:
        _LOG.info(
            "not installing %s of %s, which did not come with the job (%s=1 installs it).",
            names,
            script.source_dir,
            INSTALL_REQUIREMENTS.name,
        )
        return []
    arguments = []
    if _SETUP in found:
        arguments.append(".")
    if _FILE in found:
        arguments += ["-r", _FILE]
    return arguments


def constraints() -> list[str]:
    """Return the versions that pip must keep, as lines of a constraints file."""
    versions = {name: installed_version(name) for name in _PINNED}
    return [f"{name}=={version}" for name, version in versions.items() if version] + list(_needed())


def command(arguments: Sequence[str], directory: Path, constraints_file: Path | None) -> list[str]:
    """Return the command that runs pip.

    Args:
        arguments: From ``wanted``.
        directory: Folder of the code.
        constraints_file: A file with the lines of ``constraints``; None if pip may replace the image's packages.
    """
    options = [] if constraints_file is None else ["-c", str(constraints_file)]
    return [sys.executable, "-m", "lightning_sm.launcher.user_code.pip_install", str(directory), *arguments, *options]


def failure(output: str, exit_code: int, directory: Path, *, is_protected: bool) -> str:
    """Say why pip failed, in pip's words, and what to do.

    Args:
        output: What pip wrote.
        exit_code: Its exit code.
        directory: Folder of the code.
        is_protected: Whether pip had to keep the versions of the image's packages.
    """
    reason = f"pip could not install the requirements of {directory} (exit code {exit_code}).\n"
    lines = [line for line in output.splitlines() if line.strip() and not line.startswith("[notice]")]
    first = next((index for index, line in enumerate(lines) if _ERROR.match(line)), None)
    if first is None:
        return reason + failure_reason(output, exit_code).text
    message = _ADVICE.split("\n".join(lines[first:]))[0].rstrip()
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
    """Yield the declared dependencies of lightning_sm, without extras, which pip does not accept in constraints."""
    try:
        declared = importlib.metadata.requires("lightning-sm") or []
    except importlib.metadata.PackageNotFoundError:  # lightning_sm runs from its sources
        return
    for requirement in declared:
        stated, marker, _ = requirement.partition(";")
        if not marker and _NAME.split(stated, maxsplit=1)[0] not in _PINNED:
            yield re.sub(r"\[.*?\]", "", stated).strip()
