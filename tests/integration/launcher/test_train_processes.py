"""``lightning-sm train`` and its child processes: signals, local ranks, orphans."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from lightning_sm.errors import ScriptError
from lightning_sm.job.control_folder import ControlFolder
from lightning_sm.job.outcomes import INTERRUPTED_EXIT_CODE
from lightning_sm.job.variables import CONTROL_DIR, StopSchedule
from lightning_sm.launcher.child_process import ChildProcess
from tests.fakes.job_folder import resource_config, write_job
from tests.integration.emulators import until
from tests.integration.hosts import Hosts
from tests.integration.launching import TIMEOUT_S, failure, started, train, variables_of

# Prints "ready" once signals may arrive, then sleeps longer than any passing test runs.
_WAIT = f"print('ready', flush=True)\nimport signal, time\ntime.sleep({TIMEOUT_S})\n"


def _alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_the_script(base, work, signum):
    """SIGTERM and SIGINT are forwarded, and the launcher exits with the script's exit code."""
    (work / "train.py").write_text(
        f"import signal, sys\nsignal.signal({int(signum)}, lambda *_: sys.exit(42))\n" + _WAIT
    )
    with started(base, work, "train.py") as running:
        running.wait_for("ready")
        running.process.send_signal(signum)
        assert running.exit_code() == 42


def test_a_signal_to_another_thread_of_the_launcher_reaches_the_script(base, work):
    """A signal is forwarded even if the kernel delivers it to a thread other than the main thread."""
    (work / "train.py").write_text("import signal, sys\nsignal.signal(15, lambda *_: sys.exit(42))\n" + _WAIT)
    with started(base, work, "train.py") as running:
        running.wait_for("ready")
        launcher = running.process.pid
        other = next(int(name) for name in os.listdir(f"/proc/{launcher}/task") if int(name) != launcher)
        ctypes.CDLL(None).tgkill(launcher, other, signal.SIGTERM)
        assert running.exit_code() == 42


def test_only_processes_that_say_so_get_the_gentle_signal(base, work):
    """A helper process that handles SIGUSR2, as all Go programs do, does not delay SIGTERM for the script."""
    helper = "import signal\nsignal.signal(signal.SIGUSR2, lambda *_: None)\n" + _WAIT
    (work / "train.py").write_text(
        "import signal, subprocess, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(42))\n"
        f"child = subprocess.Popen([sys.executable, '-c', {helper!r}])\nchild.wait()"
    )
    with started(base, work, "train.py") as running:
        running.wait_for("ready")
        running.process.send_signal(signal.SIGTERM)
        assert running.exit_code() == 42


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_process_that_says_so_gets_the_gentle_signal(base, work, signum):
    """A process with a file in the control folder gets SIGUSR2 before SIGTERM, whatever its name.

    SIGINT, which Ctrl-C on ``docker run`` sends, stops a job in the same way.
    """
    (work / "train.py").write_text(
        "import ctypes, os, pathlib, signal, sys\nctypes.CDLL(None).prctl(15, b'trainer-\\xe8\\xa8', 0, 0, 0)\n"
        "signal.signal(signal.SIGUSR2, lambda *_: sys.exit(42))\n"
        "pathlib.Path(os.environ['LIGHTNING_SM_CONTROL_DIR'], f'process-{os.getpid()}').touch()\n" + _WAIT
    )
    with started(base, work, "train.py") as running:
        running.wait_for("ready")
        running.process.send_signal(signum)
        assert running.exit_code() == 42


def test_a_second_ctrl_c_is_passed_on_at_once(base, work):
    """A second Ctrl-C is forwarded as SIGINT, for users who do not want to wait for the checkpoint."""
    (work / "train.py").write_text(
        "import os, pathlib, signal, sys\nsignal.signal(signal.SIGUSR2, lambda *_: print('saving', flush=True))\n"
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(42))\n"
        "pathlib.Path(os.environ['LIGHTNING_SM_CONTROL_DIR'], f'process-{os.getpid()}').touch()\n" + _WAIT
    )
    with started(base, work, "train.py") as running:
        running.wait_for("ready")
        running.process.send_signal(signal.SIGINT)
        running.wait_for("saving")
        running.process.send_signal(signal.SIGINT)
        assert running.exit_code() == 42


