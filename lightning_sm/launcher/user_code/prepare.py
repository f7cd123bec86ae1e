"""The preparation of a host before its script starts: fetching the job's code and installing its requirements."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_sm._log import command_logger
from lightning_sm.errors import ScriptError
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.variables import INSTALL_REQUIREMENTS, PREPARE_S, Install
from lightning_sm.launcher.child_process import ChildProcess
from lightning_sm.launcher.failure import failure_reason, not_started_reason
from lightning_sm.launcher.user_code import requirements
from lightning_sm.launcher.user_code.script import Script, Submission

_LOG = command_logger(__name__)

# Exit code of ``archive`` when the last line of its stderr gives the reason for the failure.
_SAYS_WHY_EXIT_CODE = 2


class Stopped(Exception):  # noqa: N818 - not an error
    """The host was told to stop before its script started; the message gives the cause and the current step."""


class Preparation:
    """The steps before the script starts, each in a process that is terminated when the host is told to stop.

    Args:
        child: The runner of these processes.
        env: Environment variables.

    Raises:
        JobConfigError: ``LIGHTNING_SM_PREPARE_S`` or ``LIGHTNING_SM_INSTALL_REQUIREMENTS`` is invalid.
    """

    def __init__(self, child: ChildProcess, env: Mapping[str, str]) -> None:
        self._child = child
        self._env = env
        self._limit_s = PREPARE_S.read(env)
        self._is_protected = INSTALL_REQUIREMENTS.read(env) is not Install.UNPROTECTED

    def fetch(self, submission: Submission, job: SageMakerJob) -> Path:
        """Fetch and unpack the job's code.

        Returns:
            The folder with the code: the submitted folder or, for an archive, ``/opt/ml/code`` if that is empty. If it
            already holds code from the image or from an earlier job, the archive is unpacked into a new folder.

        Raises:
            ScriptError: The code cannot be fetched or unpacked.
            Stopped: The host was told to stop.
        """
        folder = unpacked(submission)
        if folder is not None:
            return folder
        address = submission.address
        folder = _empty_folder(job)
        _LOG.info("unpacking the job's code, %s (%s), into %s.", address, submission.origin, folder)
        command = [sys.executable, "-m", "lightning_sm.launcher.user_code.archive", address, str(folder)]
        # Start Python in a folder without modules: it imports from its working directory first.
        exit_code = self._run(command, f"fetching {address}", Path("/"))
        if exit_code:
            said = self._child.stderr_tail
            says_why = exit_code == _SAYS_WHY_EXIT_CODE and said
            raise ScriptError(said.splitlines()[-1] if says_why else failure_reason(said, exit_code).text)
        return folder

    def install(self, script: Script) -> None:
        """Install the requirements of the script's code.

        Raises:
            ScriptError: pip failed; the message gives the reason.
            Stopped: The host was told to stop.
        """
        if not requirements.is_wanted(script, self._env):
            return
        _LOG.info("pip install -r requirements.txt in %s", script.source_dir)
        with tempfile.TemporaryDirectory(prefix="lightning-sm-") as scratch:
            file = Path(scratch) / "constraints.txt"
            file.write_text("\n".join(requirements.constraints()) + "\n", encoding="utf-8")
            command = requirements.command(file if self._is_protected else None)
            exit_code = self._run(command, f"installing the requirements of {script.source_dir}", script.source_dir)
        if exit_code:
            output, folder = self._child.stderr_tail, script.source_dir
            raise ScriptError(requirements.failure(output, exit_code, folder, is_protected=self._is_protected))

    def check_not_stopped(self, doing: str) -> None:
        """Raise if this host was told to stop.

        Args:
            doing: What the host is doing, such as "starting the script".

        Raises:
            Stopped: The host was told to stop.
        """
        if self._child.must_exit:
            raise Stopped(not_started_reason(self._child.stopped_by, doing))

    def _run(self, command: Sequence[str], doing: str, directory: Path) -> int:
        self.check_not_stopped(doing)
        exit_code = self._child.run(command, directory, self._env, limit_s=self._limit_s)
        if self._child.was_late:
            raise ScriptError(
                f"Timeout: {doing} took longer than {self._limit_s:g} s ({PREPARE_S.name}). Look at its last lines in "
                "the log, and check that the job's network can reach what it was waiting for."
            )
        self.check_not_stopped(doing)
        return exit_code


def unpacked(submission: Submission) -> Path | None:
    """Return the folder of the job's code; None if the code must be fetched or unpacked first.

    Raises:
        ScriptError: The address names neither a folder nor a file.
    """
    address = submission.address
    if "://" in address or Path(address).is_file():
        return None
    if Path(address).is_dir():
        return Path(address).absolute()
    raise ScriptError(f"{submission.origin} says that the code is at {address!r}, but nothing is there.")


def _empty_folder(job: SageMakerJob) -> Path:
    folder = job.code_dir.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    is_empty = not any(folder.iterdir()) and os.access(folder, os.W_OK)
    return folder if is_empty else Path(tempfile.mkdtemp(prefix="lightning-sm-code-"))
