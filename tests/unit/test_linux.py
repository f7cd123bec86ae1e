"""Kernel features on Linux, and their substitutes on other systems."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading

import pytest

from lightning_sm import _linux
from lightning_sm._linux import ExitWatch
from lightning_sm.errors import NeedsLinuxError


@pytest.fixture
def elsewhere(monkeypatch):
    """Simulate another system, without Linux's system calls."""
    monkeypatch.setattr(_linux, "_IS_LINUX", False)
    monkeypatch.setattr(_linux, "_SYSTEM", "macOS")
    for name in ("sched_getaffinity", "waitid"):
        monkeypatch.delattr(os, name)


@pytest.fixture
def sleeper():
    """Start a child process that handles SIGUSR1 and blocks SIGUSR2."""
    text = (
        "import signal, sys\n"
        "signal.signal(signal.SIGUSR1, lambda *_: None)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])\n"
        "print(flush=True)\n"
        "sys.stdin.read()\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", text], **pipes) as process:
        process.stdout.readline()
        yield process
        process.kill()


def test_handlers_and_blocked_signals_are_told_apart(sleeper):
    """A blocked signal counts only on request, and a process that has exited handles no signal."""
    assert _linux.handles_signal(sleeper.pid, signal.SIGUSR1) is True
    assert _linux.handles_signal(sleeper.pid, signal.SIGUSR2) is False
    assert _linux.handles_signal(sleeper.pid, signal.SIGUSR2, or_blocks=True) is True
    assert _linux.handles_signal(sleeper.pid, signal.SIGHUP, or_blocks=True) is False
    sleeper.kill()
    sleeper.wait()
    assert _linux.handles_signal(sleeper.pid, signal.SIGUSR1) is False


def test_ended_child_is_not_reaped():
    """The exited child is reported, and its parent can still wait for its exit code."""
    # Use a separate process: the test process may have other children and adopt orphans.
    text = (
        "import os, subprocess, sys\n"
        "from lightning_sm import _linux\n"
        "assert _linux.ended_child() is None\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import sys; sys.stdin.read()'], stdin=subprocess.PIPE)\n"
        "assert _linux.ended_child() is None\n"
        "child.kill()\n"
        "os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)\n"
        "assert _linux.ended_child() == child.pid\n"
        "assert child.wait() == -9\n"
    )
    subprocess.run([sys.executable, "-c", text], check=True, timeout=60)


def test_hosts_have_addresses_of_their_own():
    """No host gets 127.0.0.1, which would hide a wrong main address."""
    assert _linux.loopback_addresses(3) == ["127.0.0.2", "127.0.0.3", "127.0.0.4"]
    assert _linux.missing_on_this_system() == ""
    _linux.require_linux("This", "Do that.")


@pytest.mark.parametrize(("quota", "cpus"), [("150000 100000", 2), ("50000 100000", 1), ("max 100000", None)])
def test_a_container_has_the_cpus_of_its_limit(tmp_path, quota, cpus):
    """A quota limits the number of CPUs, but "max" and a missing file do not."""
    unlimited = _linux.usable_cpus(tmp_path)
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert _linux.usable_cpus(tmp_path) == min(cpus or unlimited, unlimited)


def test_elsewhere_nothing_is_asked_of_the_kernel(elsewhere, tmp_path):
    """On other systems, each feature has its documented substitute."""
    assert _linux.loopback_addresses(2) == ["127.0.0.1", "127.0.0.1"]
    assert _linux.usable_cpus(tmp_path) == os.cpu_count()
    assert _linux.handles_signal(os.getpid(), signal.SIGTERM) is None
    assert _linux.ended_child() is None


def test_elsewhere_the_error_names_the_system_and_what_to_do(elsewhere):
    """On other systems, the error names the feature, the system and the fix in one line."""
    with pytest.raises(NeedsLinuxError, match=r"^This needs Linux, but this system is macOS\. Do that\.$"):
        _linux.require_linux("This", "Do that.")


def test_the_exit_of_a_process_is_noticed_before_its_parent_waits_for_it():
    """Exit codes and signals are reported even for grandchildren; processes that no longer exist are skipped."""
    source = "import subprocess, sys\nkill = 'import os; os.kill(os.getpid(), 9)'\n"
    source += "child = subprocess.Popen([sys.executable, '-c', kill])\n"
    source += "print(child.pid, flush=True); sys.stdin.read()"
    parent = subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        grandchild = int(parent.stdout.readline())
        with ExitWatch() as watch:
            watch.add([grandchild, 2**22 + 1])
            assert watch.wait(60) == [(grandchild, -signal.SIGKILL)]
            watch.add([grandchild])
            assert watch.wait(0) == []
    finally:
        parent.communicate()


@pytest.fixture
def named():
    """Start a named thread that works until it is told to sleep."""
    begun, rests, ends = threading.Event(), threading.Event(), threading.Event()

    def run():
        ctypes.CDLL(None).prctl(15, b"at-work")  # PR_SET_NAME, linux/prctl.h
        begun.set()
        while not rests.is_set():
            pass
        ends.wait()

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    yield rests
    rests.set()
    ends.set()
    thread.join()


def test_a_thread_at_work_is_waited_for(named):
    """The wait for a thread lasts until it sleeps or the time is up."""
    assert not _linux.wait_until_asleep("at-work", 0.1)
    named.set()
    assert _linux.wait_until_asleep("at-work", 60.0)


def test_threads_that_are_not_there_are_not_waited_for(elsewhere):
    """Waiting for a missing thread, or on another system, returns at once."""
    assert _linux.wait_until_asleep("nobody", 0.0)
    assert _linux.wait_until_asleep("python", 0.0)
