"""Rivals on the same data and transform, three worker processes each: start, samples/s, and a worker that is killed.

    DataLoader        torch's own, with 3 workers.
    lightning_sm      one data host with 3 workers, or two with 2 and 1.
    seed              a server with such a DataLoader; it streams protobuf batches over gRPC as in the AWS sample. It
                      forks workers from a process that runs gRPC, which often kills them (grpc issue 32992); hence
                      once more with the start method forkserver.
    Ray Data          range, map, streaming_split(1, equal=True), with 3 CPUs.
    tf.data service   a dispatcher and 3 worker processes, ShardingPolicy.DYNAMIC, that is each sample at most once. As
                      documented, and with a way round its lack of Python transforms (see rivals_tf.py).

A sample is 3x32x32 uint8, made from its index; the transform is about 1 ms of NumPy in one thread. The order of samples
does not count. Each run is a fresh process: an epoch for the times, and one with a SIGKILL to a worker after a quarter.
A sample carries its index and the worker that made it, so that lost and repeated ones can be counted. Settings are the
rivals' defaults.

Ray and TensorFlow need environments of their own; what is not given is left out.

    python benchmarks/rivals.py
    python benchmarks/rivals.py --ray-python ray-env/bin/python --tf-python tf-env/bin/python --rounds 3
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
import itertools
import json
import os
import platform
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

import numpy as np

BATCH_SIZE, NUM_WORKERS = 64, 3
SHAPE = (3, 32, 32)
NUM_FILTERS = 9  # so that the transform takes about 1 ms
STEADY_FROM, STEADY_TO = 0.15, 0.85  # the part of the batches of an epoch that counts for samples/s
KILL_AT = 0.25  # of an epoch
KILL_TIMEOUT_S = 30.0  # an epoch that does not end by then counts as hanging
RUN_TIMEOUT_S = 150.0  # without that
STOP_TIMEOUT_S = 20.0

# The indices of a batch, the workers that made its samples, and the samples.
Batch = tuple["np.ndarray", "np.ndarray", "np.ndarray"]
Epoch = Callable[[], Iterable[Batch]]
# Runs all processes of a rival; what it yields runs an epoch.
Opener = Callable[[int], AbstractContextManager[Epoch]]


@dataclass(frozen=True)
class Rival:
    """Where to find a rival.

    Attributes:
        interpreter: Option that names its interpreter; empty: that of this script.
        opener: Its ``Opener``, as in ``module:function``.
        imports: What the consuming process imports, apart from the opener's module.
        packages: Whose versions are reported.
    """

    interpreter: str
    opener: str
    imports: tuple[str, ...]
    packages: tuple[str, ...]


RIVALS = {
    "torch DataLoader": Rival("", "rivals_torch:local", ("torch.utils.data",), ("torch",)),
    "lightning_sm, 1 host x 3": Rival(
        "", "rivals_torch:one_host", ("lightning_sm.data.trainer.datamodule",), ("pytorch-lightning", "grpcio")
    ),
    "lightning_sm, hosts x 2 and 1": Rival(
        "", "rivals_torch:two_hosts", ("lightning_sm.data.trainer.datamodule",), ("pytorch-lightning", "grpcio")
    ),
    "seed": Rival("", "rivals_torch:seed", ("torch", "grpc", "google.protobuf"), ("torch", "grpcio", "protobuf")),
    "seed, forkserver": Rival("", "rivals_torch:seed_forkserver", ("torch", "grpc", "google.protobuf"), ("protobuf",)),
    "Ray Data": Rival("ray_python", "rivals_ray:ray_data", ("ray.data",), ("ray", "pyarrow")),
    "tf.data service": Rival("tf_python", "rivals_tf:stock", ("tensorflow",), ("tensorflow-cpu",)),
    "tf.data service, way round": Rival("tf_python", "rivals_tf:registered", ("tensorflow",), ("tensorflow-cpu",)),
}


def raw(index: int) -> np.ndarray:
    """Return the sample of an index, the same in every process."""
    return np.random.default_rng(index).integers(0, 256, SHAPE, np.uint8)


def transformed(sample: np.ndarray) -> np.ndarray:
    """Convolve a sample with some filters in turn, by FFT, and normalise it."""
    rows, columns = np.meshgrid(np.arange(SHAPE[1]), np.arange(SHAPE[2]), indexing="ij")
    values = sample.astype(np.float64)
    for width in range(1, NUM_FILTERS + 1):
        kernel = np.exp(-(rows**2 + columns**2) / width)
        values = np.fft.irfft2(np.fft.rfft2(values) * np.fft.rfft2(kernel / kernel.sum()), SHAPE[1:])
    return np.asarray((values - values.mean()) / values.std(), np.float32)


def made(index: int) -> tuple[np.ndarray, int]:
    """Return the transformed sample of an index, and the process that made it."""
    return transformed(raw(index)), os.getpid()


class Tally:
    """What came in an epoch, and when."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.indices: list[int] = []
        self.arrivals: list[tuple[float, int]] = []  # time, and number of samples so far

    def add(self, batch: Batch) -> None:
        """Count a batch that has just come."""
        self.indices += batch[0].tolist()
        self.arrivals.append((time.monotonic(), len(self.indices)))

    def rate(self) -> float:
        """Return samples/s, without the beginning and the end."""
        count = len(self.arrivals)
        (began, before), (ended, after) = self.arrivals[int(STEADY_FROM * count)], self.arrivals[int(STEADY_TO * count)]
        return (after - before) / (ended - began)

    def faults(self) -> dict[str, int]:
        """Return the number of samples that did not come, and that came again."""
        counts = collections.Counter(self.indices)
        return {"lost": self.num_samples - len(counts), "repeated": len(self.indices) - len(counts)}

    def longest_wait_s(self, since: float, until: float) -> float:
        """Return the longest time without a batch between two times."""
        times = [since, *(when for when, _ in self.arrivals if when > since), until]
        return max(after - before for before, after in itertools.pairwise(times))


