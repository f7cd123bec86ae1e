"""The control folder: what processes write and what their launcher reads."""

import faulthandler
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from lightning_sm.job.control_folder import STACKS_SIGNAL, Beat, ControlFolder, Phase, announce
from lightning_sm.job.variables import CONTROL_DIR


@pytest.fixture
def control(tmp_path):
    """Create the control folder as the launcher does."""
    with ControlFolder(tmp_path / "control") as folder:
        folder.path.mkdir()
        yield folder


@pytest.fixture
def announced(control):
    """Return a function that announces this process, and unregister its signal handler afterwards."""
    yield lambda: announce({CONTROL_DIR.name: str(control.path)})
    # If another handler replaced it, faulthandler would still consider its handler installed, even in forks.
    faulthandler.unregister(STACKS_SIGNAL)


def test_a_process_says_where_it_stands(control, announced):
    """The last beat replaces earlier ones, whatever its length. A process is announced only once."""
    process = announced()
    assert announced() is process
    (first,) = control.beats()
    assert first == Beat(os.getpid(), first.at)
    process.beat(3, 1200, 7, Phase.FAILED, "ValueError: " + "\u00e4" * 200)
    (failed,) = control.beats()
    assert failed.phase is Phase.FAILED
    assert failed.doing.startswith("failed with ValueError: \u00e4\u00e4")
    process.beat(3, 1201, 7, Phase.TRAINING, trained_epoch=8)
    (last,) = control.beats()
    assert last == Beat(os.getpid(), last.at, rank=3, step=1201, epoch=7, phase=Phase.TRAINING, trained_epoch=8)
    assert first.at <= last.at


def test_without_a_launcher_nothing_is_announced(tmp_path):
    """A process is not announced if no folder is set, or if the folder was deleted with its launcher."""
    assert announce({}) is None
    assert announce({CONTROL_DIR.name: str(tmp_path / "gone")}) is None


def test_a_file_made_by_hand_announces_a_process(control):
    """Scripts without lightning_sm announce themselves with an empty file; other files are ignored."""
    (control.path / "process-17").touch()
    (control.path / "process-18").write_text("1.0 0 0 0 reading")
    (control.path / "process-x").touch()
    (beat,) = control.beats()
    assert (beat.pid, beat.phase) == (17, Phase.STARTING)
    assert control.stacks(17) is None


def test_the_folder_may_be_removed_while_it_is_read(tmp_path):
    """The emulator reads beats until a host has exited, and its launcher removes the folder before that."""
    folder, is_read = tmp_path / "control", threading.Event()

    def make_and_remove():
        while not is_read.is_set():
            folder.mkdir()
            folder.rmdir()

    with ThreadPoolExecutor(1) as pool:
        removed = pool.submit(make_and_remove)
        try:
            assert [ControlFolder(folder).beats() for _ in range(3000)] == 3000 * [[]]
        finally:
            is_read.set()
        removed.result()


def test_saved_files_and_lost_peers(control, announced):
    """A host that was interrupted without saving files differs from one that was not interrupted."""
    process = announced()
    assert (control.saved(), process.are_peers_gone()) == (None, False)
    process.note_saved([])
    assert control.saved() == []
    process.note_saved([control.path / "a\nb.ckpt"])
    control.say_peers_gone()
    assert (control.saved(), process.are_peers_gone()) == ([control.path / "a\nb.ckpt"], True)
    control.clear()
    assert (control.saved(), control.beats(), process.are_peers_gone()) == (None, [], False)


def ask_for_stacks(control, script, function):
    """Request a process's stacks until they show the function it blocks in; let it exit, and return the stacks."""
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"{script}def {function}():\n    import sys\n    sys.stdin.buffer.raw.read()\n{function}()",
        ],
        env={**os.environ, CONTROL_DIR.name: str(control.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with child:
        assert child.stdout.readline() == b"ready\n"
        assert control.stacks(child.pid) == ""
        deadline = time.monotonic() + 30
        # The process may print "ready" before it blocks.
        while f" in {function}\n" not in control.stacks(child.pid) and time.monotonic() < deadline:
            child.send_signal(STACKS_SIGNAL)
        child.communicate()
        stacks = control.stacks(child.pid)
    assert child.returncode == 0
    return stacks


def test_stacks_are_written_on_request(control):
    """The signal dumps the stacks of all threads, even if the main thread is blocked in C."""
    script = "from lightning_sm.job.control_folder import announce\nannounce()\nprint('ready', flush=True)\n"
    assert " in blocking\n" in ask_for_stacks(control, script, "blocking")


@pytest.mark.parametrize("again", ["", "announce()\n"])
def test_a_trainer_that_ends_takes_no_stacks_away(control, again):
    """Stacks are still written after Lightning has restored Python's signal handlers at the end of a Trainer run."""
    script = (
        "from lightning_sm.job.control_folder import announce\nannounce()\n"
        "from pytorch_lightning.trainer.connectors.signal_connector import _SignalConnector\n"
        "for number, handler in _SignalConnector._get_current_signal_handlers().items():\n"
        "    if handler is not None:\n        _SignalConnector._register_signal(number, handler)\n"
        f"{again}print('ready', flush=True)\n"
    )
    assert " in waiting\n" in ask_for_stacks(control, script, "waiting")
