"""Which script a job asks for, and where it is."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_sm.errors import ScriptError
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.hyperparameters import unquoted

COMMAND_LINE = "the command line"
_HYPERPARAMETER = "hyperparameter sagemaker_program"
_VARIABLE = "SAGEMAKER_PROGRAM"

# What SDK v2's local_code mode writes, whatever the base folder is.
_CONTAINER_CODE_DIR = Path("/opt/ml/code")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True)
class Program:
    """The script that is to run, as it was named.

    Attributes:
        name: Path, relative to the code.
        origin: Who named it, for messages.
        overruled: Other names, by those who come after.
    """

    name: str
    origin: str
    overruled: tuple[Program, ...] = ()


@dataclass(frozen=True)
class Submission:
    """Code that came with the job.

    Attributes:
        address: ``s3://bucket/key`` of a tar archive, or the path of a folder or an archive.
        origin: Who named it, for messages.
    """

    address: str
    origin: str


@dataclass(frozen=True)
class Script:
    """What is to be started.

    Attributes:
        command: Program and first arguments; those of the script follow.
        shown: The same for people: the path of the script, or ``-m`` and its module.
        directory: The folder that relative paths start from, to start it in.
        submitted: The folder of the code that came with the job, if any; the script may still be one of the image.
    """

    command: tuple[str, ...]
    shown: tuple[str, ...]
    directory: Path
    submitted: Path | None = None

    @property
    def source_dir(self) -> Path:
        """The folder whose requirements count."""
        return self.submitted or self.directory

    @property
    def module_dirs(self) -> list[str]:
        """Where Python looks for modules, the code of the job first."""
        return list(dict.fromkeys([str(self.source_dir), str(self.directory)]))


def find_program(script: str | None, job: SageMakerJob, env: Mapping[str, str]) -> Program:
    """Find out which script is to run.

    The job's own ``entry_point=`` (a hyperparameter) comes before the variable, which images set to name the script
    that they bring along. sagemaker-training decides the other way round: there, the image silently wins.

    Args:
        script: The script that the command line names, or None.
        job: The facts.
        env: Environment variables.

    Raises:
        ScriptError: No script is named.
    """
    named = [
        Program(name, origin)
        for name, origin in (
            (script, COMMAND_LINE),
            (unquoted(job.hyperparameters.get("sagemaker_program")), _HYPERPARAMETER),
            (env.get("SAGEMAKER_PROGRAM"), _VARIABLE),
        )
        if name
    ]
    if not named:
        raise ScriptError(
            "No training script is named. Name it on the command line (lightning-sm train app/train.py), in "
            "SAGEMAKER_PROGRAM, or in the hyperparameter sagemaker_program (Estimator(entry_point=...))."
        )
    first, *others = named
    return replace(first, overruled=tuple(other for other in others if other.name != first.name))


def find_submission(job: SageMakerJob, env: Mapping[str, str]) -> Submission | None:
    """Find out whether code came with the job, and from where.

    Args:
        job: The facts.
        env: Environment variables. A folder in ``SAGEMAKER_SUBMIT_DIRECTORY`` is part of the image.
    """
    address = unquoted(job.hyperparameters.get("sagemaker_submit_directory"))
    if address:
        is_code_dir = Path(address) == _CONTAINER_CODE_DIR
        address = str(job.code_dir) if is_code_dir else address
        return Submission(address, "hyperparameter sagemaker_submit_directory")
    address = env.get("SAGEMAKER_SUBMIT_DIRECTORY")
    if address and "://" in address:
        return Submission(address, "SAGEMAKER_SUBMIT_DIRECTORY")
    return None


def find_script(program: Program, job: SageMakerJob, env: Mapping[str, str], submitted: Path | None = None) -> Script:
    """Find the script and how to start it.

    Args:
        program: Which script.
        job: The facts.
        env: Environment variables.
        submitted: The folder of the code that came with the job, if any.

    Raises:
        ScriptError: It is not where it could be, or nothing that can be started.
    """
    folders = _folders(program, job, env, submitted)
    for folder in folders:
        path = folder / program.name
        if path.is_file():
            return Script((*_interpreter(path), str(path)), (str(path),), folder, submitted)
    for folder in folders:
        module = program.name.removesuffix(".py")
        if (folder / "setup.py").is_file() and _MODULE.fullmatch(module):
            return Script((*_PYTHON, "-m", module), ("-m", module), folder, submitted)
    tried = list(dict.fromkeys(str(folder / program.name) for folder in folders))
    raise ScriptError(
        f"The training script {program.name!r} does not exist. It was named by {program.origin}. "
        f"Tried: {', '.join(tried)}."
    )


_PYTHON = (sys.executable, "-u")


def _folders(program: Program, job: SageMakerJob, env: Mapping[str, str], submitted: Path | None) -> Sequence[Path]:
    # A script of the same name in the image is another one: the job's entry point is in the job's code, or nowhere.
    if submitted is not None and program.origin == _HYPERPARAMETER:
        return [submitted]
    folders = [] if submitted is None else [submitted]
    folders.append(Path.cwd())
    stated = env.get("SAGEMAKER_SUBMIT_DIRECTORY")
    if stated and "://" not in stated:
        folders.append(Path(stated).absolute())
    folders.append(job.code_dir.absolute())
    # Where SDK v3 puts the code, in case its driver starts this launcher: SourceCode(command="lightning-sm train ...").
    if (sdk_v3 := (job.base_dir / "input" / "data" / "code").absolute()).is_dir():
        folders.append(sdk_v3)
    return folders


def _interpreter(path: Path) -> tuple[str, ...]:
    """What starts a file: Python, the interpreter of its first line, sh, or nothing for a program.

    The first line is read here, and not by the kernel, as files of an archive or of a mounted folder may lack the right
    to be executed.
    """
    if path.suffix == ".py":
        return _PYTHON
    try:
        with path.open("rb") as file:
            first = file.readline(256)
    except OSError as error:
        raise ScriptError(f"The training script {path} cannot be read: {error.strerror}.") from error
    if first.startswith(b"#!"):
        words = first[2:].decode("utf-8", errors="replace").strip().split(None, 1)  # as the kernel does: one argument
        if words:
            return tuple(words)
    if path.suffix == ".sh":
        return ("/bin/sh",)
    if first.startswith(b"\x7fELF"):
        return ()
    raise ScriptError(
        f"The training script {path} is neither a Python file (*.py) nor a shell script (*.sh, or a first line such as "
        "#!/bin/sh) nor a program."
    )
