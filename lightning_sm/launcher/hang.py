"""The watchdog of a host's training processes: notices that they hang, and saves their stacks."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_sm._linux import handles_signal
from lightning_sm._log import command_logger
from lightning_sm._version import installed_version
from lightning_sm.job.control_folder import STACKS_SIGNAL, Beat, ControlFolder, Phase
from lightning_sm.launcher import timeline

_LOG = command_logger(__name__)

# A step may take much longer than those before: for another batch size, a disk that wakes up, a slow download.
_TIMES_THE_LONGEST = 20.0
# A compilation or a checkpoint takes minutes, rarely an hour; a file server that does not answer takes days. Any phase
# not listed here may be the user's own work, of any length.
_LONG_PHASES = (Phase.SETTING_UP_FIT, Phase.STARTING_TRAINING, Phase.FIRST_STEP, Phase.SAVING)
_TIMES_IN_LONG_PHASES = 10.0
_POLL_S = 0.05
# A line of faulthandler, and the folders in which packages and Python's own library lie.
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$', re.MULTILINE)
_INSTALLED = re.compile(r"/(site-packages|dist-packages|lib/python3\.\d+)/|^<")
# Names in the control folder. torch appends the rank, and to a pipe's name also ".pipe".
_NCCL_PIPE, _NCCL_TRACE = "nccl-rank", "nccl-trace-rank"
# torch's names for the size of the flight recorder and for its files. Since 2.8, the older names cause a warning on
# every rank.
_RECORDER_BEFORE_2_8 = ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_RECORDER = ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE")
_RECORDER_PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"


class HangRule:
    """The rule for whether processes hang. It has no clock and does no I/O.

    A process hangs if it has sent no beat for ``least_s`` and for 20 times the longest interval so far, in a phase that
    may not pause (see ``Phase``). Before the end of the first step, and in a checkpoint, it may take ten times as long.

    Args:
        least_s: The shortest silence that counts as a hang, in seconds.
    """

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._last: dict[int, Beat] = {}
        self._longest_s = 0.0

    def hanging(self, beats: Sequence[Beat], now: float) -> list[Beat]:
        """Return the processes that hang.

        Args:
            beats: The last beats of the running processes.
            now: The time.
        """
        for beat in beats:
            last = self._last.get(beat.pid)
            if last is not None and (not last.phase.may_pause or last.phase is Phase.FIRST_STEP):
                self._longest_s = max(self._longest_s, beat.at - last.at)
            self._last[beat.pid] = beat
        limit_s = max(self._least_s, _TIMES_THE_LONGEST * self._longest_s)
        failed = [
            beat for beat in beats if beat.phase is Phase.FAILED and now - beat.at >= timeline.EXIT_AFTER_EXCEPTION_S
        ]
        return failed or [beat for beat in beats if now - beat.at >= limit_s * _patience(beat)]


def _patience(beat: Beat) -> float:
    if not beat.phase.may_pause:
        return 1.0
    return _TIMES_IN_LONG_PHASES if beat.phase in _LONG_PHASES else math.inf


class Watchdog:
    """A thread that watches the processes of a script. A context manager.

    Args:
        beats: Returns the last beats of the running processes.
        least_s: As in ``HangRule``; 0 turns the watchdog off.
        on_hang: Called once, from the thread, when processes hang, with the last beats of all.
        check_s: Seconds between two checks.
    """

    def __init__(
        self,
        beats: Callable[[], Sequence[Beat]],
        least_s: float,
        on_hang: Callable[[Sequence[Beat]], None],
        check_s: float = 2.0,
    ) -> None:
        self._beats = beats
        self._least_s = least_s
        self._on_hang = on_hang
        self._check_s = min(check_s, least_s / 4) if least_s else check_s
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if self._least_s:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        if self._least_s:
            self._thread.join()

    def _run(self) -> None:
        rule = HangRule(self._least_s)
        # A launcher that was suspended together with its script sees old beats when it resumes: check twice.
        was_hanging = False
        while not self._closing.wait(self._check_s):
            beats = self._beats()
            is_hanging = bool(rule.hanging(beats, time.monotonic()))
            if is_hanging and was_hanging:
                self._on_hang(beats)
                return
            was_hanging = is_hanging


@dataclass(frozen=True)
class SavedStacks:
    """The stacks of a process.

    Attributes:
        pid: The process.
        file: The file with the stacks of all of its threads.
        calls: Where its main thread is, for people; empty if it did not answer.
    """

    pid: int
    file: Path
    calls: str


def described(beats: Sequence[Beat], now: float, stacks: Sequence[SavedStacks] = ()) -> str:
    """Say in one line where processes stand.

    Args:
        beats: Their last beats.
        now: The time.
        stacks: Their stacks: a rank that waits for others is in a call of torch, another one in code of the user.
    """
    calls = {one.pid: f", in {one.calls}" for one in stacks if one.calls}
    stands = [
        f"{'data host' if beat.rank < 0 else f'rank {beat.rank}'} at step {beat.step}, {beat.doing} "
        f"({now - beat.at:.0f} s ago){calls.get(beat.pid, '')}"
        for beat in sorted(beats, key=lambda beat: beat.rank)
    ]
    return "; ".join(stands)


def innermost_calls(text: str) -> str:
    """Return the innermost call of the main thread, and the innermost one outside installed packages.

    Args:
        text: What faulthandler has written: for each thread, the main one last, a headline and its frames, the
            innermost first (CPython, ``Python/traceback.c``).
    """
    main = text.rpartition("(most recent call first):")[2]
    found = _FRAME.finditer(main)
    frames = [(one["file"], f"{one['name']} ({_short(one['file'])}:{one['line']})") for one in found]
    if not frames:
        return ""
    own = next((call for file, call in frames if not _INSTALLED.search(file)), None)
    innermost = frames[0][1]
    return innermost if own in (None, innermost) else f"{innermost} called from {own}"


def _short(file: str) -> str:
    return "/".join(Path(file).parts[-2:]) if _INSTALLED.search(file) else Path(file).name


def save_stacks(control: ControlFolder, beats: Sequence[Beat], folder: Path) -> list[SavedStacks]:
    """Write the stacks of all threads of some processes into files.

    Args:
        control: The folder into which faulthandler writes the stacks.
        beats: The last beats of the processes.
        folder: Where to save the files.

    Returns:
        The stacks of those that know the signal, in files ``stacks-rank<rank>.txt``.
    """
    # Only to processes that handle the signal: it would kill any other.
    asked = [beat.pid for beat in beats if handles_signal(beat.pid, STACKS_SIGNAL) is not False]
    before = {pid: text for pid in asked if (text := control.stacks(pid)) is not None}
    for pid in before:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, STACKS_SIGNAL)
    deadline = time.monotonic() + timeline.STACKS_S
    while time.monotonic() < deadline and any(control.stacks(pid) == text for pid, text in before.items()):
        time.sleep(_POLL_S)  # faulthandler only writes, and announces nothing
    time.sleep(_POLL_S)  # for the rest of a text that has begun
    saved = []
    for beat in [beat for beat in beats if beat.pid in before]:
        name = f"rank{beat.rank}" if beat.rank >= 0 else f"process{beat.pid}"
        path = folder / f"stacks-{name}.txt"
        text = (control.stacks(beat.pid) or "")[len(before[beat.pid]) :]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            nothing = f"Process {beat.pid} did not answer within {timeline.STACKS_S:g} s.\n"
            path.write_text(text or nothing, encoding="utf-8")
        except OSError as error:
            _LOG.warning("cannot write %s: %s", path, error)
        else:
            saved.append(SavedStacks(beat.pid, path, innermost_calls(text)))
    return saved


def nccl_variables(control: ControlFolder, env: Mapping[str, str]) -> dict[str, str]:
    """Return variables that make NCCL's flight recorder keep its last collective calls, and write them on request.

    Args:
        control: The folder for its pipes and files.
        env: The user's variables. If any is the recorder's, whichever torch it is named for, none are returned.

    Source:
        PyTorch 2.6 to 2.14, ``FlightRecorder.hpp``, ``ProcessGroupNCCL.hpp``. It was never run with NCCL.
    """
    if {*_RECORDER_BEFORE_2_8, *_RECORDER, _RECORDER_PIPE} & env.keys():
        return {}
    torch = installed_version("torch") or "0"  # without torch, no rank can use NCCL
    is_old = tuple(int(part) for part in torch.split(".")[:2]) < (2, 8)
    size, file = _RECORDER_BEFORE_2_8 if is_old else _RECORDER
    return {size: "2000", file: str(control.path / _NCCL_TRACE), _RECORDER_PIPE: str(control.path / _NCCL_PIPE)}


def save_nccl_traces(control: ControlFolder, folder: Path) -> list[Path]:
    """Ask the flight recorder of each rank that uses NCCL for its last collective calls, and copy what it writes.

    Args:
        control: The folder with the recorders' pipes, if there are any.
        folder: Where to copy the traces to; torch's ``torchfrtrace`` reads them.

    Returns:
        The files: ``nccl-trace-rank<rank>``.
    """
    expected = []
    for pipe in sorted(control.path.glob(f"{_NCCL_PIPE}*.pipe")):
        try:
            descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # its rank has exited
            continue
        with os.fdopen(descriptor, "wb", buffering=0) as writer:
            writer.write(b"1\n")
        expected.append(control.path / pipe.stem.replace(_NCCL_PIPE, _NCCL_TRACE))
    deadline = time.monotonic() + timeline.STACKS_S
    while time.monotonic() < deadline and not all(trace.exists() for trace in expected):
        time.sleep(_POLL_S)  # NCCL's monitor only writes, like faulthandler
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [Path(shutil.copy(trace, folder / trace.name)) for trace in expected if trace.exists()]
    except OSError as error:
        _LOG.warning("cannot copy the traces of NCCL to %s: %s", folder, error)
        return []
