"""Targets for the matrix of faults, data hosts of a job and launchers, and checks of what they leave behind."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import psutil
import pytest
from pytorch_lightning import LightningDataModule

from lightning_sm import DataServiceSettings, RemoteDataModule, SageMakerJob, Topology
from lightning_sm._log import show_log_lines
from lightning_sm.data import service
from lightning_sm.data.trainer.connection import ServiceConnection
from lightning_sm.errors import DataHostUnreachableError
from tests.fakes.job_folder import resource_config, write_job
from tests.fakes.reserved_job import reserve_job
from tests.fakes.small_app import SmallData
from tests.integration.data.cluster import Host, remote, running
from tests.integration.data.datasets import Data
from tests.integration.emulators import until
from tests.integration.hosts import Hosts

TIMEOUT_S = 180
TRAINER, DATA = "algo-1", "algo-2"
GROUPS = {"gpu": [TRAINER], "data": [DATA]}

# Forks start with torch and Lightning already imported, which takes seconds.
_FORKS = multiprocessing.get_context("forkserver")


def start_forks() -> None:
    """Start the process that forks the processes of ``Job``; it runs until the tests end."""
    _FORKS.set_forkserver_preload([__name__])
    forkserver.ensure_running()


class Serving(SmallData):
    """Two batches.

    Args:
        does: ``raises``: setup() fails; ``waits``: setup("validate") prints a line and does not return.
    """

    def __init__(self, does: str = "") -> None:
        super().__init__()
        self._does = does

    def setup(self, stage: str) -> None:
        """Do what was chosen."""
        if self._does == "raises":
            raise ValueError("no such column")
        if self._does == "waits" and stage == "validate":
            os.write(1, b"downloading\n")
            time.sleep(TIMEOUT_S)


class Job:
    """The data host of a job, as in a user's script, without a launcher; this process is the trainer.

    Args:
        folder: Parent of the hosts' folders.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log = folder / "data host.log"
        self._process: Any = None
        self._does = ""
        name, self.topology, ports = reserve_job(GROUPS)
        weakref.finalize(self, ports.close)
        self.env = {
            **os.environ,
            "TRAINING_JOB_NAME": name,
            "LIGHTNING_SM_HOST_ADDRESSES": '{"algo-1": "127.0.0.1", "algo-2": "127.0.0.1"}',
        }
        for host in (TRAINER, DATA):
            write_job(folder / host, resource_config(GROUPS, host))

    def start(self, does: str = "", **settings: Any) -> None:
        """Start the data host.

        Args:
            does: What its DataModule does in setup().
            settings: Settings of the data service.
        """
        self._does = does
        settings = {"workers": 1, "lease_s": float(TIMEOUT_S), "startup_timeout_s": float(TIMEOUT_S), **settings}
        env = {**self.env, "SAGEMAKER_BASE_DIR": str(self._folder / DATA)}
        self._process = _FORKS.Process(target=_serve, args=(env, self._log, settings))
        self._process.start()

    @property
    def main(self) -> psutil.Process:
        """The main process of the data host."""
        return psutil.Process(self._process.pid)

    def log(self) -> str:
        """Return the output of the data host so far."""
        return self._log.read_text() if self._log.exists() else ""

    def until_log(self, text: str) -> None:
        """Wait until the data host has printed a text."""
        until(lambda: text in self.log(), f"the data host says {text!r}", TIMEOUT_S)

    def until_handled(self, signum: int) -> None:
        """Wait until the data host has a handler for a signal, which would kill it before."""
        until(lambda: self._handles(signum), f"the data host handles signal {signum}", TIMEOUT_S)

    def _handles(self, signum: int) -> bool:
        fields = Path(f"/proc/{self.main.pid}/status").read_text().splitlines()
        caught = next(line.split()[1] for line in fields if line.startswith("SigCgt:"))
        return bool(int(caught, 16) >> (signum - 1) & 1)

    def module(self, **settings: Any) -> LightningDataModule:
        """Return the trainer's DataModule; data hosts run its hooks if these are to do something."""
        job = SageMakerJob.from_environment({**self.env, "SAGEMAKER_BASE_DIR": str(self._folder / TRAINER)})
        hooks = "data" if self._does else "trainers"
        used = DataServiceSettings(**{"startup_timeout_s": TIMEOUT_S, "hooks": hooks, **settings})
        connection = ServiceConnection([f"127.0.0.1:{self.topology.data_port}"], used, job.name, is_of_job=True)
        return RemoteDataModule(Serving(self._does), connection)

    def connected(self) -> LightningDataModule:
        """Return the trainer's DataModule after its first batch."""
        module = self.module()
        module.setup("fit")
        next(iter(module.train_dataloader()))
        return module

    def opening(self) -> LightningDataModule:
        """Return the DataModule of a trainer for which the data host is in setup()."""
        module = self.module(startup_timeout_s=0.1)
        with pytest.raises(DataHostUnreachableError):  # the call stays open
            module.setup("validate")
        self.until_log("downloading")
        return module

    def end(self) -> int:
        """Wait for the data host, and return its exit code."""
        self._process.join(TIMEOUT_S)
        assert self._process.exitcode is not None, f"the data host has not exited within {TIMEOUT_S} s:\n{self.log()}"
        return self._process.exitcode

    def close(self) -> None:
        """Kill what is left, and print the log, which pytest shows if the test fails."""
        if self._process is not None:
            if self._process.exitcode is None:
                self._process.kill()
            self._process.join(TIMEOUT_S)
            self._process.close()
        sys.stdout.write(self.log())


