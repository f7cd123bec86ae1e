"""Helpers for the benchmarks of the data service: emulated hosts on separate cores, new processes, medians.

A benchmark runs its variants in turn, each in a new process (``in_child``), so that no variant affects the next. In
that process, ``service`` starts data hosts on some cores and a RemoteDataModule on others, connected over loopback.
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
    """Parse a list of cores such as ``0,1``."""
    return [int(core) for core in text.split(",")]


def halves() -> tuple[list[int], list[int]]:
    """Return the two halves of the cores of this process, or the only core twice."""
    own = sorted(os.sched_getaffinity(0))
    half = max(1, len(own) // 2)
    return own[:half], own[half:] or own


def parser(description: str, *, rounds: int, seconds: float | None = None) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks share.

    Args:
        description: What the benchmark measures.
        rounds: Default of ``--rounds``.
        seconds: Default of ``--seconds``; None omits this option.
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
    """Restrict this thread, and processes started within the block, to some cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def in_child(function: Callable[..., Any], **arguments: Any) -> Any:
    """Run a function of a benchmark in a new process, and return its result.

    Args:
        function: Top-level function of a module, whose result can be encoded as JSON.
        **arguments: Arguments that can be encoded as JSON.

    Raises:
        RuntimeError: The function failed; its error is on stderr.
    """
    path = Path(sys.modules[function.__module__].__file__ or "").resolve()
    command = [sys.executable, str(Path(__file__).resolve()), path.stem, function.__name__, json.dumps(arguments)]
    lifeline, ours = os.pipe()  # if this process exits, the child's stdin closes, and it exits, too
    process = subprocess.Popen(command, stdin=lifeline, stdout=subprocess.PIPE, text=True)
    os.close(lifeline)
    try:
        output, _ = process.communicate(timeout=_CHILD_TIMEOUT_S)
    except BaseException:
        process.terminate()  # before kill, so that it can resume the processes that it has frozen
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
    """Format the median, with the smallest and largest value in parentheses."""
    median, least, most = statistics.median(values), min(values), max(values)
    return f"{median:.{digits}f} ({least:.{digits}f}-{most:.{digits}f})"


def ratio(values: Sequence[float], others: Sequence[float], digits: int = 2) -> str:
    """Format the ratio of the medians, with the smallest and largest ratio within a round in parentheses."""
    pairs = [value / other for value, other in zip(values, others, strict=True)]
    median = statistics.median(values) / statistics.median(others)
    return f"{median:.{digits}f} ({min(pairs):.{digits}f}-{max(pairs):.{digits}f})"


def machine() -> str:
    """Describe the machine and the versions, for the heading of a table of results."""
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
        """Process id of the feeder, which the first iterator starts."""
        return int(self.remote._service_connection.feeder._process.pid)

    def server_pids(self) -> list[int]:
        """Return the ids of all processes of the data hosts."""
        return [pid for host in self.hosts for pid in host_pids(host)]


def host_pids(host: DataHost) -> list[int]:
    """Return the ids of all processes of a data host, with its main process first."""
    return [host.pid, *(child.pid for child in psutil.Process(host.pid).children(recursive=True))]


@contextlib.contextmanager
def data_hosts(environments: Sequence[dict[str, str]], cores: Cores, workers: int) -> Iterator[list[DataHost]]:
    """Run one data host per environment, all on the same cores."""
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
    """Run one data host per environment, and make a training loader on the trainer's cores."""
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
    """Turn this process into a training process on some cores, with one torch thread and without warnings."""
    import torch

    os.sched_setaffinity(0, cores)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)


@contextlib.contextmanager
def frozen(host: DataHost) -> Iterator[None]:
    """Freeze all processes of a data host within the block, and resume them afterwards so that they can exit."""
    pids = host_pids(host)
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def sleep_s(seconds: float) -> None:
    """Simulate a transform or a training step without using a core."""
    time.sleep(seconds)  # there is no event to wait for


def busy_step(units: int) -> None:
    """Do a fixed amount of work, half in the interpreter and half in matrix products."""
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
