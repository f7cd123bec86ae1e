"""What the matrix of faults injects faults into: data hosts of a job and launchers, and what they may leave behind."""

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

# Its processes start with torch and Lightning, which take seconds to import.
_FORKS = multiprocessing.get_context("forkserver")


def start_forks() -> None:
    """Start the process that forks the processes of ``Job``; it stays until the tests end."""
    _FORKS.set_forkserver_preload([__name__])
    forkserver.ensure_running()


class Serving(SmallData):
    """Two batches.

    Args:
        does: ``raises``: setup() fails; ``waits``: setup("validate") says so and does not return.
    """

    def __init__(self, does: str = "") -> None:
        super().__init__()
        self._does = does

    def setup(self, stage: str) -> None:
        """Do it."""
        if self._does == "raises":
            raise ValueError("no such column")
        if self._does == "waits" and stage == "validate":
            os.write(1, b"downloading\n")
            time.sleep(TIMEOUT_S)


class Job:
    """The data host of a job as a user's script has it, without a launcher; this process is the trainer.

    Args:
        folder: Where the hosts have their folders.
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
            settings: Of the data service.
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
        """What the data host has written until now."""
        return self._log.read_text() if self._log.exists() else ""

    def until_log(self, text: str) -> None:
        """Wait until the data host has written a text."""
        until(lambda: text in self.log(), f"the data host says {text!r}", TIMEOUT_S)

    def until_handled(self, signum: int) -> None:
        """Wait until the data host handles a signal, which would end it before."""
        until(lambda: self._handles(signum), f"the data host handles signal {signum}", TIMEOUT_S)

    def _handles(self, signum: int) -> bool:
        fields = Path(f"/proc/{self.main.pid}/status").read_text().splitlines()
        caught = next(line.split()[1] for line in fields if line.startswith("SigCgt:"))
        return bool(int(caught, 16) >> (signum - 1) & 1)

    def module(self, **settings: Any) -> LightningDataModule:
        """The DataModule of the trainer, whose hooks data hosts run if they are to do something."""
        job = SageMakerJob.from_environment({**self.env, "SAGEMAKER_BASE_DIR": str(self._folder / TRAINER)})
        hooks = "data" if self._does else "trainers"
        used = DataServiceSettings(**{"startup_timeout_s": TIMEOUT_S, "hooks": hooks, **settings})
        connection = ServiceConnection([f"127.0.0.1:{self.topology.data_port}"], used, job.name, is_of_job=True)
        return RemoteDataModule(Serving(self._does), connection)

    def connected(self) -> LightningDataModule:
        """The DataModule of the trainer, after its first batch."""
        module = self.module()
        module.setup("fit")
        next(iter(module.train_dataloader()))
        return module

    def opening(self) -> LightningDataModule:
        """The DataModule of a trainer for which the data host is in setup()."""
        module = self.module(startup_timeout_s=0.1)
        with pytest.raises(DataHostUnreachableError):  # the call stays open
            module.setup("validate")
        self.until_log("downloading")
        return module

    def end(self) -> int:
        """Wait for the data host; its exit code."""
        self._process.join(TIMEOUT_S)
        assert self._process.exitcode is not None, f"the data host has not exited within {TIMEOUT_S} s:\n{self.log()}"
        return self._process.exitcode

    def close(self) -> None:
        """Kill what is left; pytest shows what it said if the test failed."""
        if self._process is not None:
            if self._process.exitcode is None:
                self._process.kill()
            self._process.join(TIMEOUT_S)
            self._process.close()
        sys.stdout.write(self.log())


def _serve(env: dict[str, str], log: Path, settings: dict[str, Any]) -> None:
    """The last lines of a user's script, on a data host."""
    _redirect(log)
    os.environ.clear()
    os.environ.update(env)
    show_log_lines()
    job = SageMakerJob.from_environment()
    service.serve(job, Topology.from_job(job), DataServiceSettings(**settings))


def _redirect(log: Path) -> None:
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


