"""The control folder, through which a script's processes report their progress to the launcher.

The launcher sets its path in ``LIGHTNING_SM_CONTROL_DIR``. Each training process, and the main process on each data
host, creates a file there. If the file exists, the launcher sends the process the gentle signal when the job is
stopped; the file's content is the process's progress. Without the launcher (under the stock toolkit, or on a laptop),
there is no folder and nothing is written.

Files in the folder: ``process-<pid>`` (one line, see ``Beat``), ``stacks-<pid>`` (written by faulthandler on request),
``saved.jsonl`` (the checkpoint files saved during an interruption), ``failure-<pid>.json`` (see
``job/failure_file.py``), ``options-read`` (a process has read the options that its command line lacks) and
``peers-gone`` (another host, or another rank on this host, has failed).
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from glob import glob
from pathlib import Path
from types import FrameType

from lightning_sm.job.failure_file import PREFIX as FAILURE
from lightning_sm.job.failure_file import SUFFIX as FAILURE_SUFFIX
from lightning_sm.job.variables import CONTROL_DIR

# Asks a training script to save a checkpoint and exit. On SIGTERM, Lightning would instead make a collective call that
# deadlocks unless all ranks get the signal at the same moment (Lightning issue 20806).
GENTLE_SIGNAL = signal.SIGUSR2
# Asks a process for the stacks of its threads. faulthandler handles it in C, even while Python code cannot run. It is a
# real-time signal, because no library uses those; macOS has none.
STACKS_SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGUSR1 - 2) + 2
_PROCESS = "process-"
_STACKS = "stacks-"
_SAVED = "saved.jsonl"
_PEERS_GONE = "peers-gone"
_OPTIONS_READ = "options-read"
# Lines are padded to this length, so that each write replaces the whole previous line.
_LINE_BYTES = 120


class Phase(Enum):
    """The phase of a process; the values appear in messages."""

    STARTING = "starting"
    SETTING_UP = "setting up"
    SETTING_UP_FIT = "setting up to fit"  # the user's ``setup``, and loading a checkpoint
    STARTING_TRAINING = "starting the training"
    FIRST_STEP = "in the first step"  # may include compilation
    TRAINING = "training"
    WAITING_FOR_BATCH = "waiting for a batch"
    ENDING_EPOCH = "ending the epoch"
    STARTING_VALIDATION = "starting the validation"
    VALIDATING = "validating"
    ENDING_VALIDATION = "ending the validation"
    SAVING = "saving a checkpoint"
    FINISHING = "finishing"  # after the fit
    FAILED = "failed"
    SERVING = "serving data"  # a data host

    @property
    def may_pause(self) -> bool:
        """Whether the phase may take longer than any step: it may compile, save a checkpoint or run the user's code."""
        return self not in (Phase.TRAINING, Phase.WAITING_FOR_BATCH, Phase.VALIDATING)


@dataclass(frozen=True)
class Beat:
    """The last progress report of a process.

    Attributes:
        pid: Process id.
        at: Time of the report in seconds, from ``time.monotonic``, which all processes on a host share.
        rank: Global rank; -1 before it is known, and for data hosts.
        step: Number of completed optimizer steps.
        epoch: The current epoch, counted from 0.
        phase: The phase of the process.
        error: The exception with which the process failed; empty if it has not failed.
        trained_epoch: The epoch of the last completed training batch, counted from 1; 0 before the first batch.
    """

    pid: int
    at: float
    rank: int = -1
    step: int = 0
    epoch: int = 0
    phase: Phase = Phase.STARTING
    error: str = ""
    trained_epoch: int = 0

    @property
    def doing(self) -> str:
        """The process's phase and error, for messages."""
        return f"{self.phase.value} with {self.error}" if self.error else self.phase.value


