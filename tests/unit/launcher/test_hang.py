"""When processes count as hanging, and what is saved of them."""

import os
import subprocess
import sys
import threading
import time

import pytest

from lightning_sm.job.control_folder import Beat, ControlFolder, Phase
from lightning_sm.job.variables import CONTROL_DIR
from lightning_sm.launcher.hang import (
    HangRule,
    Watchdog,
    described,
    innermost_calls,
    save_stacks,
)


def _training(pid, at, step=0, phase=Phase.TRAINING, error=""):
    return Beat(pid, at, rank=pid, step=step, phase=phase, error=error)


def test_a_process_hangs_when_it_says_nothing_for_long():
    """All that hang are named, but not those that still make steps."""
    rule = HangRule(least_s=60)
    assert rule.hanging([_training(0, 0.0), _training(1, 0.0)], 59.9) == []
    assert rule.hanging([_training(0, 0.0), _training(1, 2.0)], 60.0) == [_training(0, 0.0)]


def test_slow_steps_take_their_time():
    """Twenty times the longest step so far is no hang, however short the limit."""
    rule = HangRule(least_s=10)
    assert rule.hanging([_training(0, 0.0)], 1.0) == []
    assert rule.hanging([_training(0, 5.0)], 6.0) == []
    assert rule.hanging([_training(0, 5.0)], 104.9) == []
    assert rule.hanging([_training(0, 5.0)], 105.0) != []


@pytest.mark.parametrize(("phase", "limit_s"), [(Phase.ENDING_EPOCH, 10), (Phase.FIRST_STEP, 20 * 50)])
def test_what_may_pause_is_no_hang(phase, limit_s):
    """The end of an epoch or a compilation may take long; only a first step says something about those that follow."""
    rule = HangRule(least_s=10)
    paused = _training(0, 0.0, phase=phase)
    assert rule.hanging([paused], 50.0) == []
    assert rule.hanging([_training(0, 50.0)], 49.0 + limit_s) == []
    assert rule.hanging([_training(0, 50.0)], 50.0 + limit_s) != []


@pytest.mark.parametrize(
    ("phase", "hangs"),
    [
        *((phase, True) for phase in (Phase.SETTING_UP_FIT, Phase.STARTING_TRAINING, Phase.FIRST_STEP, Phase.SAVING)),
        *((phase, False) for phase in (Phase.ENDING_EPOCH, Phase.SETTING_UP, Phase.FINISHING, Phase.SERVING)),
    ],
)
def test_a_checkpoint_and_what_comes_before_the_first_step_end_some_day(phase, hangs):
    """They may take ten times as long as a step; what a script does otherwise takes any time."""
    rule = HangRule(least_s=1200)
    beats = [_training(0, 0.0, phase=phase)]
    assert rule.hanging(beats, 11_999.0) == []
    assert rule.hanging(beats, 12_000.0) == (beats if hangs else [])


def test_a_process_that_has_failed_must_end():
    """A rank that raised an exception, but whose process does not end, hangs the others."""
    rule = HangRule(least_s=600)
    failed = _training(1, 0.0, phase=Phase.FAILED, error="ValueError: no label")
    waiting = _training(0, 0.0)
    assert rule.hanging([waiting, failed], 119.0) == []
    assert rule.hanging([waiting, failed], 120.0) == [failed]


def test_where_they_stand_in_one_line():
    """Ranks in their order, then how long they have said nothing."""
    beats = [_training(1, 2.0, step=7, phase=Phase.VALIDATING), _training(0, 0.0, step=8)]
    assert described(beats, 62.0) == "rank 0 at step 8, training (62 s ago); rank 1 at step 7, validating (60 s ago)"


def test_the_watchdog_calls_once():
    """After two looks at the same hang; nothing is called where it is off."""
    said = []
    known = threading.Event()

    def note(beats):
        said.append(beats)
        known.set()

    beats = [_training(0, 0.0, step=3)]
    with Watchdog(lambda: beats, 0.2, note, check_s=0.01):
        assert known.wait(10)
    with Watchdog(lambda: [_training(0, 0.0)], 0.0, said.append, check_s=0.01):
        pass
    assert said == [beats]


def test_one_look_at_a_hang_is_not_enough():
    """A launcher that was suspended together with its script sees old beats when it resumes, and then new ones."""
    said, looks = [], []
    looked = threading.Event()

    def beats():
        looks.append(len(looks))
        if len(looks) > 6:
            looked.set()
        return [_training(len(looks), time.monotonic() if len(looks) % 2 == 0 else -1000.0)]

    with Watchdog(beats, 60.0, said.append, check_s=0.01):
        assert looked.wait(10)
    assert said == []


@pytest.mark.parametrize(("least_s", "check_s"), [(1200.0, 2.0), (8.0, 2.0), (4.0, 1.0), (0.0, 2.0)])
def test_the_watchdog_looks_several_times_within_the_limit(least_s, check_s):
    """A hang is noticed a quarter of the limit too late at most."""
    assert Watchdog(list, least_s, print)._check_s == check_s


def test_stacks_are_saved_for_each_process(tmp_path):
    """A process that does not know the signal is spared, and has no file."""
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
            (stacks,) = save_stacks(control, beats, tmp_path / "output")
            child.communicate(b"x")
        assert stacks.file == tmp_path / "output" / "stacks-rank2.txt"
        assert " in stuck\n" in stacks.file.read_text()
        assert stacks.calls == "stuck (<string>:5)"
        assert described([beat for beat in beats if beat.rank == 2], 0.0, [stacks]).endswith(
            " ago), in stuck (<string>:5)"
        )


_WAITS = """Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/opt/ml/code/log.py", line 3 in run

Current thread 0x00007f00 (most recent call first):
  File "/opt/conda/lib/python3.11/site-packages/torch/autograd/graph.py", line 865 in _engine_run_backward
  File "/opt/conda/lib/python3.11/site-packages/torch/_tensor.py", line 648 in backward
  File "/opt/ml/code/my model.py", line 12 in training_step
  File "/opt/ml/code/train.py", line 40 in <module>
"""


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (_WAITS, "_engine_run_backward (autograd/graph.py:865) called from training_step (my model.py:12)"),
        (_WAITS.partition("\n\n")[0], "wait (python3.11/threading.py:331) called from run (log.py:3)"),
        ("Current thread 0x1 (most recent call first):\n  <no Python frame>\n", ""),
        ("", ""),
    ],
)
def test_the_call_in_which_a_rank_waits_and_where_it_comes_from(text, calls):
    """That of the main thread, and the first one of the user's code around it."""
    assert innermost_calls(text) == calls
