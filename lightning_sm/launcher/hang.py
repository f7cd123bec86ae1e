"""The watchdog of a host's training processes: notices that they hang, and saves their stacks."""

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_sm._linux import handles_signal
from lightning_sm._log import command_logger
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
