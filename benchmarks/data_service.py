"""Shared by the benchmarks of the data service: emulated hosts on separate cores, new processes, medians.

A benchmark runs its variants in turn, each in a new process (``in_child``), so that no variant affects the next. There,
``service`` starts data hosts on some cores and a RemoteDataModule on others, on loopback.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import logging
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from pytorch_lightning import LightningDataModule

    from lightning_sm.data.host.data_host import DataHost

_CHILD_TIMEOUT_S = 170.0
_STOP_TIMEOUT_S = 20.0
Cores = Sequence[int]


def core_list(text: str) -> list[int]:
    """Parse cores, as in ``0,1``."""
    return [int(core) for core in text.split(",")]


def halves() -> tuple[list[int], list[int]]:
    """Return the two halves of the cores of this process, or the only core twice."""
    own = sorted(os.sched_getaffinity(0))
    half = max(1, len(own) // 2)
    return own[:half], own[half:] or own


def parser(description: str, *, rounds: int, seconds: float | None = None) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have.

    Args:
        description: What the benchmark measures.
        rounds: Default of ``--rounds``.
        seconds: Default of ``--seconds``; None: the benchmark does not have this option.
    """
    host_cores, trainer_cores = halves()
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    result.add_argument("--rounds", type=int, default=rounds, help="runs of each variant; the variants take turns")
    result.add_argument("--host-cores", type=core_list, default=host_cores, help="cores of the data hosts")
    result.add_argument("--trainer-cores", type=core_list, default=trainer_cores, help="cores of the trainer's host")
    if seconds is not None:
        result.add_argument("--seconds", type=float, default=seconds, help="length of one run")
    return result


@contextlib.contextmanager
def pinned(cores: Cores) -> Iterator[None]:
    """Restrict this thread, and the processes that it starts in the block, to some cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def in_child(function: Callable[..., Any], **arguments: Any) -> Any:
    """Run a function of a benchmark in a new process, and return its result.

    Args:
        function: A function at the top level of its module that returns JSON values.
        **arguments: JSON values.

    Raises:
        RuntimeError: The function failed; its messages are on stderr.
    """
    path = Path(sys.modules[function.__module__].__file__ or "").resolve()
    command = [sys.executable, str(Path(__file__).resolve()), path.stem, function.__name__, json.dumps(arguments)]
    lifeline, ours = os.pipe()  # the child exits when this process does, because that closes its stdin
    process = subprocess.Popen(command, stdin=lifeline, stdout=subprocess.PIPE, text=True)
    os.close(lifeline)
    try:
        output, _ = process.communicate(timeout=_CHILD_TIMEOUT_S)
    except BaseException:
        process.terminate()  # first, so that it resumes the processes that it has frozen
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_STOP_TIMEOUT_S)
        process.kill()
        process.communicate()
        raise
    finally:
        os.close(ours)
    if process.returncode:
        raise RuntimeError(f"{function.__name__}({arguments}) exited with code {process.returncode}")
    return json.loads(output.splitlines()[-1])


def in_turn(variants: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
    """Run all variants in turn for a number of rounds, and return the results of each."""
    results: dict[str, list[Any]] = {name: [] for name in variants}
    for number in range(rounds):
        for name, run in variants.items():
            started = time.perf_counter()
            results[name].append(run())
            sys.stderr.write(f"round {number + 1}, {name}: {time.perf_counter() - started:.0f} s\n")
    return results


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return the median, and the smallest and largest value in parentheses."""
    median, least, most = statistics.median(values), min(values), max(values)
    return f"{median:.{digits}f} ({least:.{digits}f}-{most:.{digits}f})"


def ratio(values: Sequence[float], others: Sequence[float], digits: int = 2) -> str:
    """Return the ratio of the medians, and the smallest and largest ratio within a round."""
    pairs = [value / other for value, other in zip(values, others, strict=True)]
    median = statistics.median(values) / statistics.median(others)
    return f"{median:.{digits}f} ({min(pairs):.{digits}f}-{max(pairs):.{digits}f})"


def machine() -> str:
    """Return the machine and the versions that belong to a table of results."""
    text = Path("/proc/cpuinfo").read_text()
    model = re.search(r"model name\s*: (.*)", text)
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "grpcio", "pytorch-lightning", "numpy"))
    cores = f"{len(os.sched_getaffinity(0))} cores of {model[1] if model else platform.machine()}"
    return f"{cores}, Linux {platform.release()}, Python {platform.python_version()}, {packages}\n"


@dataclass
class Service:
    """Data hosts, and the loader of a RemoteDataModule that receives their batches."""

    hosts: list[DataHost]
    remote: Any
    loader: Any

    @property
    def feeder_pid(self) -> int:
        """Process id of the feeder, which starts with the first iterator."""
        return int(self.remote._connection.feeder.pid)

    def server_pids(self) -> list[int]:
        """Return all processes of the data hosts."""
        return [pid for host in self.hosts for pid in host_pids(host)]


def host_pids(host: DataHost) -> list[int]:
    """Return all processes of a data host; its main process comes first."""
    return [host.pid, *(child.pid for child in psutil.Process(host.pid).children(recursive=True))]


@contextlib.contextmanager
def data_hosts(environments: Sequence[dict[str, str]], cores: Cores, workers: int) -> Iterator[list[DataHost]]:
    """Run a data host with each of some environments, all on the same cores."""
    from lightning_sm.data.host.data_host import DataHost

    with contextlib.ExitStack() as stack:
        with pinned(cores):
            hosts = []
            for environment in environments:
                os.environ.update(environment)
                hosts.append(stack.enter_context(DataHost(workers=workers)))
        yield hosts


@contextlib.contextmanager
def service(
    datamodule: LightningDataModule,
    workers: int,
    host_cores: Cores,
    trainer_cores: Cores,
    *,
    environments: Sequence[dict[str, str]] = ({},),
) -> Iterator[Service]:
    """Run data hosts, one with each of some environments, and make a training loader on the trainer's cores."""
    from lightning_sm.data.trainer.datamodule import RemoteDataModule

    prepare(trainer_cores)
    with data_hosts(environments, host_cores, workers) as hosts:
        remote: Any = RemoteDataModule(datamodule, [host.address for host in hosts])
        remote.setup("fit")
        try:
            yield Service(hosts, remote, remote.train_dataloader())
        finally:
            remote.teardown("fit")


def prepare(cores: Cores) -> None:
    """Make the current process a training process: on these cores, with one thread for torch, and without warnings."""
    import torch

    os.sched_setaffinity(0, cores)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)


@contextlib.contextmanager
def frozen(host: DataHost) -> Iterator[None]:
    """Stop all processes of a data host in the block, and resume them after it, so that they can exit."""
    pids = host_pids(host)
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def sleep_s(seconds: float) -> None:
    """Wait without using a core: a simulated transform or training step."""
    time.sleep(seconds)  # the time itself is simulated: there is no event to wait for


def busy_step(units: int) -> None:
    """Do a fixed amount of work: half in the interpreter, half in matrix products."""
    import torch

    matrix = torch.rand(128, 128)
    for _ in range(units):
        work_unit(matrix)


def work_unit(matrix: Any) -> None:
    """Use the interpreter for about 0.1 ms, and multiply matrices for 0.1 ms, which releases the GIL."""
    total = 0
    for number in range(2000):
        total += number & 7
    for _ in range(3):
        matrix @ matrix  # only its time counts


def _main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    module, function, arguments = sys.argv[1:]
    result = getattr(importlib.import_module(module), function)(**json.loads(arguments))
    sys.stdout.write(json.dumps(result) + "\n")


def _end_with_parent() -> None:
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    _main()