class OwnProcess:
    """This process's side of the control folder.

    Args:
        folder: The control folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pid = os.getpid()
        self._file = os.open(folder / f"{_PROCESS}{self._pid}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        # faulthandler writes to the descriptor for as long as the process lives.
        self._stacks = os.open(folder / f"{_STACKS}{self._pid}", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
        self.beat()

    def handle_stacks_signal(self) -> None:
        """Install handlers that write stacks on ``STACKS_SIGNAL``; call this again if others have replaced them."""
        # Also install a Python handler: at the end of each Trainer call, Lightning restores the Python handlers of all
        # signals. Without one, this would remove faulthandler's handler, and the signal would kill the process.
        if threading.current_thread() is threading.main_thread():
            signal.signal(STACKS_SIGNAL, self._write_stacks)
        write_stacks_on_signal(self._stacks)

    def _write_stacks(self, _signum: int, _frame: FrameType | None) -> None:
        faulthandler.dump_traceback(self._stacks, all_threads=True)
        self.handle_stacks_signal()

    def beat(
        self,
        rank: int = -1,
        step: int = 0,
        epoch: int = 0,
        phase: Phase = Phase.STARTING,
        error: str = "",
        *,
        trained_epoch: int = 0,
    ) -> None:
        """Report the progress of this process; see ``Beat``."""
        line = f"{time.monotonic():.3f} {rank} {step} {epoch} {trained_epoch} {phase.name} {error}"
        os.pwrite(self._file, line.encode(errors="replace")[:_LINE_BYTES].ljust(_LINE_BYTES), 0)

    def note_saved(self, paths: Sequence[Path]) -> None:
        """Tell the launcher that an interruption makes the ranks exit, and which files they saved on this host.

        Args:
            paths: Files of the checkpoint; empty if another host has them, or if there was nothing to save.
        """
        with (self._folder / _SAVED).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(str(path)) + "\n" for path in paths)

    def are_peers_gone(self) -> bool:
        """Return whether another host, or another rank on this host, has failed, so collective calls would hang."""
        return (self._folder / _PEERS_GONE).exists()


def write_stacks_on_signal(file: int) -> None:
    """Have faulthandler write the stacks of all threads of this process on ``STACKS_SIGNAL``.

    Args:
        file: The descriptor to write to, which must stay open for as long as the process lives.
    """
    # Unregister first: faulthandler does not notice that another handler has replaced its own.
    faulthandler.unregister(STACKS_SIGNAL)
    faulthandler.register(STACKS_SIGNAL, file, all_threads=True)


def announce(env: Mapping[str, str] = os.environ) -> OwnProcess | None:
    """Tell the launcher that this process handles the gentle signal.

    Args:
        env: Environment variables.

    Returns:
        This process's side of the folder, the same object in every call; None without a launcher.
    """
    folder = CONTROL_DIR.read(env)
    # The folder is gone if this process has outlived its launcher.
    if folder is None or not folder.is_dir():
        return None
    process = _announced(os.getpid(), folder)
    process.handle_stacks_signal()
    return process


def note_options_read(env: Mapping[str, str] = os.environ) -> None:
    """Tell the launcher that this process has read the options that its command line lacks."""
    folder = CONTROL_DIR.read(env)
    if folder is not None and folder.is_dir():
        (folder / _OPTIONS_READ).touch()


@cache
def _announced(_pid: int, folder: Path) -> OwnProcess:
    return OwnProcess(folder)


class ControlFolder:
    """The launcher's side of the folder; a context manager that removes the folder on exit.

    Args:
        path: The folder, which must exist.

    Attributes:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> ControlFolder:
        return self

    def __exit__(self, *_: object) -> None:
        # Ignore errors: a process that has left its process group may still write into the folder.
        shutil.rmtree(self.path, ignore_errors=True)

    def clear(self) -> None:
        """Delete the files of an earlier script's processes."""
        for path in self.path.iterdir():
            path.unlink()

    def beats(self) -> list[Beat]:
        """Return the beats of all processes that have announced themselves, even if they have exited."""
        beats = []
        # Path.glob would raise an error if the launcher, as it exits, removes the folder in the meantime.
        for name in sorted(glob(f"{_PROCESS}*", root_dir=self.path)):
            # Skip files that another program created to get the gentle signal, incomplete files, and files that
            # ``clear`` has just removed because the script is restarting.
            with contextlib.suppress(ValueError, KeyError, FileNotFoundError):
                line = (self.path / name).read_text(encoding="utf-8", errors="replace")
                beats.append(_parsed(int(name.removeprefix(_PROCESS)), line))
        return beats

    def pids(self) -> set[int]:
        """Return the ids of the processes that have announced themselves or report their failures."""
        paths = [*self.path.glob(f"{_PROCESS}*"), *self.path.glob(f"{FAILURE}*{FAILURE_SUFFIX}")]
        texts = (path.stem.rpartition("-")[2] for path in paths)
        return {int(text) for text in texts if text.isdecimal()}

    def say_peers_gone(self) -> None:
        """Tell this host's processes that another host, or another rank on this host, has failed."""
        (self.path / _PEERS_GONE).touch()

    def saved(self) -> list[Path] | None:
        """Return the files that this host saved during an interruption, or None if its ranks were not interrupted."""
        try:
            lines = (self.path / _SAVED).read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return None
        return [Path(json.loads(line)) for line in lines]

    def are_options_read(self) -> bool:
        """Return whether a process has read the options that its command line lacks."""
        return (self.path / _OPTIONS_READ).exists()

    def stacks(self, pid: int) -> str | None:
        """Return the stacks that a process has written so far, or None if it does not handle ``STACKS_SIGNAL``."""
        try:
            return (self.path / f"{_STACKS}{pid}").read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return None


def _parsed(pid: int, line: str) -> Beat:
    if not line.strip():
        return Beat(pid, time.monotonic())
    at, rank, step, epoch, trained_epoch, phase, *error = line.split(maxsplit=6)
    return Beat(
        pid, float(at), int(rank), int(step), int(epoch), Phase[phase], "".join(error).strip(), int(trained_epoch)
    )