def test_a_local_rank_that_fails_after_the_script_fails_the_host(base, work):
    """The launcher waits for a local rank that outlives rank 0, and reports its exit code if it fails."""
    rank = "import sys\nfrom lightning_sm.job.control_folder import announce\nannounce()\nprint('ready', flush=True)\n"
    rank += "sys.stdin.read()\nsys.exit(5)"
    (work / "train.py").write_text(
        "import os, subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {rank!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\nos._exit(0)"
    )
    ended = train(base, work, "train.py")
    assert ended.returncode == 5
    assert "exit code 5" in failure(base)


def test_last_lines_wait_for_a_slow_reader(base, work):
    """All lines of the script arrive, however late stderr is read, and even if a daemon keeps the pipe open."""
    (work / "train.py").write_text(
        "import os, pathlib, subprocess, sys\n"
        "daemon = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "sys.stderr.write(''.join(f'line {number:058}\\n' for number in range(1500)))\n"  # more than a pipe holds
        "pathlib.Path('partial').write_text(f'{os.getpid()} {daemon.pid}')\n"
        "os.rename('partial', 'pids')\n"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-m", "lightning_sm", "train", "train.py"],
        cwd=work,
        env=variables_of(base),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until((work / "pids").exists, "the script has written its lines", TIMEOUT_S)
        script, daemon = map(int, (work / "pids").read_text().split())
        try:
            until(lambda: not psutil.pid_exists(script), "the script has ended", TIMEOUT_S)
            time.sleep(1.5)  # a launcher with a time limit would have given up on its reader
            output = launcher.communicate(timeout=TIMEOUT_S)[1]
        finally:
            os.kill(daemon, signal.SIGKILL)
    finally:
        launcher.kill()
    lines = [line for line in output.splitlines() if line.startswith("line ")]
    assert lines == [f"line {number:058}" for number in range(1500)]
    assert launcher.returncode == 0


def test_signal_that_kills_the_script_is_its_exit_code(base, work):
    """A script that SIGTERM kills gives exit code 143 (128 + 15)."""
    (work / "train.py").write_text(_WAIT)
    with started(base, work, "train.py") as running:
        running.wait_for("ready")
        running.process.send_signal(signal.SIGTERM)
        assert running.exit_code() == 143
    assert "killed by SIGTERM" in failure(base)


def test_signals_reach_the_whole_group(base, work):
    """The launcher sends SIGTERM to local ranks that the script started."""
    rank = "import signal, sys\nsignal.signal(15, lambda *_: sys.exit(print('rank stops', flush=True)))\n" + _WAIT
    (work / "train.py").write_text(
        "import signal, subprocess, sys\nsignal.signal(15, lambda *_: None)\n"
        f"sys.exit(subprocess.Popen([sys.executable, '-c', {rank!r}]).wait())"
    )
    with started(base, work, "train.py") as running:
        running.wait_for("ready")
        running.process.send_signal(signal.SIGTERM)
        running.wait_for("rank stops")
        # A script that exits with 0 after the signal may not have finished its work, so it counts as interrupted.
        assert running.exit_code() == INTERRUPTED_EXIT_CODE
    assert "The script exited after the signal, and it is not known whether its work is complete" in failure(base)


def test_local_ranks_do_not_outlive_a_failed_script(base, work):
    """When the script fails, the processes that it left behind are killed."""
    (work / "train.py").write_text(
        f"import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', {_WAIT!r}], stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\nprint(child.pid, flush=True)\nsys.exit(4)"
    )
    ended = train(base, work, "train.py")
    assert ended.returncode == 4
    assert not _alive(int(ended.stdout))


def test_local_ranks_may_finish_after_a_successful_script(base, work):
    """When the script succeeds, the launcher waits for its local ranks to finish."""
    rank = "import sys\nsys.stdin.read()\nprint('rank done', flush=True)"
    (work / "train.py").write_text(
        "import os, subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {rank!r}], stdin=subprocess.PIPE)\nos._exit(0)"
    )
    ended = train(base, work, "train.py")
    assert (ended.returncode, ended.stdout) == (0, "rank done\n")


def test_a_signal_on_the_way_out_does_not_replace_the_exit_code(base, work):
    """SIGTERM does not change the exit code even after Python has restored the default signal handlers at exit."""
    (work / "train.py").write_text("raise SystemExit(7)")
    leave_late = """
import os, signal, sys
class Late:
    def __del__(self, kill=os.kill, process=os.getpid(), signum=signal.SIGTERM):
        kill(process, signum)
late = Late()
from lightning_sm.__main__ import main
sys.exit(main(["train", "train.py"]))
"""
    command = [sys.executable, "-c", leave_late]
    ended = subprocess.run(
        command, cwd=work, env=variables_of(base), capture_output=True, check=False, timeout=TIMEOUT_S
    )
    assert ended.returncode == 7, ended.stderr.decode()


def test_orphans_are_reaped_while_the_script_runs(base, work):
    """Orphaned processes do not remain zombies while the script runs."""
    (work / "train.py").write_text(
        "import os, psutil, time\n"
        "launcher = os.getppid()\n"
        "for _ in range(20):\n"
        "    if os.fork() == 0:\n"
        "        if os.fork() == 0:\n"
        "            os._exit(0)\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
        "def zombies():\n"
        "    found = psutil.process_iter(['ppid', 'status'])\n"
        "    return [one for one in found if one.info == {'ppid': launcher, 'status': psutil.STATUS_ZOMBIE}]\n"
        "deadline = time.monotonic() + 10\n"
        "while zombies() and time.monotonic() < deadline:\n"
        "    time.sleep(0.02)\n"
        "print('zombies:', len(zombies()))\n"
    )
    ended = train(base, work, "train.py")
    assert ended.returncode == 0, ended.stderr
    assert "zombies: 0" in ended.stdout


def test_a_host_that_starts_after_the_failure_of_the_first_one_ends_with_its_reason(work, tmp_path):
    """A main host that fails at once waits for hosts that start seconds later, and gives them its reason."""
    hosts = Hosts(tmp_path / "hosts")
    (work / "fail.py").write_text("raise ValueError('meant to fail')")
    (work / "wait.py").write_text(_WAIT)

    def launcher(host, script):
        return started(hosts.folder / host, work, script, **{**hosts.env(host), "LIGHTNING_SM_PEERS_TIMEOUT_S": "60"})

    with launcher("algo-1", "fail.py") as first:
        first.wait_for("ValueError: meant to fail")
        with launcher("algo-2", "wait.py") as second:
            assert first.exit_code() == 1
            assert second.exit_code() != 0
    assert re.match(r"ValueError: meant to fail\s+on trainer host algo-1\b", failure(hosts.folder / "algo-2"))


@pytest.mark.proof  # takes 15 s, after which a host counts as lost
def test_a_host_that_was_killed_is_the_reason_of_the_one_that_lost_its_connection(work, tmp_path):
    """A host whose script lost its connection reports the killed host as the reason, not the connection error."""
    hosts = Hosts(tmp_path / "hosts")
    (work / "wait.py").write_text(_WAIT)
    gone = work / "gone"
    (work / "lose.py").write_text(
        "import pathlib, time\nprint('ready', flush=True)\n"
        f"while not pathlib.Path({str(gone)!r}).exists():\n    time.sleep(0.05)\n"
        "raise ConnectionResetError('Connection reset by peer')"
    )

    def launcher(host, script):
        return started(hosts.folder / host, work, script, **{**hosts.env(host), "LIGHTNING_SM_PEERS_TIMEOUT_S": "60"})

    with launcher("algo-1", "lose.py") as first, launcher("algo-2", "wait.py") as second:
        first.wait_for("ready")
        second.wait_for("ready")
        killed = psutil.Process(second.process.pid)
        met = "the launchers have met"
        until(lambda: any(one.status == "ESTABLISHED" for one in killed.net_connections()), met, TIMEOUT_S)
        for process in [*killed.children(recursive=True), killed]:
            process.kill()
        gone.touch()
        assert first.exit_code() == 1
    assert failure(hosts.folder / "algo-1").startswith("Lost host algo-2: its launcher has sent nothing for 15 s")


# Exits like an interrupted training when its own host or another one is stopped.
_INTERRUPTED = """
import pathlib, signal, sys, time
from lightning_sm.job.control_folder import announce
stopping = pathlib.Path("stopping")
signal.signal(signal.SIGUSR2, lambda *_: stopping.touch())
announce().note_saved([])
print("ready", flush=True)
while not stopping.exists():
    time.sleep(0.01)
sys.exit(143)
"""


@pytest.mark.parametrize(("stopped", "other"), [("algo-1", "algo-2"), ("algo-2", "algo-1")])
def test_a_host_leaves_an_interrupted_job_only_when_it_is_stopped_itself(work, tmp_path, stopped, other):
    """A host whose script has saved and exited waits for its own stop signal, while the stopped host exits."""
    hosts = Hosts(tmp_path / "hosts")
    (work / "train.py").write_text(_INTERRUPTED)

    def launcher(host):
        return started(hosts.folder / host, work, "train.py", **hosts.env(host))

    with launcher(stopped) as first, launcher(other) as second:
        first.wait_for("ready")
        second.wait_for("ready")
        first.process.terminate()
        second.wait_for("this host has saved its checkpoint, but has not been told to stop yet.")
        assert first.exit_code() == INTERRUPTED_EXIT_CODE
        assert second.process.poll() is None
        second.process.terminate()
        assert second.exit_code() == INTERRUPTED_EXIT_CODE


@pytest.mark.parametrize("scheme", ["s3", "file"])
def test_the_first_checkpoint_is_waited_for_before_its_upload_has_begun(work, tmp_path, scheme):
    """The launcher waits for the first upload even if SageMaker's agent has not begun it when the script exits.

    The address does not matter, as long as it is remote.
    """
    base = tmp_path / "ml"
    checkpoint = {"LocalPath": str(tmp_path / "checkpoints"), "S3Uri": f"{scheme}:///bucket/checkpoints"}
    write_job(base, resource_config({"trainer": ["algo-1"]}, "algo-1"), checkpoint=checkpoint)
    saved = tmp_path / "checkpoints" / "interrupted.ckpt"
    saved.parent.mkdir()
    (work / "train.py").write_text(
        "import os, pathlib, sys\nfrom lightning_sm.job.control_folder import announce\n"
        f"saved = pathlib.Path({str(saved)!r})\nsaved.touch()\nannounce().note_saved([saved])\n"
        "print('script', os.getpid(), flush=True)\nsys.exit(143)"
    )
    with started(base, work, "train.py") as running:
        script = int(running.wait_for("script ").split()[1])
        with suppress(psutil.NoSuchProcess):
            psutil.Process(script).wait(TIMEOUT_S)
        saved.with_name("interrupted.ckpt.sagemaker-uploading").touch()
        running.wait_for("waiting until SageMaker has uploaded the checkpoint")
        saved.with_name("interrupted.ckpt.sagemaker-uploaded").touch()
        running.wait_for("uploaded after")
        assert running.exit_code() == 143


_RANKS = """
import os, signal, sys, time
from lightning_sm.job.control_folder import announce
announce().beat(int(os.environ["RANK"]))
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""


def test_the_rank_that_was_killed_is_known(tmp_path, monkeypatch):
    """The launcher is the parent of a killed rank, so it knows the exit code without reading it from /proc."""
    monkeypatch.setattr("lightning_sm._linux.exit_code_of_zombie", lambda _: None)
    with ControlFolder(tmp_path / "control") as control:
        control.path.mkdir()
        child = ChildProcess(StopSchedule(95, 110), control)
        env = {**os.environ, CONTROL_DIR.name: str(control.path)}
        ranks = [{"RANK": "0"}, {"RANK": "1"}]
        assert child.run([sys.executable, "-c", _RANKS], tmp_path, env, processes=ranks) == 137
        assert (child.failed.rank, child.failed.exit_code) == (1, 137)


def test_ranks_that_have_started_are_killed_if_another_one_cannot_be(tmp_path):
    """If one rank cannot be started, the ranks that were started are killed."""
    before = psutil.Process().children()
    with ControlFolder(tmp_path / "control") as control:
        control.path.mkdir()
        child = ChildProcess(StopSchedule(95, 110), control)
        too_long = "x" * 200 * 1024
        with pytest.raises(ScriptError, match=r"cannot be started: .* Argument list too long"):
            child.run([sys.executable, "-c", _WAIT], tmp_path, os.environ, processes=[{}, {"NAME": too_long}])
    started = [process.pid for process in psutil.Process().children() if process not in before]
    until(lambda: not any(map(_alive, started)), "the first one is killed", TIMEOUT_S)