class Report:
    """Writes the result of a run once: from the main thread, or after a deadline from another one."""

    def __init__(self, descriptor: int) -> None:
        self.facts: dict[str, Any] = {}
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self.written = False

    def write(self, **more: Any) -> None:
        """Write what is known, unless that was done."""
        with self._lock:
            if not self.written:
                os.write(self._descriptor, json.dumps({**self.facts, **more}).encode() + b"\n")
            self.written = True


def run_child(job: dict[str, Any]) -> None:
    """Measure one rival in this process, report, and stop its processes when stdin is closed."""
    report, closed = Report(job["descriptor"]), threading.Event()
    threading.Thread(target=_watch_stdin, args=(report, closed), daemon=True).start()
    rival = RIVALS[job["rival"]]
    for module in rival.imports:
        importlib.import_module(module)
    module, name = rival.opener.split(":")
    opener: Opener = getattr(importlib.import_module(module), name)
    report.facts["import_s"] = time.monotonic() - job["launched"]
    report.facts["versions"] = [f"{package} {version(package)}" for package in (*rival.packages, "numpy")]
    with opener(job["num_samples"]) as epoch:
        report.facts["service_s"] = time.monotonic() - job["launched"]
        try:
            _measure(epoch, job, report)
        except Exception as error:  # noqa: BLE001  # a rival's failure is a result
            report.write(outcome=_text(error))
        closed.wait()


def _watch_stdin(report: Report, closed: threading.Event) -> None:
    os.read(0, 1)
    if not report.written:  # the parent is gone
        os._exit(1)
    closed.set()


def _text(error: BaseException) -> str:
    details = getattr(error, "details", None)  # of gRPC
    text = details() if callable(details) else str(error)
    return f"{type(error).__name__}: {text.strip()}"


