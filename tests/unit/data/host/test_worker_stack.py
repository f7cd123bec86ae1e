"""The stack of a process that hangs, from outside of it."""

import os
import signal
import sys
import threading

import pytest

from lightning_sm.data.host import worker
from lightning_sm.data.host.worker_notes import WorkerNotes
from lightning_sm.data.host.worker_stack import innermost_call, without_our_start
from lightning_sm.data.ipc.processes import fork
from lightning_sm.job.control_folder import STACKS_SIGNAL
from tests.integration.emulators import until

TIMEOUT_S = 60.0


def wait_for_ever(lock, started):
    """Say that it has started, and wait in native code."""
    os.write(started, b".")
    lock.acquire()


@pytest.fixture
def stack():
    """The notes of a worker, with memory for its stacks."""
    made = WorkerNotes()
    yield made
    made.close()


@pytest.fixture
def hanging(stack):
    """A fork that waits for a lock whose thread exists in its parent only."""
    lock = threading.Lock()
    lock.acquire()
    readable, writable = os.pipe()

    def run():
        stack.write_stacks_on_signal()
        wait_for_ever(lock, writable)

    pid = fork(run)
    os.read(readable, 1)
    os.close(readable)
    os.close(writable)
    yield pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def taken(stack):
    """What a process has written, with the outermost frame, which it shares with its parent, or the mark of more."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    text = ""

    def is_complete():
        nonlocal text
        text += stack.take_stacks()
        return text.endswith((f" in {frame.f_code.co_name}\n", "\n  ...\n"))

    until(is_complete, "the process writes its stack", TIMEOUT_S)
    return text


def test_a_process_that_hangs_in_native_code_shows_its_stack_each_time(stack, hanging):
    """No Python code of it runs: the stack comes from its parent's question, and shows the line that waits."""
    for _ in range(2):
        assert stack.take_stacks() == ""
        os.kill(hanging, STACKS_SIGNAL)
        text = taken(stack)
        assert "in wait_for_ever" in text
        assert text.count("Current thread") == 1


def test_a_descriptor_is_needed_only_until_the_process_has_started(stack, hanging):
    """The parent may have hundreds of workers."""
    stack.close_descriptor()
    assert stack.fd == -1
    os.kill(hanging, STACKS_SIGNAL)
    assert "in wait_for_ever" in taken(stack)


def test_stacks_beyond_the_memory_are_lost(stack):
    """A process may hang for days."""
    os.write(stack.fd, b"x" * (1 << 20))
    assert len(stack.take_stacks()) == 1 << 18
    assert stack.take_stacks() == ""


STACKS = """Thread 0x00007f (most recent call first):
  File "/usr/other.py", line 1 in run

Current thread 0x00007e (most recent call first):
  File "{stdlib}/threading.py", line 320 in wait
  File "/data/my data.py", line 12 in __getitem__
  File "/data/other.py", line 3 in <listcomp>

Thread 0x00007d (most recent call first):
  File "/usr/other.py", line 2 in run
"""


def test_frames_below_the_worker_are_left_out():
    """They are the same for every batch, and those of the main process before the fork."""
    ours = f'  File "{worker.__file__}", line 90 in run_worker\n  File "/script.py", line 1 in <module>\n'
    stacks = STACKS.replace("\n\nThread 0x00007d", f"\n{ours}\nThread 0x00007d")
    assert len(stacks) > len(STACKS)
    assert without_our_start(stacks) == STACKS


def test_the_innermost_call_is_that_of_the_main_thread_with_the_users_line():
    """A library's line alone would not say who called it."""
    found = innermost_call(STACKS.format(stdlib=os.path.dirname(threading.__file__)))
    assert found == (f"{threading.__file__}:320 in wait, called by /data/my data.py:12 in __getitem__")
    assert innermost_call(STACKS.format(stdlib="/mine")) == "/mine/threading.py:320 in wait"
    assert innermost_call("It does not react.\n") == ""
