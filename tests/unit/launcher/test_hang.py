"""When a process counts as hanging, and which stacks are saved."""

import os
import subprocess
import sys
import time

import pytest

from lightning_sm.job.control_folder import Beat, ControlFolder, Phase
from lightning_sm.job.variables import CONTROL_DIR
from lightning_sm.launcher import timeline
from lightning_sm.launcher.hang import Watchdog, described, save_stacks


def _training(pid, at, step=0, phase=Phase.TRAINING, error=""):
    return Beat(pid, at, rank=pid, step=step, phase=phase, error=error)


def test_a_process_hangs_when_it_says_nothing_for_long():
    """Every process that has been silent for the limit is listed; processes that still make steps are not."""
    watchdog = Watchdog(least_s=60)
    assert watchdog.hanging([_training(0, 0.0), _training(1, 0.0)], 59.9) == []
    assert watchdog.hanging([_training(0, 0.0), _training(1, 2.0)], 60.0) == [_training(0, 0.0)]


def test_slow_steps_take_their_time():
    """A process may be silent for twenty times its longest step, however short the limit."""
    watchdog = Watchdog(least_s=10)
    assert watchdog.hanging([_training(0, 0.0)], 1.0) == []
    assert watchdog.hanging([_training(0, 5.0)], 6.0) == []
    assert watchdog.hanging([_training(0, 5.0)], 104.9) == []
    assert watchdog.hanging([_training(0, 5.0)], 105.0) != []


@pytest.mark.parametrize(("phase", "limit_s"), [(Phase.ENDING_EPOCH, 10), (Phase.FIRST_STEP, 20 * 50)])
def test_what_may_pause_is_no_hang(phase, limit_s):
    """The end of an epoch and a first step may take long; only the first step extends the limit for later ones."""
    watchdog = Watchdog(least_s=10)
    paused = _training(0, 0.0, phase=phase)
    assert watchdog.hanging([paused], 50.0) == []
    assert watchdog.hanging([_training(0, 50.0)], 49.0 + limit_s) == []
    assert watchdog.hanging([_training(0, 50.0)], 50.0 + limit_s) != []


@pytest.mark.parametrize(
    ("phase", "hangs"),
    [
        *((phase, True) for phase in (Phase.SETTING_UP_FIT, Phase.STARTING_TRAINING, Phase.FIRST_STEP, Phase.SAVING)),
        *((phase, False) for phase in (Phase.ENDING_EPOCH, Phase.SETTING_UP, Phase.FINISHING, Phase.SERVING)),
    ],
)
def test_a_checkpoint_and_what_comes_before_the_first_step_end_some_day(phase, hangs):
    """Checkpoints and the start of a fit get ten times the limit; work outside a fit has no limit."""
    watchdog = Watchdog(least_s=1200)
    beats = [_training(0, 0.0, phase=phase)]
    assert watchdog.hanging(beats, 11_999.0) == []
    assert watchdog.hanging(beats, 12_000.0) == (beats if hangs else [])


def test_a_process_that_has_failed_must_end():
    """A rank that raised an exception but does not exit hangs, because the other ranks wait for it."""
    watchdog = Watchdog(least_s=600)
    failed = _training(1, 0.0, phase=Phase.FAILED, error="ValueError: no label")
    waiting = _training(0, 0.0)
    assert watchdog.hanging([waiting, failed], 119.0) == []
    assert watchdog.hanging([waiting, failed], 120.0) == [failed]


def test_where_they_stand_in_one_line():
    """One line lists each rank's position in rank order, and how long ago it was reported."""
    beats = [_training(1, 2.0, step=7, phase=Phase.VALIDATING), _training(0, 0.0, step=8)]
    assert described(beats, 62.0) == "rank 0 at step 8, training (62 s ago); rank 1 at step 7, validating (60 s ago)"


def test_the_watchdog_shows_a_hang_at_the_second_look():
    """The watchdog reports the beats of all processes at its second look at a hang; a disabled one never looks."""
    beats = [_training(0, 0.0, step=3), _training(1, 100.0)]
    watchdog, off = Watchdog(60.0), Watchdog(0.0)
    assert [list(watchdog.look(lambda: beats, now)) for now in (59.0, 61.0, 62.0, 63.0)] == [[], [], [], beats]
    assert [off.look(pytest.fail, now) for now in (0.0, 1000.0)] == [(), ()]


def test_one_look_at_a_hang_is_not_enough():
    """Old beats seen once are no hang: a launcher that was suspended with its script sees them when it resumes."""
    watchdog = Watchdog(60.0)
    for now in range(0, 1000, 2):
        beat = _training(now, now - 30.0 if now % 4 else now - 100.0)  # a new process each time: no long interval
        assert not watchdog.look(lambda beat=beat: [beat], float(now))


@pytest.mark.parametrize(("least_s", "check_s"), [(1200.0, 2.0), (8.0, 2.0), (4.0, 1.0)])
def test_the_watchdog_looks_several_times_within_the_limit(least_s, check_s):
    """A hang is noticed at most a quarter of the limit late."""
    looks, watchdog = [], Watchdog(least_s)
    for tenth in range(1, 101):
        watchdog.look(lambda tenth=tenth: looks.append(tenth / 10) or [], tenth / 10)
    assert looks[1] - looks[0] == pytest.approx(check_s)


def test_stacks_are_saved_for_each_process(tmp_path):
    """Each process's stacks are saved; a process that does not handle the signal is left alone and gets no file."""
    script = "import os\nfrom lightning_sm.job.control_folder import announce\nannounce().beat(2)\n"
    script += "def stuck():\n    print('ready', flush=True); os.read(0, 1)\nstuck()"
    (tmp_path / "control").mkdir()
    with ControlFolder(tmp_path / "control") as control:
        env = {**os.environ, CONTROL_DIR.name: str(control.path)}
        child = subprocess.Popen([sys.executable, "-c", script], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        with child:
            assert child.stdout.readline() == b"ready\n"
            (control.path / f"process-{os.getpid()}").touch()
            beats = control.beats()
            (stacks,) = save_stacks(control, beats, tmp_path / "output", 60.0)
            child.communicate(b"x")
        assert stacks == tmp_path / "output" / "stacks-rank2.txt"
        assert " in stuck\n" in stacks.read_text()


def test_a_frozen_process_is_not_waited_for_longer_than_stated(tmp_path):
    """Waiting for a frozen process is limited, as it delays a stop's SIGKILL, after which the launcher must exit."""
    script = "import os, signal\nfrom lightning_sm.job.control_folder import announce\nannounce().beat(2)\n"
    script += "os.write(1, b'ready\\n'); os.kill(os.getpid(), signal.SIGSTOP)"
    (tmp_path / "control").mkdir()
    with ControlFolder(tmp_path / "control") as control:
        env = {**os.environ, CONTROL_DIR.name: str(control.path)}
        child = subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE)
        with child:
            assert child.stdout.readline() == b"ready\n"
            os.waitid(os.P_PID, child.pid, os.WSTOPPED)
            began_at = time.monotonic()
            (stacks,) = save_stacks(control, control.beats(), tmp_path / "output", 0.0)
            assert time.monotonic() - began_at < timeline.STACKS_S
            child.kill()
        assert stacks.read_text() == f"Process {child.pid} did not answer within 0 s.\n"
