"""Whether and how pip installs what the user's code asks for, without breaking what the image is made of."""

from __future__ import annotations

import importlib.metadata
import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lightning_sm.job.variables import INSTALL_REQUIREMENTS, PARENT_PID, Install
from lightning_sm.launcher.failure import failure_reason
from lightning_sm.launcher.user_code.script import Script

_LOG = logging.getLogger(__name__)

_FILE, _SETUP = "requirements.txt", "setup.py"
# What an image is built around: kept as it is. Of the other packages that lightning_sm needs, pip may take any version
# that it works with.
_PINNED = ("lightning-sm", "torch", "torchvision", "torchaudio", "pytorch-lightning", "lightning")
_MAX_REASON_CHARS = 600
_NAME = re.compile(r"[^A-Za-z0-9._-]")
_ERROR = re.compile(r"\s*(ERROR|error):")
# What pip adds about a conflict: that the other version is not to be had, and how to write other requirements.
_ADVICE = re.compile(r"^(Additionally, some packages in|To fix this you could try)", re.MULTILINE)


def wanted(script: Script, env: Mapping[str, str]) -> list[str]:
    """The arguments of pip for what is to be installed before the script starts.

    ``requirements.txt`` lies where sagemaker-training looks for it, on top of the code, and not in the script's own
    folder below. A ``setup.py`` there makes the code a package that is installed, too.

    Args:
        script: The script.
        env: Environment variables, of which ``LIGHTNING_SM_INSTALL_REQUIREMENTS`` decides: ``0`` never, ``1`` always,
            ``unprotected`` always and without protecting what the image is made of. Default: if the code came with the
            job.

    Returns:
        For example ``["-r", "requirements.txt"]``; empty if nothing is to be installed.

    Raises:
        JobConfigError: The variable has another value.
    """
    found = [name for name in (_SETUP, _FILE) if (script.source_dir / name).is_file()]
    stated = INSTALL_REQUIREMENTS.read(env)
    if stated is Install.NEVER or not found:
        return []
    names = " and ".join(found)
    if PARENT_PID.read(env) is not None:
        _LOG.info("lightning-sm: not installing %s of %s: the emulator changes no packages.", names, script.source_dir)
        return []
    if stated is Install.IF_SUBMITTED and script.submitted is None:
        _LOG.info(
            "lightning-sm: not installing %s of %s, which did not come with the job (%s=1 installs it).",
            *(names, script.source_dir, INSTALL_REQUIREMENTS.name),
        )
        return []
    return [*(["."] if _SETUP in found else []), *(["-r", _FILE] if _FILE in found else [])]


def is_protected(env: Mapping[str, str]) -> bool:
    """Whether packages of the image are to be kept as they are.

    Args:
        env: Environment variables.
    """
    return INSTALL_REQUIREMENTS.read(env) is not Install.UNPROTECTED


def constraints() -> list[str]:
    """What pip must not change, as lines of a constraints file."""
    versions = {name: _version(name) for name in _PINNED}
    return [f"{name}=={version}" for name, version in versions.items() if version] + list(_needed())


def command(arguments: Sequence[str], directory: Path, constraints_file: Path | None) -> list[str]:
    """The command that runs pip.

    Args:
        arguments: Those of ``wanted``.
        directory: Folder of the code.
        constraints_file: Content as of ``constraints``, if the packages of the image are protected.
    """
    options = [] if constraints_file is None else ["-c", str(constraints_file)]
    return [sys.executable, "-m", "lightning_sm.launcher.user_code.pip_install", str(directory), *arguments, *options]


def failure(output: str, exit_code: int, directory: Path, *, protected: bool) -> str:
    """Say why pip failed, in pip's words and with what to do.

    Args:
        output: What pip wrote.
        exit_code: Its exit code.
        directory: Folder of the code.
        protected: Whether the packages of the image are protected.
    """
    reason = f"pip could not install what the code in {directory} needs (exit code {exit_code}).\n"
    lines = [line for line in output.splitlines() if line.strip() and not line.startswith("[notice]")]
    first = next((index for index, line in enumerate(lines) if _ERROR.match(line)), None)
    if first is None:
        return reason + failure_reason(output, exit_code)
    said = _ADVICE.split("\n".join(lines[first:]))[0].rstrip()
    reason += said if len(said) <= _MAX_REASON_CHARS else said[: _MAX_REASON_CHARS - 3] + "..."
    if protected and "(constraint)" in output:
        reason += (
            "\nConstraints are the versions that the image is built around. Ask for these, or build an image with "
            f"others ({INSTALL_REQUIREMENTS.name}={Install.UNPROTECTED.value} lets pip replace them)."
        )
    elif "No matching distribution found" in said:
        reason += "\nIs there a way to the package index from the job's network? PIP_INDEX_URL names another one."
    return reason


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _needed() -> Iterator[str]:
    """The packages that lightning_sm depends on, with the versions that it declares; constraints may have no extras."""
    try:
        declared = importlib.metadata.requires("lightning-sm") or []
    except importlib.metadata.PackageNotFoundError:  # run from its sources
        return
    for requirement in declared:
        stated, marker, _ = requirement.partition(";")
        if not marker and _NAME.split(stated, maxsplit=1)[0] not in _PINNED:
            yield re.sub(r"\[.*?\]", "", stated).strip()