@contextlib.contextmanager
def training_process(
    make: Callable[[], Any], address: str | None, pids: Path
) -> Iterator[tuple[Any, psutil.Process, psutil.Process]]:
    """A process that trains until it is killed, its feeder, and the main process of its own data host or a child.

    Args:
        make: Returns the loaders.
        address: The data host to train on, with a forked child; None: a data host of its own.
        pids: A file for the ids of its processes.
    """
    script = _FORKS.Process(target=_train, args=(make, address, pids))
    script.start()
    try:
        until(pids.exists, "the script trains", TIMEOUT_S)
        feeder, other = (psutil.Process(int(pid)) for pid in pids.read_text().split())
        yield script, feeder, other
    finally:
        script.kill()
        script.join(TIMEOUT_S)
        script.close()


def _train(make: Callable[[], Any], address: str | None, pids: Path) -> None:
    with contextlib.ExitStack() as stack:
        own = None if address else stack.enter_context(running(Host("own")))[0]
        module = stack.enter_context(remote([own or address], Data(make)))
        next(iter(module.train_dataloader()))
        other = os.fork() if own is None else own.main.pid
        if other:
            written = pids.with_suffix(".part")
            written.write_text(f"{module._connection.feeder.pid} {other}")
            written.rename(pids)
        time.sleep(TIMEOUT_S)
        os._exit(0)


# A user's script whose data host fails in the way, and at the place, that the environment names.
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

# Without torch, for what concerns the launcher alone.
KILLED = "import os, signal, sys\nprint('started', file=sys.stderr, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"


class Launchers(Hosts):
    """The launchers of a trainer host and a data host, with what they write in files.

    Args:
        folder: Where the hosts have their folders.
        script: What they run.
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
        """Wait for a launcher; its exit code."""
        try:
            return self.processes[host].wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{host} has not exited within {TIMEOUT_S} s:\n{self.log(host)}") from None

    def log(self, host: str) -> str:
        """What a host has written until now."""
        return (self.folder / f"{host}.log").read_text()

    def failure(self, host: str) -> str | None:
        """The reason of its failure; None if it left none."""
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
    """Does random things to hosts, and leaves one alone at any time.

    Args:
        chance: Which things.
        hosts: The hosts.
        flags: Folder through which hosts are made slow.
        starter: Starts hosts again.
        num_steps: Length of the stream.
        num_actions: Number of things.

    Attributes:
        starting: Hosts that are being started, by name.
        log: Step, action and host of everything that was done.
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
        self._frozen: dict[str, int] = {}  # until which step, by name
        self._crippled: set[str] = set()

    def act(self, step: int) -> None:
        """Do what is due at a step."""
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
        # The other one continues; a host whose workers are all frozen is as good as frozen itself.
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
    """Wait until processes have ended, some of which are not children of this one."""
    processes = list(processes)
    until(lambda: not any(map(_is_alive, processes)), f"{what} have ended", timeout_s)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until_session_gone(session: int) -> None:
    """Wait until all processes of a session have ended."""
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
    """The feeders of this process, and how many sockets and pieces of shared memory it has."""
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
    """Connections of trainers to a data host."""
    found = []
    for child in host.children():
        with contextlib.suppress(psutil.Error):
            if any("data.server" in part for part in child.cmdline()):
                found += [one for one in child.net_connections("tcp") if one.status == "ESTABLISHED"]
    return found


def shared_memory() -> set[tuple[str, int]]:
    """Name and inode of every file and semaphore in /dev/shm, but for torch's own.

    These have a name for a moment only; a worker of a DataLoader that another test kills in it leaves one.
    """
    found = set()
    for path in Path("/dev/shm").iterdir():
        with contextlib.suppress(FileNotFoundError):  # Removed meanwhile.
            if not path.is_dir() and not path.name.startswith("torch_"):
                found.add((path.name, path.stat().st_ino))
    return found


def unused(memory: Iterable[tuple[str, int]]) -> list[str]:
    """Names of what no process has mapped. Inodes decide: semaphores are renamed after they are mapped."""
    memory = list(memory)
    mapped = _inodes_in_use() if memory else set()
    return [name for name, inode in memory if inode not in mapped]


def _inodes_in_use() -> set[int]:
    inodes = set()
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):  # Has ended, or is another user's.
            lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            inodes.update(int(line.split()[4]) for line in lines if "/dev/shm/" in line)
    return inodes
