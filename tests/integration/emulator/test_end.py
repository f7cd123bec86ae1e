"""How an emulated job ends: a host fails, a signal arrives, or the emulator dies. No process outlives it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time

import pytest

from tests.integration.emulators import (
    SCRIPT_START,
    TIMEOUT_S,
    command,
    in_background,
    job_dir,
    local,
    processes_of,
    until,
)
from tests.integration.terminals import read_terminal

# Creates a file once it runs, then waits for a signal; the sleep outlasts any test that passes.
_WAIT = f"{SCRIPT_START}open(base + '/ready', 'w').close()\nimport time\ntime.sleep({2 * TIMEOUT_S})\n"
_UNTIL_TOLD = f"""
deadline = time.monotonic() + {TIMEOUT_S}
while not os.path.exists('told') and time.monotonic() < deadline:
    time.sleep(0.02)
"""
_STUBBORN = "import signal\nsignal.signal(15, signal.SIG_IGN)\n" + _WAIT


@contextlib.contextmanager
def _started(jobs, work, *args, num_hosts):
    """Start an emulator in the background, and wait until all scripts run."""
    with in_background(jobs, work, *args) as process:
        until(lambda: len(list(jobs.glob("*/algo-*/ready"))) == num_hosts, "all scripts run", TIMEOUT_S)
        yield process


def test_failing_host_ends_the_others(jobs, work):
    """When one host fails, the others are stopped at once, and the job reports its exit code and reason."""
    (work / "train.py").write_text(
        "import os, sys, time\nfrom pathlib import Path\n"
        "host = os.environ['SM_CURRENT_HOST']\nPath(f'ready-{host}').touch()\n"
        f"deadline = time.monotonic() + {TIMEOUT_S}\n"
        "while len(list(Path().glob('ready-*'))) < 3 and time.monotonic() < deadline:\n"
        "    time.sleep(0.01)\n"
        "if host == 'algo-2':\n    print('no more data', file=sys.stderr)\n    sys.exit(9)\n"
        f"time.sleep({2 * TIMEOUT_S})\n"
    )
    ended = local(jobs, work, "--group", "trainer=3", "--", "train.py")
    assert ended.returncode == 9
    assert "Host algo-2 (group trainer) failed with exit code 9." in ended.stdout
    reason = "exit code 9 on trainer host algo-2, rank 1; last lines of stderr:\nno more data\n"
    assert ended.stdout.endswith(f"The job failed:\n{reason}")
    assert re.search(r"^algo-1 +trainer +trainer +143 ", ended.stdout, re.MULTILINE)
    assert f"Folders of the hosts: {job_dir(jobs)} (" in ended.stdout
    assert not processes_of(jobs)


# All hosts fail at the same moment, in the same way. The first one to exit stops the others, which must still print.
_TOGETHER = (
    SCRIPT_START
    + f"""
import glob, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(f'ready-{{host}}', 'w').close()
deadline = time.monotonic() + {TIMEOUT_S}
while len(glob.glob('ready-*')) < 3 and time.monotonic() < deadline:
    time.sleep(0.01)
"""
)
_USAGE = _TOGETHER + "import argparse\nargparse.ArgumentParser('train.py').parse_args(['--nix'])\n"
_RAISE = _TOGETHER + "def load():\n    raise KeyError('label')\nload()\n"


@pytest.mark.parametrize(
    ("script", "code", "headline", "error"),
    [
        (_USAGE, 2, "usage: ", "train.py: error: unrecognized arguments: --nix"),
        (_RAISE, 1, "Traceback", "KeyError: 'label'"),
    ],
    ids=["usage", "traceback"],
)
def test_what_all_hosts_print_has_their_names(jobs, work, script, code, headline, error):
    """Each host's usage text or traceback is in the output and in its log; the reason is printed once."""
    (work / "train.py").write_text(script)
    ended = local(jobs, work, "--group", "trainer=2", "--group", "data=1", "--", "train.py")
    assert ended.returncode == code
    lines = ended.stdout.splitlines()
    assert len([line for line in lines if headline in line]) == 3, ended.stdout
    shown = [line.partition(" ")[0] for line in lines if line.endswith(f"| {error}")]
    assert sorted(shown) == ["algo-1", "algo-2", "algo-3"]
    logs = [log.read_text() for log in jobs.glob("*/algo-*/output/log.txt")]
    assert [error in log for log in logs] == [True] * 3
    assert ended.stdout.rpartition("The job failed:\n")[2].startswith(f"{error}\non ")