def _serve(env: dict[str, str], log: Path, settings: dict[str, Any]) -> None:
    """The last lines of a user's script, on a data host."""
    _redirect(log)
    _use(env)
    show_log_lines()
    job = SageMakerJob.from_environment()
    service.serve(job, Topology.from_job(job), DataServiceSettings(**settings))


def _use(env: dict[str, str]) -> None:
    # This process was forked from a server, whose variables are those of an earlier test.
    os.environ.clear()
    os.environ.update(env)


def _redirect(log: Path) -> None:
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


@contextlib.contextmanager
def training_process(
    make: Callable[[], Any], address: str | None, pids: Path
) -> Iterator[tuple[Any, psutil.Process, psutil.Process]]:
    """Run a process that trains until killed; yield it, its feeder, and the main process of its data host or a child.

    Args:
        make: Returns the loaders.
        address: Address of the data host, with a forked child; None: the process starts a data host itself.
        pids: File for the ids of the processes.
    """
    script = _FORKS.Process(target=_train, args=({**os.environ}, make, address, pids))
    script.start()
    try:
        until(pids.exists, "the script trains", TIMEOUT_S)
        feeder, other = (psutil.Process(int(pid)) for pid in pids.read_text().split())
        yield script, feeder, other
    finally:
        script.kill()
        script.join(TIMEOUT_S)
        script.close()


def _train(env: dict[str, str], make: Callable[[], Any], address: str | None, pids: Path) -> None:
    _use(env)
    with contextlib.ExitStack() as stack:
        own = None if address else stack.enter_context(running(Host("own")))[0]
        module = stack.enter_context(remote([own or address], Data(make)))
        next(iter(module.train_dataloader()))
        other = os.fork() if own is None else own.main.pid
        if other:
            written = pids.with_suffix(".part")
            written.write_text(f"{module._service_connection.feeder._process.pid} {other}")
            written.rename(pids)
        time.sleep(TIMEOUT_S)
        os._exit(0)


# A user's script whose data host fails in the way and at the place that the environment names.
TRAIN = """
import os, signal
from pathlib import Path
from torch.utils.data import DataLoader, TensorDataset
from lightning_sm import SageMakerCLI
from tests.fakes.small_app import SmallData, SmallModel

def reached(place, pid):
    if os.environ["BROKEN_PLACE"] != place:
        return
    if os.environ["BROKEN_HOW"] == "raises":
        raise ValueError("no such column")
    marker = Path(os.environ["SAGEMAKER_BASE_DIR"], "died")
    if not marker.exists():
        marker.touch()
        os.kill(pid, getattr(signal, os.environ["BROKEN_HOW"]))
        # A worker that continued could finish the training before it notices that the main process is gone.
        signal.pause()

class Points(TensorDataset):
    def __getitem__(self, index):
        if index == 5:
            reached("__getitem__", os.getppid())
        return super().__getitem__(index)

class Data(SmallData):
    def setup(self, stage):
        reached("setup", os.getpid())

    def train_dataloader(self):
        reached("train_dataloader", os.getpid())
        return DataLoader(Points(*super()._loader().dataset.tensors), batch_size=self.batch_size)

if __name__ == "__main__":
    SageMakerCLI(SmallModel, Data, save_config_callback=None)
"""