def _measure(epoch: Epoch, job: dict[str, Any], report: Report) -> None:
    tally, facts = Tally(job["num_samples"]), report.facts
    for batch in epoch():
        tally.add(batch)
        if len(tally.arrivals) == 1:
            facts["first_s"] = tally.arrivals[0][0] - job["launched"]
            if not np.array_equal(batch[2][0], transformed(raw(int(batch[0][0])))):
                raise ValueError("another sample than expected")
    facts["rate"], facts["undisturbed"] = tally.rate(), tally.faults()
    _kill_one(epoch, job, report)


def _kill_one(epoch: Epoch, job: dict[str, Any], report: Report) -> None:
    tally, killed = Tally(job["num_samples"]), 0.0

    def result(outcome: str) -> dict[str, Any]:
        if not killed:
            return {"outcome": f"before the kill {outcome}"}
        now = time.monotonic()
        wait_s = tally.longest_wait_s(killed, now)
        return {"outcome": outcome, "after_s": now - killed, "wait_s": wait_s, **tally.faults()}

    deadline = threading.Timer(job["kill_timeout_s"], lambda: report.write(**result("hangs")))
    deadline.daemon = True
    try:
        for batch in epoch():
            tally.add(batch)
            if not killed and len(tally.indices) >= KILL_AT * tally.num_samples:
                killed = time.monotonic()
                os.kill(int(batch[1][-1]), signal.SIGKILL)
                deadline.start()
        outcome = "goes on"
    except Exception as error:  # noqa: BLE001  # what the rival raises is the result
        outcome = _text(error)
    deadline.cancel()
    report.write(**result(outcome))


def run(name: str, python: str, num_samples: int, kill_timeout_s: float) -> dict[str, Any]:
    """Measure a rival in a fresh process, and leave no process of it."""
    import psutil

    ours, theirs = os.pipe()
    with (
        tempfile.TemporaryDirectory(prefix="rivals") as folder,
        tempfile.TemporaryFile("w+") as log,
        open(ours) as pipe,
    ):
        job = {"rival": name, "num_samples": num_samples, "kill_timeout_s": kill_timeout_s, "descriptor": theirs}
        job["launched"] = time.monotonic()
        process = subprocess.Popen(
            [python, str(Path(__file__).resolve()), "--child", json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=[theirs],
            env={**os.environ, "TMPDIR": folder, "RAY_TMPDIR": folder, **_ONE_THREAD, **_NO_TELEMETRY},
        )
        os.close(theirs)
        tree: list[psutil.Process] = []
        try:
            line = pipe.readline() if select.select([ours], [], [], RUN_TIMEOUT_S + kill_timeout_s)[0] else ""
            with contextlib.suppress(psutil.NoSuchProcess):
                tree = psutil.Process(process.pid).children(recursive=True)
            if line and json.loads(line)["outcome"] != "hangs":
                _close(process)
        finally:
            process.kill()
            process.communicate()
            for other in tree:
                with contextlib.suppress(psutil.NoSuchProcess):
                    other.kill()
            psutil.wait_procs(tree, STOP_TIMEOUT_S)
        if not line:
            raise RuntimeError(f"{name} did not report:\n{_tail(log)}")
        return dict(json.loads(line))


# Three workers use three cores: no library may start threads for the arithmetic.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
_NO_TELEMETRY = {"RAY_USAGE_STATS_ENABLED": "0"}


def _close(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()
        process.stdin = None
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT_S)


def _tail(log: IO[str]) -> str:
    log.seek(0)
    return log.read()[-4000:]


@contextlib.contextmanager
def children(commands: Sequence[Sequence[str]]) -> Iterator[list[str]]:
    """Run processes that end when their stdin is closed, and yield the line that each writes when it is ready."""
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for command in commands]
    try:
        lines = [process.stdout.readline() for process in processes]  # type: ignore[union-attr]  # they are pipes
        if not all(lines):
            raise RuntimeError("a server did not start")
        yield [line.decode().strip() for line in lines]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def end_with_parent() -> None:
    """End this process when its stdin is closed."""
    threading.Thread(target=lambda: (os.read(0, 1), os._exit(0)), daemon=True).start()


