"""The watchdog for a host's training processes, which detects hangs and saves stacks."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_sm._linux import handles_signal
from lightning_sm._log import command_logger
from lightning_sm.job.control_folder import STACKS_SIGNAL, Beat, ControlFolder, Phase
from lightning_sm.launcher import timeline

_LOG = command_logger(__name__)

# A step may take much longer than earlier ones, for example because of a larger batch or a slow download.
_TIMES_THE_LONGEST = 20.0
# Compiling or saving a checkpoint takes minutes, rarely an hour; an unresponsive file server can block for days. Phases
# not listed here may run user code, which can take any time.
_LONG_PHASES = (Phase.SETTING_UP_FIT, Phase.STARTING_TRAINING, Phase.FIRST_STEP, Phase.SAVING)
_TIMES_IN_LONG_PHASES = 10.0
_POLL_S = 0.05
# Time between checks.
_CHECK_S = 2.0


class Watchdog:
    """A detector of hanging processes, without a clock or I/O.

    A process counts as hanging if, in a phase that may not pause (see ``Phase``), it has sent no beat for at least
    ``least_s`` and at least 20 times the longest interval so far. Until the first step ends, and while a checkpoint is
    saved, both limits are 10 times as long.

    Args:
        least_s: The shortest silence that counts as a hang, in seconds; 0 turns the watchdog off.
    """

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._last: dict[int, Beat] = {}
        self._longest_s = 0.0
        self._check_s = min(_CHECK_S, least_s / 4) if least_s else math.inf
        self._due_at = 0.0
        self._was_hanging = False

    def look(self, beats: Callable[[], Sequence[Beat]], now: float) -> Sequence[Beat]:
        """Return the last beat of each process if any of them hangs; otherwise, or if no check is due, return nothing.

        Args:
            beats: Returns the last beat of each running process.
            now: The current time in seconds, from ``time.monotonic()``.
        """
        if now < self._due_at or math.isinf(self._check_s):
            return ()
        self._due_at = now + self._check_s
        seen = beats()
        # A launcher that was suspended together with its script sees old beats when it resumes. Report a hang only if
        # two checks in a row find one.
        was_hanging, self._was_hanging = self._was_hanging, bool(self.hanging(seen, now))
        return seen if was_hanging and self._was_hanging else ()

    def hanging(self, beats: Sequence[Beat], now: float) -> list[Beat]:
        """Return the last beats of the processes that hang.

        Args:
            beats: The last beat of each running process.
            now: The current time in seconds, from ``time.monotonic()``.
        """
        for beat in beats:
            last = self._last.get(beat.pid)
            if last is not None and (not last.phase.may_pause or last.phase is Phase.FIRST_STEP):
                self._longest_s = max(self._longest_s, beat.at - last.at)
            self._last[beat.pid] = beat
        limit_s = max(self._least_s, _TIMES_THE_LONGEST * self._longest_s)
        failing = (beat for beat in beats if beat.phase is Phase.FAILED)
        failed = [beat for beat in failing if now - beat.at >= timeline.EXIT_AFTER_EXCEPTION_S]
        return failed or [beat for beat in beats if now - beat.at >= limit_s * _patience(beat)]


def _patience(beat: Beat) -> float:
    if not beat.phase.may_pause:
        return 1.0
    return _TIMES_IN_LONG_PHASES if beat.phase in _LONG_PHASES else math.inf


def described(beats: Sequence[Beat], now: float) -> str:
    """Return one line that describes the progress of each process.

    Args:
        beats: The last beat of each process.
        now: The current time in seconds, from ``time.monotonic()``.
    """
    positions = [
        f"{'data host' if beat.rank < 0 else f'rank {beat.rank}'} at step {beat.step}, {beat.doing} "
        f"({now - beat.at:.0f} s ago)"
        for beat in sorted(beats, key=lambda beat: beat.rank)
    ]
    return "; ".join(positions)


def save_stacks(control: ControlFolder, beats: Sequence[Beat], folder: Path, limit_s: float) -> list[Path]:
    """Save the stacks of all threads of the given processes to files.

    Args:
        control: The folder into which faulthandler writes the stacks.
        beats: The last beat of each process.
        folder: Where to save the files.
        limit_s: How long the processes may take, in seconds.

    Returns:
        The files, ``stacks-rank<rank>.txt`` or ``stacks-process<pid>.txt``; none for processes that cannot write them.
    """
    # Signal only processes that handle the signal; it would kill any other process.
    asked = [beat.pid for beat in beats if handles_signal(beat.pid, STACKS_SIGNAL) is not False]
    before = {pid: text for pid in asked if (text := control.stacks(pid)) is not None}
    for pid in before:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, STACKS_SIGNAL)
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and any(control.stacks(pid) == text for pid, text in before.items()):
        time.sleep(_POLL_S)  # poll: faulthandler does not announce that it has finished
    time.sleep(_POLL_S)  # let a process finish writing
    saved = []
    for beat in [beat for beat in beats if beat.pid in before]:
        name = f"rank{beat.rank}" if beat.rank >= 0 else f"process{beat.pid}"
        path = folder / f"stacks-{name}.txt"
        text = (control.stacks(beat.pid) or "")[len(before[beat.pid]) :]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            nothing = f"Process {beat.pid} did not answer within {limit_s:.3g} s.\n"
            path.write_text(text or nothing, encoding="utf-8")
        except OSError as error:
            _LOG.warning("cannot write %s: %s", path, error)
        else:
            saved.append(path)
    return saved