@pytest.mark.matrix(first=1)
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_stopping_the_emulator_stops_all_hosts(jobs, work, signum, code):
    """Ctrl-C, SIGTERM and SIGHUP stop every process within seconds."""
    (work / "train.py").write_text(_WAIT)
    with _started(jobs, work, "--group", "trainer=2", "--", "train.py", num_hosts=2) as emulator:
        emulator.send_signal(signum)
        assert emulator.wait(TIMEOUT_S) == code
        assert not processes_of(jobs)
        assert re.search(r"^algo-1 +trainer +trainer +143 ", emulator.stdout.read(), re.MULTILINE)


def test_an_emulator_under_nohup_outlives_the_terminal(jobs, work):
    """SIGHUP stays ignored if nohup ignored it."""
    (work / "train.py").write_text(f"{SCRIPT_START}import time\nopen(base + '/ready', 'w').close()\n{_UNTIL_TOLD}")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the emulator inherits it
    try:
        with _started(jobs, work, "--group", "trainer=1", "--", "train.py", num_hosts=1) as emulator:
            emulator.send_signal(signal.SIGHUP)
            (work / "told").touch()
            assert emulator.wait(TIMEOUT_S) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_hosts_that_ignore_sigterm_are_killed(jobs, work):
    """Scripts that do not react to SIGTERM are killed after 5 s."""
    (work / "train.py").write_text(_STUBBORN)
    with _started(jobs, work, "--group", "trainer=2", "--", "train.py", num_hosts=2) as emulator:
        emulator.send_signal(signal.SIGINT)
        assert emulator.wait(TIMEOUT_S) == 130
        assert not processes_of(jobs)


def test_second_signal_kills_at_once(jobs, work):
    """A second Ctrl-C kills all hosts without waiting for the grace period."""
    (work / "train.py").write_text(_STUBBORN)
    with _started(jobs, work, "--", "train.py", num_hosts=1) as emulator:
        emulator.send_signal(signal.SIGINT)
        while not (line := emulator.stdout.readline()).startswith("Stopping all hosts"):
            assert line
        time.sleep(0.7)  # signals that arrive almost together count as one
        emulator.send_signal(signal.SIGINT)
        assert emulator.wait(TIMEOUT_S) == 130
        assert "Killing all hosts: SIGINT again." in emulator.stdout.read()
        assert not processes_of(jobs)


@pytest.mark.matrix(first=1)
@pytest.mark.parametrize("script", [_WAIT, _STUBBORN])
def test_killing_the_emulator_leaves_no_process(jobs, work, script):
    """After SIGKILL of the emulator, every host exits, even one that ignores SIGTERM."""
    (work / "train.py").write_text(script)
    with _started(jobs, work, "--group", "trainer=2", "--", "train.py", num_hosts=2) as emulator:
        assert processes_of(jobs)
        emulator.kill()
        until(lambda: not processes_of(jobs), "no process is left", TIMEOUT_S)


def test_processes_that_left_their_group_are_found(jobs, work):
    """A daemon that a script starts in a new session does not outlive the job."""
    (work / "train.py").write_text(
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {_WAIT!r}], start_new_session=True)\nprint(child.pid)"
    )
    ended = local(jobs, work, "--", "train.py")
    assert ended.returncode == 0
    assert not processes_of(jobs)


def test_reader_that_goes_away_ends_the_job(jobs, work):
    """Closing the pipe ends the emulator, as ``| head`` ends other commands, so that it does not run unseen."""
    (work / "train.py").write_text("while True: print('line')")
    with subprocess.Popen(command(jobs, ["--", "train.py"]), cwd=work, stdout=subprocess.PIPE) as emulator:
        emulator.stdout.readline()
        emulator.stdout.close()
        assert emulator.wait(TIMEOUT_S) == 141
    assert not processes_of(jobs)


def test_the_reason_does_not_act_upon_the_terminal(jobs, work):
    """Control sequences in a failure file, which scripts can write themselves, do not reach the terminal."""
    (work / "train.py").write_text(
        SCRIPT_START + "open(base + '/output/failure', 'w').write('bad \\x1b]52;c;cGF5\\x07\\x1b[2Jdata')\nos._exit(3)"
    )
    reader, writer = os.openpty()
    with os.fdopen(reader, "rb", buffering=0):
        ended = subprocess.Popen(command(jobs, ["--", "train.py"]), cwd=work, stdout=writer, stderr=writer)
        os.close(writer)
        shown = read_terminal(reader)
        assert ended.wait(TIMEOUT_S) == 3
    assert b"The job failed:\r\nbad data\r\n" in shown
    assert b"\x1b]52" not in shown
