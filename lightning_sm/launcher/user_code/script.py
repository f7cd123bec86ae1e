"""The script that a job runs, and its location."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_sm.errors import ScriptError
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.hyperparameters import unquoted

# The address that SDK v2's local_code mode sets, regardless of the base folder.
_CONTAINER_CODE_DIR = Path("/opt/ml/code")


@dataclass(frozen=True)
class Program:
    """The name of the script to run.

    Attributes:
        name: Path of the script, relative to the folder of its code.
        origin: Where the script was named, for messages.
        is_entry_point: Whether the job named it as a file in the job's own code.
    """

    name: str
    origin: str
    is_entry_point: bool = False


@dataclass(frozen=True)
class Submission:
    """Code that came with the job.

    Attributes:
        address: ``s3://bucket/key`` of a tar archive, or the path of a folder or an archive.
        origin: Where the address was given, for messages.
    """

    address: str
    origin: str


@dataclass(frozen=True)
class Script:
    """The script to start.

    Attributes:
        command: Program and first arguments, to which the script's arguments are appended.
        directory: Working directory of the script.
        submitted: The folder of the job's code, if any; the script may still be part of the image.
    """

    command: tuple[str, ...]
    directory: Path
    submitted: Path | None = None

    @property
    def path(self) -> Path:
        """The script's file."""
        return Path(self.command[-1])

    @property
    def is_python(self) -> bool:
        """Whether Python runs the script, rather than a shell or the kernel."""
        return self.command[: len(_PYTHON)] == _PYTHON

    @property
    def source_dir(self) -> Path:
        """The folder whose requirements are installed."""
        return self.submitted or self.directory

    @property
    def module_dirs(self) -> list[str]:
        """The folders in which Python looks for modules, starting with the job's code."""
        return list(dict.fromkeys([str(self.source_dir), str(self.directory)]))


def find_program(script: str | None, job: SageMakerJob, env: Mapping[str, str]) -> Program:
    """Return the script to run.

    The job's ``entry_point=`` (a hyperparameter) takes precedence over ``SAGEMAKER_PROGRAM``, which an image sets to
    name its script. In sagemaker-training, the image silently wins.

    Args:
        script: The script named on the command line, if any.
        job: The job, whose hyperparameters may name a script.
        env: Environment variables.

    Raises:
        ScriptError: No script is named.
    """
    entry_point = unquoted(job.hyperparameters.get("sagemaker_program")) or ""
    for program in (
        Program(script or "", "the command line"),
        Program(entry_point, "hyperparameter sagemaker_program", is_entry_point=True),
        Program(env.get("SAGEMAKER_PROGRAM", ""), "SAGEMAKER_PROGRAM"),
    ):
        if program.name:
            return program
    raise ScriptError(
        "No training script was given. Name it on the command line (lightning-sm train app/train.py), in "
        "SAGEMAKER_PROGRAM, or in the hyperparameter sagemaker_program (Estimator(entry_point=...))."
    )


def find_submission(job: SageMakerJob, env: Mapping[str, str]) -> Submission | None:
    """Return the code that came with the job, if any.

    If the variable ``SAGEMAKER_SUBMIT_DIRECTORY`` names a folder, that code is part of the image, and is not returned.
    """
    address = unquoted(job.hyperparameters.get("sagemaker_submit_directory"))
    if address:
        if Path(address) == _CONTAINER_CODE_DIR:
            address = str(job.code_dir)
        return Submission(address, "hyperparameter sagemaker_submit_directory")
    address = env.get("SAGEMAKER_SUBMIT_DIRECTORY")
    if address and "://" in address:
        return Submission(address, "SAGEMAKER_SUBMIT_DIRECTORY")
    return None


def find_script(program: Program, job: SageMakerJob, env: Mapping[str, str], submitted: Path | None = None) -> Script:
    """Find the script and the command that starts it.

    Args:
        program: The script's name.
        job: The job, which defines the container's folders.
        env: Environment variables.
        submitted: The folder of the code that came with the job, if any.

    Raises:
        ScriptError: The script does not exist or cannot be started.
    """
    folders = _folders(program, job, env, submitted)
    for folder in folders:
        path = folder / program.name
        if path.is_file():
            return Script((*interpreter(path), str(path)), folder, submitted)
    tried = list(dict.fromkeys(str(folder / program.name) for folder in folders))
    raise ScriptError(
        f"The training script {program.name!r} does not exist. It was named by {program.origin}. "
        f"Tried: {', '.join(tried)}."
    )


_PYTHON = (sys.executable, "-u")


def _folders(program: Program, job: SageMakerJob, env: Mapping[str, str], submitted: Path | None) -> Sequence[Path]:
    # entry_point= names a file in the job's code, so do not run another script of the same name in the image.
    if submitted is not None and program.is_entry_point:
        return [submitted]
    folders = [] if submitted is None else [submitted]
    folders.append(Path.cwd())
    directory = env.get("SAGEMAKER_SUBMIT_DIRECTORY")
    if directory and "://" not in directory:
        folders.append(Path(directory).absolute())
    folders.append(job.code_dir.absolute())
    # SDK v3 puts the code here. Its driver starts this launcher with SourceCode(command="lightning-sm train ...").
    folders.append((job.base_dir / "input" / "data" / "code").absolute())
    return folders


def interpreter(path: Path) -> tuple[str, ...]:
    """Return the command that interprets a file: Python, the one in its first line, or sh; empty for a binary.

    The kernel cannot choose it, because files from an archive or in a mounted folder may not be executable.

    Args:
        path: The file.

    Raises:
        ScriptError: The file cannot be read, or nothing is known that could run it.
    """
    if path.suffix == ".py":
        return _PYTHON
    try:
        with path.open("rb") as file:
            first = file.readline(256)
    except OSError as error:
        raise ScriptError(f"The training script {path} cannot be read: {error.strerror}.") from error
    if first.startswith(b"#!"):
        words = first[2:].decode("utf-8", errors="replace").strip().split(None, 1)  # at most one argument, as on Linux
        if words:
            return tuple(words)
    if path.suffix == ".sh":
        return ("/bin/sh",)
    if first.startswith(b"\x7fELF"):
        return ()
    raise ScriptError(
        f"The training script {path} is not a Python file (*.py), a shell script (*.sh, or a first line such as "
        "#!/bin/sh), or a program."
    )