def rows(results: dict[str, list[dict[str, Any]]]) -> Iterator[list[str]]:
    """Yield the rows of the table: medians and spreads, and what the kills led to."""
    for name, runs in results.items():
        measured = [result for result in runs if "rate" in result]
        yield [
            name,
            f"{len(measured)} of {len(runs)}",
            *(_spread([result["first_s"] - result.get(since, 0.0) for result in measured]) for since in _SINCE),
            _spread([result["rate"] for result in measured], 0),
            *(_each(runs, key) for key in ("lost", "repeated")),
            *(_each(runs, key, 2) for key in ("wait_s", "after_s")),
            ", ".join(sorted({result["outcome"].partition(":")[0] for result in runs})),
        ]


_SINCE = ("launch", "import_s", "service_s")  # the first is zero


def _spread(values: list[float], digits: int = 2) -> str:
    from data_service import spread

    return spread(values, digits) if values else "-"


def _each(runs: list[dict[str, Any]], key: str, digits: int = 0) -> str:
    return ", ".join(f"{result[key]:.{digits}f}" if key in result else "-" for result in runs)


def main() -> None:
    """Run all rivals in turn, and print a table."""
    parser = argparse.ArgumentParser(
        description="rivals on the same data and transform", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="how often all rivals are run, one after another")
    parser.add_argument("--samples", type=int, default=12_000, help="samples per epoch")
    parser.add_argument("--only", nargs="+", choices=RIVALS, default=list(RIVALS), help="rivals")
    parser.add_argument("--kill-timeout", type=float, default=KILL_TIMEOUT_S, help="after so many seconds it hangs")
    parser.add_argument("--ray-python", help="interpreter of an environment with ray[data]")
    parser.add_argument("--tf-python", help="interpreter of an environment with tensorflow-cpu")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        # By its own name, not as __main__: other processes import what is pickled by reference from there.
        importlib.import_module("rivals").run_child(args.child)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # not without stopping what runs
    _compare({name: RIVALS[name] for name in args.only}, args)


def _compare(rivals: dict[str, Rival], args: argparse.Namespace) -> None:
    from data_service import in_turn
    from tabulate import tabulate

    variants: dict[str, Callable[[], Any]] = {}
    for name, rival in rivals.items():
        python = getattr(args, rival.interpreter) if rival.interpreter else sys.executable
        if python:
            variants[name] = partial(run, name, python, args.samples, args.kill_timeout)
        else:
            sys.stderr.write(f"left out: {name}, as --{rival.interpreter.replace('_', '-')} is not given\n")
    began = time.perf_counter()
    for index in range(200):
        transformed(raw(index))
    sample_ms = (time.perf_counter() - began) / 200 * 1e3
    results = in_turn(variants, args.rounds)
    for name, runs in results.items():
        for result in runs:
            if any(result.get("undisturbed", {}).values()):
                sys.stderr.write(f"{name}, undisturbed epoch: {result['undisturbed']}\n")
            if result["outcome"] != "goes on":
                sys.stderr.write(f"{name}: {result['outcome']}\n")
    headers = ["rival", "whole epochs", "first batch s", "after imports", "after servers' start", "samples/s"]
    headers += ["lost", "repeated", "longest wait s", "end after s", "outcome"]
    versions = sorted({text for runs in results.values() for result in runs for text in result.get("versions", [])})
    facts = f"{len(os.sched_getaffinity(0))} cores, Linux {platform.release()}, Python {platform.python_version()}"
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    sys.stdout.write(f"{facts}, {', '.join(versions)}\n{args.samples} samples of {sample_ms:.2f} ms; load {load}\n")
    sys.stdout.write(tabulate(rows(results), headers=headers, disable_numparse=True) + "\n")


if __name__ == "__main__":
    main()
