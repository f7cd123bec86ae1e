"""Emulated jobs with injected faults: a training script without torch, and helpers to parse the output."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.integration.emulators import in_background, local

TIMEOUT_S = 180

# Without MODE, the script counts steps like a training: all hosts meet first, rank 0 reports the steps and saves at the
# end and on SIGTERM, and all hosts continue from the saved step. The emulator may inject faults late, so each attempt
# waits at its step in HELD, if it has one. MODE names another function to run.
_TRAIN = """
import json, os, signal, sys, time
from pathlib import Path

import psutil

from lightning_sm.job.control_folder import Phase, announce
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.topology import Topology
from lightning_sm.job.uploads import is_uploaded

job = SageMakerJob.from_environment()
topology = Topology.from_job(job)
base = Path(os.environ["SAGEMAKER_BASE_DIR"])
# Hosts see no files of each other, but all have the working directory. Attempts have records of their own.
meeting = Path.cwd() / "meeting" / Path(os.environ["LIGHTNING_SM_RECORD_DIR"]).name
here = meeting / job.current_host
here.mkdir(parents=True, exist_ok=True)
mode = os.environ.get("MODE", "")
told = []


def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())


def hear(*_):
    if not told:  # launchers may repeat it
        told.append(time.monotonic())
        say("told", told[0])


signal.signal(signal.SIGTERM, hear)