# Needs no torch, for tests of the launcher alone.
KILLED = "import os, signal, sys\nprint('started', file=sys.stderr, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"


class Launchers(Hosts):
    """The launchers of a trainer host and a data host, whose output goes to files.

    Args:
        folder: Parent of the hosts' folders.
        script: The script that they run.
    """

    def __init__(self, folder: Path, script: str) -> None:
        folder.mkdir(exist_ok=True)
        super().__init__(folder, GROUPS)
        (self.folder / "train.py").write_text(script)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, host: str, *arguments: str, **variables: str) -> None:
        """Start the launcher of a host."""
        with (self.folder / f"{host}.log").open("w") as log:
            self.processes[host] = subprocess.Popen(
                [sys.executable, "-m", "lightning_sm", "train", "train.py", *arguments],
                cwd=self.folder,
                env={**self.env(host), **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def fit(self, hosts: Iterable[str], how: str = "", place: str = "", *arguments: str) -> None:
        """Start a training on some of the hosts."""
        common = ["fit", "--trainer.max_epochs=2", "--trainer.accelerator=cpu", "--data_service.workers=1"]
        common += ["--data_service.hooks=data"] if place in ("setup", "train_dataloader") else []
        for host in hosts:
            self.start(host, *common, *arguments, BROKEN_HOW=how, BROKEN_PLACE=place)

    def code(self, host: str) -> int:
        """Wait for a launcher, and return its exit code."""
        try:
            return self.processes[host].wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{host} has not exited within {TIMEOUT_S} s:\n{self.log(host)}") from None

    def log(self, host: str) -> str:
        """Return the output of a host so far."""
        return (self.folder / f"{host}.log").read_text()

    def failure(self, host: str) -> str | None:
        """Return the content of a host's failure file; None if there is none."""
        path = Path(self.folder / host / "output" / "failure")
        return path.read_text() if path.exists() else None

    def close(self) -> None:
        """Kill what is left."""
        for process in self.processes.values():
            if process.poll() is None:
                for one in [*psutil.Process(process.pid).children(recursive=True), process]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.kill()
            process.wait(TIMEOUT_S)


# Random faults


class Chaos:
    """Injects random faults into hosts, and spares at least one host at any time.

    Args:
        chance: Random generator that chooses the faults.
        hosts: The hosts.
        flags: Folder of the files that make hosts slow.
        starter: Pool that restarts hosts.
        num_steps: Length of the stream.
        num_actions: Number of faults.

    Attributes:
        starting: Hosts that are restarting, by name.
        log: Step, action and host of every fault.
    """

    def __init__(
        self,
        chance: random.Random,
        hosts: Sequence[Host],
        flags: Path,
        starter: ThreadPoolExecutor,
        num_steps: int,
        num_actions: int,
    ) -> None:
        self.starting: dict[str, Future[Host]] = {}
        self.log: list[tuple[int, str, str]] = []
        self._chance = chance
        self._hosts = hosts
        self._flags = flags
        self._starter = starter
        self._steps = sorted(chance.sample(range(5, num_steps - 5), num_actions))
        self._frozen: dict[str, int] = {}  # last step of the freeze, by name
        self._crippled: set[str] = set()

    def act(self, step: int) -> None:
        """Inject the faults that are due at a step."""
        for name in [name for name, last in self._frozen.items() if last <= step]:
            self._host(name).signal(signal.SIGCONT)
            del self._frozen[name]
        for name in [name for name, start in self.starting.items() if start.done()]:
            self.starting.pop(name).result()
        if step in self._steps:
            host = self._chance.choice(self._hosts)
            actions = (
                ["slow", "fast"] if self._is_away(host) else ["slow", "fast", "worker", "network", "freeze_worker"]
            )
            others = [other for other in self._hosts if other is not host]
            if not self._is_away(host) and not all(map(self._is_away, others)):
                actions += ["crash", "freeze"] * 2
            action = self._chance.choice(actions)
            self.log.append((step, action, host.name))
            with contextlib.suppress(psutil.NoSuchProcess, IndexError, StopIteration):
                getattr(self, f"_{action}")(host, step)

    def _host(self, name: str) -> Host:
        return next(host for host in self._hosts if host.name == name)

    def _is_away(self, host: Host) -> bool:
        return host.name in self._frozen or host.name in self.starting

    def _worker(self, host: Host, _: int) -> None:
        self._chance.choice(host.workers).kill()

    def _freeze_worker(self, host: Host, _: int) -> None:
        # The other worker continues: a host whose workers are all frozen is as good as frozen itself.
        if host.name not in self._crippled:
            self._crippled.add(host.name)
            self._chance.choice(host.workers).suspend()

    def _network(self, host: Host, _: int) -> None:
        host.network.kill()

    def _crash(self, host: Host, _: int) -> None:
        host.kill()
        self._crippled.discard(host.name)
        self.starting[host.name] = self._starter.submit(host.start)

    def _freeze(self, host: Host, step: int) -> None:
        host.signal(signal.SIGSTOP)
        self._frozen[host.name] = step + self._chance.randrange(5, 100)

    def _slow(self, host: Host, _: int) -> None:
        (self._flags / f"slow-{host.name}").touch()

    def _fast(self, host: Host, _: int) -> None:
        (self._flags / f"slow-{host.name}").unlink(missing_ok=True)


# What may be left


def until_gone(processes: Iterable[psutil.Process], what: str, timeout_s: float = 60.0) -> None:
    """Wait until processes have exited, even if they are not children of this one."""
    processes = list(processes)
    until(lambda: not any(map(_is_alive, processes)), f"{what} have ended", timeout_s)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until_session_gone(session: int) -> None:
    """Wait until all processes of a session have exited."""
    until(
        lambda: not [one for one in psutil.process_iter() if _is_alive(one) and _session_of(one) == session],
        f"all processes of session {session} have ended",
        TIMEOUT_S,
    )


def _session_of(process: psutil.Process) -> int | None:
    with contextlib.suppress(ProcessLookupError):
        return os.getsid(process.pid)
    return None


def left_here() -> tuple[set[int], int, int]:
    """Return the feeders of this process, and its numbers of sockets and of pieces of shared memory."""
    gc.collect()
    children = {child.pid for child in psutil.Process().children(recursive=True) if _is_feeder(child)}
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    maps = Path("/proc/self/maps").read_text().count("memfd:lightning_sm")
    return children, sum(link.startswith(("socket:", "pipe:", "/memfd:")) for link in links), maps


def _is_feeder(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any("data.feeder" in part for part in process.cmdline())
    return False


def connections(host: psutil.Process) -> list[Any]:
    """Return the trainers' connections to a data host."""
    found = []
    for child in host.children():
        with contextlib.suppress(psutil.Error):
            if any("data.server" in part for part in child.cmdline()):
                found += [one for one in child.net_connections("tcp") if one.status == "ESTABLISHED"]
    return found


def shared_memory() -> set[tuple[str, int]]:
    """Return name and inode of every file and semaphore in /dev/shm, except torch's.

    torch's files have a name only for a moment, but remain if another test kills a DataLoader's worker in that moment.
    """
    found = set()
    for path in Path("/dev/shm").iterdir():
        with contextlib.suppress(FileNotFoundError):  # Removed meanwhile.
            if not path.is_dir() and not path.name.startswith("torch_"):
                found.add((path.name, path.stat().st_ino))
    return found


def unused(memory: Iterable[tuple[str, int]]) -> list[str]:
    """Return the names of files that no process has mapped, by inode: semaphores are renamed after they are mapped."""
    memory = list(memory)
    mapped = _inodes_in_use() if memory else set()
    return [name for name, inode in memory if inode not in mapped]


def _inodes_in_use() -> set[int]:
    inodes = set()
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):  # The process has exited, or belongs to another user.
            lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            inodes.update(int(line.split()[4]) for line in lines if "/dev/shm/" in line)
    return inodes
