"""What a host does before its script starts: fetch the code of the job, find the script, install what it asks for."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from lightning_sm.errors import ScriptError
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.variables import INSTALL_REQUIREMENTS, PREPARE_S
from lightning_sm.launcher.child_process import ChildProcess
from lightning_sm.launcher.failure import failure_reason
from lightning_sm.launcher.user_code import requirements
from lightning_sm.launcher.user_code.script import Script, Submission

_LOG = logging.getLogger(__name__)


class Stopped(Exception):  # noqa: N818 - no error: the job ends before the script was started
    """The host was told to end before its script was started; the message says by what, and what it was doing.

    Args:
        message: The reason, for people.
        exit_code: 128 + n for the signal n by which it was stopped.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Steps:
    """The steps before the script, each in a process that ends when the host is told to.

    Args:
        child: What runs them.
        env: Environment variables.

    Raises:
        JobConfigError: ``LIGHTNING_SM_PREPARE_S`` or ``LIGHTNING_SM_INSTALL_REQUIREMENTS`` is wrong.
    """

    def __init__(self, child: ChildProcess, env: Mapping[str, str]) -> None:
        self._child = child
        self._env = env
        self._limit_s = PREPARE_S.read(env)
        INSTALL_REQUIREMENTS.read(env)  # what is wrong is said before anything is fetched

    def fetch(self, submission: Submission, job: SageMakerJob) -> Path:
        """Bring the code of the job here.

        Args:
            submission: Where it is.
            job: The facts.

        Returns:
            The folder with the code: its own, if it is one already; ``/opt/ml/code`` if that is empty; else a new one,
            as what is there belongs to the image, or to the last job of a container that is used again.

        Raises:
            ScriptError: It cannot be fetched or unpacked.
            Stopped: The host was told to end.
        """
        if (folder := unpacked(submission)) is not None:
            return folder
        address, origin = submission.address, submission.origin
        folder = _empty_folder(job)
        _LOG.info("lightning-sm: the code of the job, %s (%s), is unpacked into %s.", address, origin, folder)
        command = [sys.executable, "-m", "lightning_sm.launcher.user_code.archive", address, str(folder)]
        exit_code = self._run(command, f"fetching {address}")
        if exit_code:
            raise ScriptError(failure_reason(self._child.stderr_tail, exit_code).removeprefix("error: "))
        return folder

    def install(self, script: Script) -> None:
        """Install what the code of the script asks for.

        Args:
            script: The script.

        Raises:
            ScriptError: pip failed; the message has its reason.
            Stopped: The host was told to end.
        """
        arguments = requirements.wanted(script, self._env)
        if not arguments:
            return
        is_protected = requirements.is_protected(self._env)
        _LOG.info("lightning-sm: pip install %s in %s", " ".join(arguments), script.source_dir)
        with _scratch_folder() as scratch:
            file = scratch / "constraints.txt"
            file.write_text("\n".join(requirements.constraints()) + "\n", encoding="utf-8")
            command = requirements.command(arguments, script.source_dir, file if is_protected else None)
            exit_code = self._run(command, f"installing the requirements of {script.source_dir}")
        if exit_code:
            output = self._child.stderr_tail
            raise ScriptError(requirements.failure(output, exit_code, script.source_dir, protected=is_protected))

    def check_not_stopped(self, doing: str) -> None:
        """Make sure that the host goes on.

        Args:
            doing: What it is about to do.

        Raises:
            Stopped: It was told to end.
        """
        if self._child.is_over:
            signum = signal.Signals(self._child.stopped_by or signal.SIGTERM)
            how = f"stopped or interrupted ({signum.name})" if self._child.stopped_by else "over"
            raise Stopped(f"The job was {how}. This host was {doing}.", 128 + signum)

    def _run(self, command: Sequence[str], doing: str) -> int:
        self.check_not_stopped(doing)
        is_late = threading.Event()
        timer = threading.Timer(self._limit_s, _in_turn(is_late.set, self._child.end))
        timer.daemon = True
        timer.start()
        try:
            # In a folder without modules of anybody: Python looks for its own there first.
            exit_code = self._child.run(command, Path("/"), self._env)
        finally:
            timer.cancel()
        if is_late.is_set():
            raise ScriptError(
                f"After {self._limit_s:g} s ({PREPARE_S.name}), {doing} had not ended. Look for its last lines in "
                "the log, and for a way to what it waits for from the job's network."
            )
        self.check_not_stopped(doing)
        return exit_code


def unpacked(submission: Submission) -> Path | None:
    """The folder of the code that came with the job, if it is one already; None if it must be fetched or unpacked.

    Args:
        submission: Where it is.

    Raises:
        ScriptError: There is nothing.
    """
    address = submission.address
    if "://" in address or Path(address).is_file():
        return None
    if Path(address).is_dir():
        return Path(address).absolute()
    raise ScriptError(
        f"{submission.origin} says that the code is at {address!r}, where there is neither folder nor file."
    )


def _in_turn(*actions: Callable[[], None]) -> Callable[[], None]:
    def act() -> None:
        for action in actions:
            action()

    return act


@contextmanager
def _scratch_folder() -> Iterator[Path]:
    try:
        with tempfile.TemporaryDirectory(prefix="lightning-sm-") as folder:
            yield Path(folder)
    except OSError as error:
        raise ScriptError(f"Temporary files cannot be written to {tempfile.gettempdir()}: {error}.") from error


def _empty_folder(job: SageMakerJob) -> Path:
    folder = job.code_dir.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not any(folder.iterdir()) and os.access(folder, os.W_OK):
            return folder
    except OSError as error:
        _LOG.info("lightning-sm: %s cannot be used (%s).", folder, error)
    try:
        return Path(tempfile.mkdtemp(prefix="lightning-sm-code-"))
    except OSError as error:
        raise ScriptError(f"There is no folder to unpack the code of the job into: {error}.") from error