def until(condition):
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def report(step):
    if topology.role.value == "trainer" and topology.node_rank == 0:
        announce().beat(0, step, step // 10, Phase.TRAINING, trained_epoch=1 + step // 10)


def meet():
    (base / "left").touch()
    (here / "left").touch()
    until(lambda: all((meeting / host / "left").exists() for host in job.hosts))


def train(last=20):
    (meeting.parent / f"start-{job.current_host}-{os.getpid()}").touch()
    num_starts = len(list(meeting.parent.glob(f"start-{job.current_host}-*")))
    saved = job.checkpoint_dir / "step" if job.checkpoint_dir else None
    step = int(saved.read_text()) if saved and saved.exists() else 0
    say("starts", step, job.name, topology.main_port, sorted(str(p.relative_to(base)) for p in base.rglob("left")))
    meet()
    held = [*map(int, os.environ.get("HELD", "").split())][num_starts - 1 : num_starts]
    while step < last and not told:
        time.sleep(0.005)
        step = min(step + 1, *held, last)
        report(step)
    if saved and topology.role.value == "trainer" and topology.node_rank == 0:
        saved.write_text(str(step))
        until(lambda: is_uploaded(saved))
    if step < last:
        sys.exit(143)


def processes(host):
    found = []
    for process in psutil.process_iter():
        try:
            if Path(process.environ().get("LIGHTNING_SM_HOST_FOLDER", "/")) == base.parent / host:
                found.append(process.status())
        except psutil.Error:
            pass
    return found


def wait_for_sigterm():
    until(lambda: told)
    sys.exit(143)


def endless():
    train(10**9)


def deaf():
    if is_first_attempt():
        report(5)
        time.sleep(60)


def leave_together():
    if is_first_attempt():
        report(5)
        until(lambda: told)
        (here / "told").touch()
        until(lambda: all((meeting / host / "told").exists() for host in job.hosts))
        sys.exit(143)


def is_first_attempt():
    if job.checkpoint_dir is None:  # there is no other
        meet()
        return True
    # Said to the next attempt by a file, which is there only when it was uploaded before this host leaves.
    tried = job.checkpoint_dir / "tried"
    if tried.exists():
        return False
    meet()
    tried.touch()
    until(lambda: is_uploaded(tried))
    return True


def stubborn():
    if is_first_attempt():
        report(1)
        time.sleep(60)


def with_daemon():
    # Outside its group and session, its parent gone, deaf to SIGTERM, and never at rest: it starts others.
    import subprocess
    code = "import os, signal, subprocess, sys\\nsignal.signal(15, signal.SIG_IGN)\\n"
    code += "if not os.fork():\\n    while True: subprocess.run(['sleep', '0.01'])"
    subprocess.run([sys.executable, "-c", code], start_new_session=True)
    (here / "ready").touch()
    wait_for_sigterm()


def watch_kill():
    # What the failing host left when SIGTERM comes: nothing, if it vanished as a whole.
    if job.current_host == "algo-2":
        with_daemon()
    until((meeting / "algo-2" / "ready").exists)
    report(5)
    until(lambda: told)
    say("left of algo-2:", processes("algo-2"))
    sys.exit(143)


def watch_launcher():
    if job.current_host == "algo-2":
        ready_and_wait()
    until((meeting / "algo-2" / "ready").exists)
    report(10)
    until(lambda: told)
    say("left of algo-2:", len(processes("algo-2")))
    sys.exit(143)


def watch_hang():
    if job.current_host == "algo-2":
        (here / "ready").touch()
        until((meeting / "thawed").exists)
        return
    until((meeting / "algo-2" / "ready").exists)
    report(1)
    until(lambda: set(processes("algo-2")) == {"stopped"})
    say("all stopped")
    until(lambda: "stopped" not in processes("algo-2"))
    say("none stopped")
    (meeting / "thawed").touch()


def fail_beside_frozen():
    if job.current_host == "algo-2":
        ready_and_wait()
    until((meeting / "algo-2" / "ready").exists)
    report(1)
    until(lambda: set(processes("algo-2")) == {"stopped"})
    sys.exit(3)


def save_longer():
    # The main host writes its checkpoint when the other one has left already.
    got = []
    for signum in (signal.SIGUSR2, signal.SIGTERM):
        signal.signal(signum, lambda number, _: got.append(signal.Signals(number).name))
    announce()
    meet()
    report(1)
    until(lambda: got)
    if job.current_host == "algo-1":
        until((meeting / "algo-2" / "leaves").exists)
        time.sleep(2)
        say("saved", got)
    else:
        (here / "leaves").touch()
    sys.exit(143)


def upload():
    folder = job.checkpoint_dir
    if (folder / "early").exists():
        own = folder / "lightning-sm-record"
        files = [path for path in folder.rglob("*") if path.is_file() and own not in path.parents]
        say("found", sorted((str(path.relative_to(folder)), path.stat().st_mtime > 1) for path in files))
        return
    say("folder", folder.relative_to(base.parent))
    meet()
    (folder / "half.sagemaker-ignore").write_text("unfinished")
    (folder / f"of-{job.current_host}").write_text("one of each host")
    (folder / "deep").mkdir()
    (folder / "deep" / "shard").write_text("in a folder")
    (folder / "early").write_text("of both hosts")
    os.utime(folder / "early", (1, 1))
    for name in ("early", "deep/shard", f"of-{job.current_host}"):
        until((folder / f"{name}.sagemaker-uploaded").exists)
    (here / "uploaded").touch()
    until(lambda: all((meeting / host / "uploaded").exists() for host in job.hosts))
    report(1)
    until(lambda: told)
    (folder / "lost").write_text("at the last moment")
    sys.exit(143)


def left_first_by(host):
    # Only algo-2 is interrupted.
    meet()
    report(1)
    if job.current_host == "algo-2":
        until(lambda: told)
        (here / "told").touch()
    else:
        until((meeting / "algo-2" / "told").exists)
    if job.current_host == host:
        sys.exit(143 if told else 3)
    until(lambda: not processes(host))
    until(lambda: told)
    sys.exit(143)


def unstopped_leaves_first():
    left_first_by("algo-1")


def stopped_leaves_first():
    if is_first_attempt():
        left_first_by("algo-2")


def save_and_leave():
    # As SpotCheckpoint: when one host is stopped, all save at the same step, and only the main host writes.
    process = announce()
    folder = job.checkpoint_dir
    if (folder / "saved").exists():
        say("resumed", (folder / "saved").read_text())
        return
    signal.signal(signal.SIGUSR2, hear)
    meet()
    report(1)
    until(lambda: (meeting / "stopping").exists() or told)
    (meeting / "stopping").touch()
    if job.current_host == "algo-1":
        (folder / "saved").write_text("at step 1")
        process.note_saved([folder / "saved"])
    else:
        process.note_saved([])
    sys.exit(143)


def ready_and_wait():
    (here / "ready").touch()
    wait_for_sigterm()


def local_ranks():
    import subprocess
    rank = os.environ["LOCAL_RANK"]
    # A worker of the rank: it inherits the variable.
    worker = subprocess.Popen(["sleep", "60"])
    if rank == "1":
        announce().beat(1, 1, 0, Phase.TRAINING, trained_epoch=1)
        (here / "ready").touch()
    else:
        until((here / "ready").exists)
        report(1)
    while worker.poll() is None and not told:
        time.sleep(0.005)


def started():
    say("started", psutil.Process(os.getppid()).create_time())



globals()[mode or "train"]()
"""


def run_faulty(
    jobs: Path, work: Path, *options: str, mode: str = "", held: Sequence[int] = ()
) -> subprocess.CompletedProcess[str]:
    """Run ``lightning-sm local`` with the training script, and wait for it to exit.

    Args:
        jobs: The folder for ``--base-dir``.
        work: The working directory.
        options: Options for the emulator.
        mode: The function that the script runs; if empty, it trains.
        held: For each attempt that a fault ends, the step at which the training waits for the fault.
    """
    ended = local(
        jobs,
        work,
        *_arguments(work, ["--env", f"HELD={' '.join(map(str, held))}", *options], mode),
        timeout_s=TIMEOUT_S,
    )
    assert "Traceback" not in ended.stdout + ended.stderr, ended.stdout + ended.stderr
    return ended


@contextmanager
def started_faulty(jobs: Path, work: Path, *options: str, mode: str) -> Iterator[subprocess.Popen[str]]:
    """Start ``lightning-sm local`` with the training script, and kill its processes at the end of the context."""
    with in_background(jobs, work, *_arguments(work, options, mode)) as process:
        yield process


def row(output: str, host: str, attempt: int | None = None) -> list[str]:
    """Parse a host's row in the table: group, role, exit code, seconds, and seconds from signal to exit."""
    prefix = rf"{attempt} +" if attempt else ""
    (found,) = re.findall(rf"^ *{prefix}{host} +(\S+ +(?:trainer|data) +\d+ .*)$", output, re.MULTILINE)
    return found.split()


def said_after(output: str, word: str) -> list[tuple[str, str]]:
    """Find the hosts' output lines that start with a word, as (host, rest of the line)."""
    return re.findall(rf"^(algo-\d) \| {word} (.*)$", output, re.MULTILINE)


def read_to_line(emulator: subprocess.Popen[str], start: str) -> str:
    """Read the emulator's output up to a line with this start, and return the line."""
    while not (line := emulator.stdout.readline()).startswith(start):
        assert line, f"the output ended before {start!r}"
    return line


def _arguments(work: Path, options: Sequence[str], mode: str) -> list[str]:
    (work / "train.py").write_text(_TRAIN)
    shutil.rmtree(work / "meeting", ignore_errors=True)  # from an earlier job
    # Launchers wait this long for the launchers of other hosts, which never answer if their host has vanished.
    variables = ["--env", f"MODE={mode}", "--env", "LIGHTNING_SM_PEERS_TIMEOUT_S=0.5"]
    return ["--seed", "1", *variables, *options, "--", "train.py"]
