"""How process groups are destroyed when a process exits."""

from __future__ import annotations

import subprocess
import sys

import pytest

_START = """
import atexit, os
import torch
from torch import distributed
from lightning_sm.training.group_exit import gloo_group, leave_at_exit, stay_at_exit

def threads():
    names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
    return sum("gloo" in name for name in names)

def begin():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    distributed.all_reduce(torch.ones(2))
    distributed.all_reduce(torch.ones(2), group=gloo_group([0]))
"""


def run(code):
    """Return what the code prints in a separate process."""
    done = subprocess.run([sys.executable, "-c", _START + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.processes
def test_no_thread_of_gloo_is_left_when_the_interpreter_shuts_down():
    """No gloo thread survives: one that dropped a tensor later would abort the process after a successful training."""
    before, after = run("begin(); print(threads()); atexit.register(lambda: print(threads())); leave_at_exit()")
    assert int(before) > 0
    assert after == "0"


@pytest.mark.processes
@pytest.mark.parametrize("stay", ["", "stay_at_exit()"], ids=["success", "failure"])
def test_a_thread_of_a_group_that_is_still_held_drops_its_tensors_first(stay):
    """The exit waits for the threads of a group that is still referenced to drop their tensors.

    With strategy=pipeline or FSDP2, such a thread may not have run since its collective call ended, and a rank that
    fails does not destroy its groups. Without the wait, the rank aborted at exit, and its exit code was lost.
    """
    said = run(f"""
import ctypes, sys, threading, time

def drop():
    ctypes.CDLL(None).prctl(15, b"pt_gloo_runloop")  # PR_SET_NAME; a stand-in for a thread of torch's
    begun.set()
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        pass
    dropped.set()
    over.wait()

begun, dropped, over = threading.Event(), threading.Event(), threading.Event()
atexit.register(lambda: print(threads() > 0, dropped.is_set()))
leave_at_exit()
begin()
held = distributed.distributed_c10d._get_default_group()
threading.Thread(target=drop, daemon=True).start()
begun.wait()
{stay}
""")
    assert said == ["True", "True"]


@pytest.mark.processes
def test_a_group_lives_as_long_as_that_of_all_ranks():
    """A gloo group is reused until the default group is destroyed; after another start, a new one is created."""
    said = run("""
begin(); first = gloo_group([0]); print(gloo_group([0]) is first)
distributed.destroy_process_group(); begin(); print(gloo_group([0]) is first)
""")
    assert said == ["True", "False"]
