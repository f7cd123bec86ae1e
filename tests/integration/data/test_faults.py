"""The matrix of faults: what fails, where and when, and the expected batches, exit codes and messages.

The rows define the tests and a table: ``python -m tests.integration.data.test_faults``. Whatever the row, nothing is
left of killed processes, and the others serve the next training.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pytorch_lightning.callbacks import Callback, EarlyStopping
from torch.utils.data import DataLoader

from lightning_sm.data.ipc.feeder_messages import HostSnapshot
from lightning_sm.data.protocol.calls import HostReport
from lightning_sm.errors import DataHostUnreachableError, DataServiceError, RemoteTransformError
from lightning_sm.job.control_folder import GENTLE_SIGNAL
from tests.fakes.reserved_job import reserve_job
from tests.integration.data import faults
from tests.integration.data.cluster import Host, remote, running, seeded, states, undisturbed
from tests.integration.data.datasets import HOST_VARIABLE, Augmented, Broken, Sharded, stream_hash
from tests.integration.data.fakes import FakeTrainer
from tests.integration.data.faults import DATA, KILLED, TIMEOUT_S, TRAIN, TRAINER, Chaos, Job, Launchers
from tests.integration.data.numbers import NUM_TRAIN, Recorder
from tests.integration.emulators import until
from tests.integration.hosts import SCRIPTS

# torch warns if a loader has more workers than there are cores.
pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore:This DataLoader will create")]

LENGTH, BATCH_SIZE = 400, 4
SAME = "the same batches"
# At the end of a training, the feeder notifies all hosts, and waits 3 s for those that do not answer. Processes take
# longer on a busy machine.
FEW_SECONDS = 30.0


@dataclass(frozen=True)
class Row:
    """One fault of the matrix.

    Attributes:
        fault: What happens.
        where: The process or host that it affects.
        when: The moment.
        trainer: What training processes see.
        data: Exit code of the data hosts that are not killed, or "stay" if they keep running.
        says: Regular expressions for the error, the log or the failure file.
        is_proof: Whether the row only widens the coverage of another one.
    """

    fault: str
    where: str
    when: str
    trainer: str = SAME
    data: str | int = "stay"
    says: tuple[str, ...] = ()
    is_proof: bool = field(default=False, kw_only=True)

    def __str__(self) -> str:
        return f"{self.fault}, {self.where}, {self.when}"

    def line(self) -> str:
        """Return the row of the table."""
        says = "; ".join(f"`{text}`" for text in self.says)
        return f"| {self.fault} | {self.where} | {self.when} | {self.trainer} | {self.data} | {says} |"

    def assert_says(self, text: str) -> None:
        """Assert that a text matches all patterns."""
        assert not [pattern for pattern in self.says if not re.search(pattern, text)], text


def params(rows):
    """Return rows as parameters of a test."""
    return [pytest.param(row, id=str(row), marks=[pytest.mark.proof] if row.is_proof else []) for row in rows]


@pytest.fixture(scope="module")
def _forks():
    """Start the fork server outside of the tests, which it outlives."""
    faults.start_forks()


@pytest.fixture(autouse=True)
def _no_named_memory():
    """No unused file stays in /dev/shm, where nobody would remove it. Other tests may have files there."""
    before = faults.shared_memory()
    yield
    # A file of another test may not be mapped yet, or may be about to be removed.
    until(
        lambda: not faults.unused(faults.shared_memory() - before),
        "/dev/shm holds nothing more that is unused",
        FEW_SECONDS,
    )


# While batches are made: two data hosts, and a trainer in this process


class Scene:
    """Data hosts ``a`` and ``b`` with 1 and 2 workers, a third one that is not running, and a trainer.

    Args:
        hosts: The data hosts by name.
        flags: Folder of the files that control the datasets.
    """

    def __init__(self, hosts: dict[str, Host], flags: Path) -> None:
        self.hosts = hosts
        self.flags = flags
        self.module: Any = None
        self.stack = contextlib.ExitStack()
        self.started: list[Host] = []
        self.acted = 0.0

    def restart_killed(self, names: str) -> None:
        """Restart the hosts that the previous row killed."""
        killed = [self.hosts[name] for name in "ab" if name in names and not self.hosts[name].is_running]
        with ThreadPoolExecutor() as pool:
            list(pool.map(Host.start, killed))

    def start(self, name: str) -> Host:
        """Start a host that is killed at the end of the row."""
        self.started.append(self.hosts[name])
        return self.hosts[name].start()

    def report(self, name: str) -> HostSnapshot:
        """Return the feeder's view of a host."""
        address = self.hosts[name].address
        return next(host for host in states(self.module) if host.name in (name, address))

    def until_up(self, name: str) -> None:
        """Wait until the feeder uses a host."""
        until(lambda: self.report(name).state == "up", f"the feeder reaches host {name}", TIMEOUT_S)

    def until_used(self, name: str, loader: str = "shuffled") -> None:
        """Read epochs until a host has built batches in one."""
        self.until_up(name)
        before = self.report(name).num_received

        def is_used() -> bool:
            list(self.module.train_dataloader()[loader])
            return self.report(name).num_received > before

        until(is_used, f"host {name} makes batches", TIMEOUT_S)

    def close(self) -> None:
        """Stop what the row has started."""
        self.stack.close()
        for host in self.started:
            if host.is_running:
                host.kill()


def nothing(scene: Scene) -> None:
    """Do nothing: the fault is in the data."""


def freeze(scene: Scene) -> None:
    """Stop all processes of host a until the epoch is over."""
    scene.hosts["a"].signal(signal.SIGSTOP)


def thaw(scene: Scene) -> None:
    """Resume host a, and wait until it is used again."""
    scene.hosts["a"].signal(signal.SIGCONT)
    scene.until_used("a")


def freeze_worker(scene: Scene) -> None:
    """Stop one of the two workers of host b."""
    worker = scene.hosts["b"].workers[0]
    worker.suspend()
    scene.stack.callback(worker.kill)


def kill_workers(scene: Scene) -> None:
    """Kill all workers of both hosts."""
    for host in scene.hosts["a"], scene.hosts["b"]:
        for worker in host.workers:
            worker.kill()


def kill_server(scene: Scene) -> None:
    """Kill the gRPC server's process of host a."""
    scene.hosts["a"].network.kill()


def kill_main(scene: Scene) -> None:
    """Kill the main process of host a: its other processes must exit."""
    processes = scene.hosts["a"].processes()
    assert len(processes) >= 3
    scene.hosts["a"].main.kill()
    faults.until_gone(processes, "the processes of host a")


def freeze_and_kill_main(scene: Scene) -> None:
    """Kill the main process of host a while all its processes are stopped."""
    freeze(scene)
    kill_main(scene)


def kill_all(scene: Scene) -> None:
    """Kill both hosts, as when machines are switched off."""
    for name in "ab":
        scene.hosts[name].kill()


def kill_and_return(scene: Scene) -> None:
    """Kill host b, and restart it while the trainer waits."""
    scene.hosts["b"].kill()
    starter = scene.stack.enter_context(ThreadPoolExecutor(1))
    scene.stack.callback(starter.submit(scene.start, "b").result)


def come_late(scene: Scene) -> None:
    """Start host c in the middle of the epoch."""
    scene.start("c")
    scene.until_up("c")


def close_late(scene: Scene) -> None:
    """Close host c, which has built batches: it exits at once, although a trainer is connected."""
    assert scene.report("c").num_received > 0
    processes = scene.hosts["c"].processes()
    began = time.monotonic()
    scene.hosts["c"].close()
    assert time.monotonic() - began < 10  # after 15 s it would be killed
    faults.until_gone(processes, "the processes of host c", 0.0)


def hang_and_close(scene: Scene) -> None:
    """Close both hosts, although the gRPC server's process of host a does not answer."""
    processes = [process for name in "ab" for process in scene.hosts[name].processes()]
    scene.hosts["a"].network.suspend()
    for name in "ab":
        scene.hosts[name].close()
    faults.until_gone(processes, "the processes of both hosts", 0.0)


def kill_feeder(scene: Scene) -> None:
    """Kill the feeder of this rank."""
    os.kill(scene.module._service_connection.feeder._process.pid, signal.SIGKILL)


def break_a_disk(scene: Scene) -> None:
    """Break the disk of the host that reads sample 13 first, once both have opened the dataset, which the row holds."""
    for name in "ab":
        scene.until_used(name, "broken_disk")
    (scene.flags / "break").touch()


def has_failed(scene: Scene) -> None:
    """Assert that a host failed and another one built the batch."""
    assert sum(host.num_retries for host in states(scene.module)) > 0


def train_elsewhere(scene: Scene) -> None:
    """Run a second training on the same hosts."""
    with remote(list(scene.hosts.values())[:2]) as second:
        assert len(list(second.train_dataloader()["shuffled"])) == LENGTH / BATCH_SIZE


def use_again(scene: Scene) -> None:
    """Assert that other passes of the same trainer are unharmed."""
    assert stream_hash(seeded(scene.module.train_dataloader()["shuffled"])) == EXPECTED["shuffled"]


def crash() -> None:
    """Crash as native code does."""
    os.kill(os.getpid(), signal.SIGSEGV)


def fail() -> None:
    """Fail as a transform does."""
    raise KeyError("no label for sample 13")


def make(flags):
    """Return a loader for every kind of failure."""

    def be_killed_once():
        try:
            (flags / "killed").touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    def read_broken_disk():
        if (flags / "break").exists():
            with contextlib.suppress(FileExistsError):
                (flags / "broken").symlink_to(os.environ[HOST_VARIABLE])
            if os.readlink(flags / "broken") == os.environ[HOST_VARIABLE]:
                fail()

    breaks = {"crash": crash, "fail": fail, "broken_disk": read_broken_disk, "killed_once": be_killed_once}
    return {
        "shuffled": DataLoader(Augmented(LENGTH, 0.002), batch_size=BATCH_SIZE, shuffle=True),
        "iterable": DataLoader(Sharded(delay_s=0.002), batch_size=BATCH_SIZE, num_workers=3),
        **{name: DataLoader(Broken(function), batch_size=4) for name, function in breaks.items()},
    }


# The hash of each loader's stream if nothing fails.
EXPECTED: dict[str, str] = {}


@dataclass(frozen=True)
class BatchRow(Row):
    """A fault while a trainer reads batches.

    Attributes:
        act: Injects the fault.
        after: Number of batches before the fault; None: the fault precedes the trainer.
        loader: The loader that the trainer reads.
        hosts: The hosts that the trainer is given; "c" is not running.
        error: The error that the trainer gets instead of the same batches.
        then: Checks what holds afterwards.
        longest_s: Longest time between two batches, or from the fault to the error.
        settings: Settings of the trainer.
    """

    act: Callable[[Scene], None] = field(default=nothing, kw_only=True)
    after: int | None = field(default=20, kw_only=True)
    loader: str = field(default="shuffled", kw_only=True)
    hosts: str = field(default="ab", kw_only=True)
    error: type[Exception] | None = field(default=None, kw_only=True)
    then: Callable[[Scene], None] = field(default=nothing, kw_only=True)
    longest_s: float = field(default=60.0, kw_only=True)
    settings: dict[str, float] = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        if self.error is not None:
            object.__setattr__(self, "trainer", self.error.__name__)


# Rows that need a killed host again come last, because each start takes seconds.
BATCH_ROWS = [
    BatchRow(
        "exception in a transform",
        "all data hosts",
        "a batch",
        says=(
            r"^KeyError: 'no label for sample 13'\non data host .*127\.0\.0\.1:\d+\)?, index 13, worker \d, ",
            r", batch of step 3\nTraceback",
            "in fail",
        ),
        loader="fail",
        after=1,
        error=RemoteTransformError,
        then=use_again,
    ),
    # A host that fails for a sample may have a broken disk, so another host gets a try.
    BatchRow(
        "exception in a transform",
        "one of two data hosts",
        "a batch",
        act=break_a_disk,
        loader="broken_disk",
        after=0,
        then=has_failed,
    ),
    BatchRow(
        "exception in a transform",
        "only data host",
        "a batch",
        says=("no label for sample 13",),
        loader="fail",
        after=1,
        hosts="b",
        error=RemoteTransformError,
    ),
    BatchRow(
        "SIGSEGV of the worker",
        "all data hosts",
        "a batch, each time",
        says=(
            "Step 3 kills the data hosts' workers",
            "SIGSEGV at index 13 on data host",
            r"\[12, 13, 14, 15\]",
            "crash native code",
        ),
        loader="crash",
        after=1,
        error=DataServiceError,
    ),
    BatchRow("SIGKILL of the worker", "one of two data hosts", "a batch, once", loader="killed_once", after=1),
    BatchRow("SIGSTOP of a worker", "only data host", "mid-epoch", act=freeze_worker, hosts="b", longest_s=10.0),
    # Mostly 0.2 s, thanks to hedged requests. A busy machine may have used these up: then two heartbeats have to fail.
    BatchRow("SIGSTOP of all processes", "one of two data hosts", "mid-epoch", act=freeze, then=thaw, longest_s=8.0),
    BatchRow(
        "SIGKILL of all workers", "all data hosts", "mid-epoch, iterable data", act=kill_workers, loader="iterable"
    ),
    BatchRow(
        "SIGKILL of the gRPC server",
        "one of two data hosts",
        "mid-epoch, iterable data",
        act=kill_server,
        loader="iterable",
    ),
    BatchRow(
        "SIGKILL of the feeder",
        "trainer",
        "mid-epoch",
        says=(r"The feeder process of this rank \(pid \d+\) was killed by SIGKILL",),
        act=kill_feeder,
        error=DataServiceError,
        longest_s=20.0,
    ),
    BatchRow("another training starts and ends", "all data hosts", "mid-epoch", act=train_elsewhere, longest_s=20.0),
    BatchRow("not there", "one of two data hosts", "start", hosts="bc", after=None),
    BatchRow(
        "not there",
        "all data hosts",
        "start",
        says=(
            r"Waited 8 s \(data_service.startup_timeout_s\)",
            r"(?s)127.0.0.1:\d+: down \(unavailable.*127.0.0.2:\d+: down \(unavailable",
        ),
        hosts="cd",
        after=None,
        error=DataHostUnreachableError,
        settings={"startup_timeout_s": 8.0},
        longest_s=25.0,
    ),
    BatchRow(
        "SIGSTOP, then SIGKILL of the main process",
        "one of two data hosts",
        "mid-epoch, iterable data",
        act=freeze_and_kill_main,
        loader="iterable",
    ),
    # The host imports torch again, which may take a minute on a busy machine.
    BatchRow(
        "SIGKILL, and it starts again",
        "only data host",
        "mid-epoch",
        act=kill_and_return,
        after=5,
        hosts="b",
        longest_s=TIMEOUT_S,
    ),
    BatchRow(
        "SIGKILL of all processes",
        "all data hosts",
        "mid-epoch",
        says=(
            "no batch arrived within 3 s",
            r"(?s)127.0.0.1:\d+: down \(unavailable.*127.0.0.1:\d+: down \(unavailable",
            "waiting for batch ",
        ),
        act=kill_all,
        after=1,
        error=DataHostUnreachableError,
        settings={"batch_timeout_s": 3.0},
        longest_s=20.0,
    ),
    BatchRow(
        "comes late",
        "one of two data hosts",
        "mid-epoch",
        act=come_late,
        then=close_late,
        after=3,
        hosts="ac",
        is_proof=True,
    ),
    BatchRow("SIGKILL of the main process", "one of two data hosts", "mid-epoch", act=kill_main, is_proof=True),
    BatchRow(
        "closed with a hanging gRPC server",
        "all data hosts",
        "mid-epoch",
        says=("no batch arrived within 3 s",),
        act=hang_and_close,
        after=1,
        error=DataHostUnreachableError,
        settings={"batch_timeout_s": 3.0},
        is_proof=True,
    ),
]


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """The folder of the files that control the datasets."""
    return tmp_path_factory.mktemp("flags")


@pytest.fixture(scope="module")
def data_hosts(flags):
    """The data hosts of all rows."""
    _, topology, ports = reserve_job({"trainer": ["algo-1"]})
    with ports:
        hosts = {name: Host(name, lambda: make(flags), workers) for name, workers in (("a", 1), ("b", 2))}
        for name, address in (("c", "127.0.0.1"), ("d", "127.0.0.2")):
            hosts[name] = Host(name, lambda: make(flags), 2, f"{address}:{topology.main_port}")
        with running(hosts["a"], hosts["b"]):
            with remote([hosts["b"]]) as module:
                loaders = module.train_dataloader()
                EXPECTED.update({name: stream_hash(seeded(loaders[name])) for name in ("shuffled", "iterable")})
            whole = stream_hash(DataLoader(Broken(lambda: None), batch_size=4))
            EXPECTED.update(dict.fromkeys(("killed_once", "broken_disk"), whole))
            yield hosts


@pytest.fixture(scope="module")
def scene(data_hosts, flags, request):
    """The hosts of a row, started outside of the test, which may leave no process behind."""
    made = Scene(data_hosts, flags)
    made.restart_killed(request.param.hosts)
    made.row = request.param
    return made


@pytest.mark.parametrize("scene", params(BATCH_ROWS), indirect=True)
def test_a_fault_while_batches_are_made_shows_as_the_table_says(scene):
    """The trainer gets the same batches, bit for bit and without a long wait, or soon an error with a remedy."""
    row = scene.row
    with contextlib.ExitStack() as stack:
        stack.callback(scene.close)
        scene.acted = time.monotonic()
        if row.error is None:
            assert take_all(scene, stack, row) < row.longest_s
        else:
            with pytest.raises(row.error) as caught:
                take_all(scene, stack, row)
            assert type(caught.value) is row.error
            assert time.monotonic() - scene.acted < row.longest_s
            row.assert_says(str(caught.value))
        row.then(scene)


def take_all(scene, stack, row):
    """Read a pass, inject the fault into it, and return the longest wait for a batch after that."""
    scene.module = stack.enter_context(remote([scene.hosts[name] for name in row.hosts], **row.settings))
    stream = iter(seeded(scene.module.train_dataloader()[row.loader]))
    batches = [next(stream) for _ in range(row.after or 0)]
    scene.acted = time.monotonic()
    row.act(scene)
    gaps, began = [], time.perf_counter()
    for batch in stream:
        gaps.append(time.perf_counter() - began)
        batches.append(batch)
        began = time.perf_counter()
    assert stream_hash(batches) == EXPECTED[row.loader]
    return max(gaps)


LONG, NUM_STEPS, NUM_ACTIONS = 2400, 300, 14
# The only host left may lose its gRPC server; reconnecting takes a second or two, or longer on a busy machine.
LONGEST_GAP_S = 6.0
NUM_SCHEDULES = int(os.environ.get("LIGHTNING_SM_FAILURE_SCHEDULES", "2"))


@pytest.mark.proof
@pytest.mark.parametrize("seed", range(NUM_SCHEDULES))
def test_no_random_schedule_of_faults_shows_in_the_stream(tmp_path, seed, record_property):
    """Killed, frozen and slow workers and hosts change no bit, lose no batch, and delay the stream only for seconds."""

    def make():
        return DataLoader(Augmented(LONG, 0.001, tmp_path), batch_size=8, shuffle=True)

    gaps, batches = [], []
    with (
        ThreadPoolExecutor(3) as starter,
        running(Host("a", make), Host("b", make), Host("c", make)) as hosts,
        remote(hosts, batch_timeout_s=60.0) as module,
    ):
        (expected,) = undisturbed(hosts[:1])
        chaos = Chaos(random.Random(seed), hosts, tmp_path, starter, NUM_STEPS, NUM_ACTIONS)
        stream = iter(seeded(module.train_dataloader()))
        for step in range(NUM_STEPS):
            began = time.perf_counter()
            batches.append(next(stream))
            gaps.append(time.perf_counter() - began)
            time.sleep(0.005)
            chaos.act(step)
        assert next(stream, None) is None
        for start in chaos.starting.values():
            start.result()
    longest = max(gaps[1:])
    record_property("longest_gap_s", longest)
    assert stream_hash(batches) == expected, chaos.log
    assert longest < LONGEST_GAP_S, (longest, gaps.index(longest), chaos.log)


# The end of a training: nothing is left of it on the trainer or on the data hosts


class Fails(Recorder):
    """Fails at its third batch."""

    def training_step(self, batch, batch_index):
        if batch_index == 2:
            raise ArithmeticError("user's own")
        return super().training_step(batch, batch_index)


class Exits(Callback):
    """Exits in a hook at the third batch."""

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_index):
        if batch_index == 2:
            sys.exit(3)


def is_idle(address):
    """Return whether a data host has no batch to build."""
    with FakeTrainer(address) as trainer:
        return HostReport.parse(trainer.call("Status")).busy == 0


def fail_in_a_step(cluster):
    """Raise an error in a step: it passes through unchanged, even if the batch is still held."""
    with pytest.raises(ArithmeticError, match="user's own") as caught:
        cluster.fit(model=Fails())
    assert cluster.noted()[-1] == "on_exception user's own"
    del caught


def exit_in_a_hook(cluster):
    """Call sys.exit in a callback."""
    with pytest.raises(SystemExit):
        cluster.fit(callbacks=[Exits()])


def stop_early(cluster):
    """Stop in the middle of an epoch."""
    stops = {"monitor": "loss", "stopping_threshold": 1e9, "check_on_train_epoch_end": False}
    _, trainer = cluster.fit(max_epochs=5, callbacks=[EarlyStopping(**stops)], val_check_interval=2)
    assert trainer.global_step == 2


def end_process(how, code):
    """Return a function that ends a script: its exit code is unchanged, and its feeder exits."""

    def end(cluster):
        cluster.choose()
        command = [sys.executable, str(SCRIPTS / "end_badly.py"), how, str(cluster.folder)]
        process = subprocess.Popen(
            [*command, *(host.address for host in cluster.hosts)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        output, _ = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == code, output
        faults.until_session_gone(process.pid)
        assert "Traceback" not in output.replace("KeyboardInterrupt", "") or how == "exit"

    return end


@dataclass(frozen=True)
class EndRow(Row):
    """One way in which a training ends.

    Attributes:
        act: Trains on a cluster, and ends the training.
    """

    act: Callable[[Any], None] = field(default=nothing, kw_only=True)


END_ROWS = [
    EndRow("exception in training_step()", "trainer", "mid-epoch", "the same exception", act=fail_in_a_step),
    EndRow("sys.exit in a hook", "trainer", "mid-epoch", "SystemExit", act=exit_in_a_hook, is_proof=True),
    EndRow("early stopping", "trainer", "mid-epoch", "success", act=stop_early),
    EndRow("Ctrl-C", "trainer", "mid-epoch", "exit code 1", act=end_process("interrupt", 1), is_proof=True),
    EndRow("sys.exit(3)", "trainer", "mid-epoch", "exit code 3", act=end_process("exit", 3), is_proof=True),
    EndRow("os._exit(4)", "trainer", "mid-epoch", "exit code 4", act=end_process("hard exit", 4), is_proof=True),
]


@pytest.fixture(scope="module")
def warm_cluster(cluster):
    """Data hosts, after the trainer process has opened what torch keeps open: locks and logs."""
    cluster.fit(max_epochs=1)
    return cluster


@pytest.mark.parametrize("row", params(END_ROWS))
def test_nothing_is_left_of_a_training_however_it_ends(warm_cluster, row):
    """Feeder, sockets and slots are released, no worker stays busy, and the next training gets all batches."""
    before = faults.left_here()
    row.act(warm_cluster)
    assert faults.left_here() == before
    hosts = [host.main for host in warm_cluster.hosts]
    until(lambda: not any(map(faults.connections, hosts)), "no trainer is connected to a data host", FEW_SECONDS)
    addresses = [host.address for host in warm_cluster.hosts]
    until(lambda: all(map(is_idle, addresses)), "no worker of a data host works", FEW_SECONDS)
    model, _ = warm_cluster.fit(max_epochs=1)
    assert sorted(model.indices("train")) == list(range(NUM_TRAIN))


def slow():
    """Return a loader whose epoch no test finishes."""
    return DataLoader(Augmented(100_000, 0.001), batch_size=4)


@pytest.mark.usefixtures("_forks")
def test_a_killed_training_process_takes_everything_with_it(tmp_path):
    """The feeder, data host, workers and gRPC server of a killed script exit by themselves."""
    with faults.training_process(slow, None, tmp_path / "pids") as (script, feeder, main):
        processes = [feeder, main, *main.children()]
        # Feeder, main process, gRPC server, 2 spawned workers and multiprocessing's resource tracker.
        assert len(processes) == 6
        script.kill()
        faults.until_gone(processes, "feeder, main process, gRPC server and workers")


@pytest.mark.usefixtures("_forks")
def test_a_feeder_ends_although_a_child_of_the_training_process_lives_on(pool, tmp_path):
    """A forked child holds copies of the training process's sockets, which must not keep the feeder alive."""
    address = pool.serve(slow)[0].address
    with faults.training_process(slow, address, tmp_path / "pids") as (script, feeder, child):
        script.kill()
        try:
            faults.until_gone([feeder], "the feeder")
            assert child.is_running()
        finally:
            child.kill()


# The data host of a job, and its trainer in this process


def train(job):
    """Train, then test: the end of fit is not the end of the script."""
    module = job.connected()
    module.teardown("fit")
    module.setup("test")
    module.close()


def fail_to_train(job):
    """Fail as a training does: the script may catch the exception and train again, until its process exits."""
    module = job.connected()
    module.on_exception(ValueError("loss is nan"))
    assert module._service_connection.feeder.snapshot().hosts[0].state == "up"
    module.close()


def vanish(job):
    """Kill the feeder, as when the trainer host vanishes: no last heartbeat reaches the data host."""
    module = job.connected()
    os.kill(module._service_connection.feeder._process.pid, signal.SIGKILL)
    module.close()


def come_never(job):
    """Start no trainer."""


def terminate(job):
    """Send SIGTERM while a trainer has the loaders."""
    end_and_look(job, job.connected())


def terminate_in_setup(job):
    """Send SIGTERM in the middle of a user's hook."""
    end_and_look(job, job.opening())


def end_and_look(job, module):
    """Send SIGTERM, and check that nothing is left of the data host."""
    children = job.main.children(recursive=True)
    assert children
    job.main.terminate()
    job.end()
    faults.until_gone(children, "the children of the data host")
    module.close()


def stop_gently(job):
    """Stop gently: trainers still get their batches."""
    module = job.connected()
    job.main.send_signal(GENTLE_SIGNAL)
    assert len(list(module.train_dataloader())) == 2
    module.close()


def stop_gently_and_kill_the_server(job):
    """Stop gently, then kill the server: its replacement does not wait for a trainer either."""
    module = job.connected()
    (server,) = [child for child in job.main.children() if "lightning_sm.data.server.process" in child.cmdline()]
    job.main.send_signal(GENTLE_SIGNAL)
    os.kill(module._service_connection.feeder._process.pid, signal.SIGKILL)
    server.kill()
    job.end()
    module.close()


def stop_gently_without_trainer(job):
    """Stop gently before a trainer connects: the data host has nobody to wait for."""
    job.until_handled(GENTLE_SIGNAL)
    job.main.send_signal(GENTLE_SIGNAL)


def stop_gently_in_setup(job):
    """Stop gently in setup(): its download may take hours, and nobody trains yet."""
    module = job.opening()
    job.main.send_signal(GENTLE_SIGNAL)
    job.end()
    module.close()


def fail_in_setup(job):
    """Fail in setup(): the trainer gets the error of the user's hook."""
    module = job.module()
    with pytest.raises(RemoteTransformError, match="no such column") as caught:
        module.setup("fit")
    for says in (r"^ValueError: no such column\non data host algo-2 .+, setup\('fit'\)\nTraceback", "in setup"):
        assert re.search(says, str(caught.value))
    module.close()


@dataclass(frozen=True)
class JobRow(Row):
    """A fault in a job with one data host.

    Attributes:
        act: Injects the fault.
        does: What the data host's DataModule does in setup().
        settings: Settings of the data service.
    """

    act: Callable[[Job], None] = field(default=nothing, kw_only=True)
    does: str = field(default="", kw_only=True)
    settings: dict[str, Any] = field(default_factory=dict, kw_only=True)


JOB_ROWS = [
    JobRow("none", "trainer", "end", SAME, 0, (r"Data host done: the only rank has finished\.",), act=train),
    JobRow(
        "exception",
        "trainer",
        "mid-epoch",
        "the same exception",
        0,
        (r"the only rank has finished\.",),
        act=fail_to_train,
    ),
    JobRow(
        "vanishes",
        "trainer",
        "mid-epoch",
        "",
        0,
        (r"the only rank has finished \(lost connection\)",),
        act=vanish,
        settings={"lease_s": 2.0},
    ),
    JobRow(
        "not there",
        "trainer",
        "start",
        "",
        1,
        (r"DataServiceError: No trainer connected within 1 s",),
        act=come_never,
        settings={"startup_timeout_s": 1.0},
    ),
    JobRow(
        "SIGTERM",
        "data host",
        "mid-epoch",
        "",
        0,
        (r"Data host done: it was terminated \(SIGTERM\)",),
        act=terminate,
        is_proof=True,
    ),
    JobRow(
        "SIGTERM",
        "data host",
        "a hook",
        "",
        0,
        (r"Data host done: it was terminated \(SIGTERM\)",),
        act=terminate_in_setup,
        does="waits",
    ),
    JobRow(
        "gentle stop",
        "data host",
        "mid-epoch",
        SAME,
        0,
        (r"Data host done: the only rank has finished\.",),
        act=stop_gently,
    ),
    JobRow(
        "gentle stop, then SIGKILL of the gRPC server",
        "data host",
        "mid-epoch",
        "",
        0,
        ("the job was stopped before a trainer connected",),
        act=stop_gently_and_kill_the_server,
        is_proof=True,
    ),
    JobRow(
        "gentle stop",
        "data host",
        "start",
        "",
        0,
        ("the job was stopped before a trainer connected",),
        act=stop_gently_without_trainer,
    ),
    JobRow(
        "gentle stop",
        "data host",
        "the first hook",
        "",
        0,
        ("the job was stopped before it served anything",),
        act=stop_gently_in_setup,
        does="waits",
    ),
    JobRow(
        "exception",
        "data host",
        "opening",
        "RemoteTransformError",
        0,
        (r"setup\('fit'\) failed; trainers get the error: ValueError: no such column",),
        act=fail_in_setup,
        does="raises",
    ),
]


@pytest.fixture
def job(tmp_path, _forks):
    """A job with one data host."""
    made = Job(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("row", params(JOB_ROWS))
def test_a_data_host_of_a_job_leaves_as_the_table_says(job, row):
    """A failed training does not fail its data host, whose log says why it exited."""
    job.start(row.does, **row.settings)
    row.act(job)
    assert job.end() == row.data, job.log()
    row.assert_says(job.log())
    if row.data == 0:
        assert "RemoteTransformError" not in job.log()


def test_a_port_that_is_taken_is_the_failure_of_the_data_host(job):
    """A port in use makes the data host fail at once, with the address in its log."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        job.start(port=port)
        assert job.end() == 1
    assert re.search(rf"DataServiceError: .*127\.0\.0\.1:{port}", job.log())


# The launchers of a trainer host and a data host


@dataclass(frozen=True)
class LauncherRow(Row):
    """A fault of a data host with a launcher.

    Attributes:
        how: Signal that kills its main process, or "raises".
        place: The method of the user's code in which that happens.
    """

    how: str = field(default="", kw_only=True)
    place: str = field(default="", kw_only=True)


USERS_OWN = (
    r"^ValueError: no such column\non data host algo-2.*, {place}\(('fit')?\)\n",
    r"\nFile .* in {place}: reached\(",
)
LAUNCHER_ROWS = [
    LauncherRow("SIGKILL of the main process", "data host", "a batch", "0", 0, how="SIGKILL", place="__getitem__"),
    LauncherRow(
        "SIGSEGV of the main process",
        "data host",
        "train_dataloader()",
        "0",
        0,
        how="SIGSEGV",
        place="train_dataloader",
        is_proof=True,
    ),
    LauncherRow(
        "exception",
        "data host",
        "train_dataloader()",
        "1",
        0,
        USERS_OWN,
        how="raises",
        place="train_dataloader",
        is_proof=True,
    ),
]


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Launchers of scripts that kill themselves at every start: they mostly wait, so other tests run meanwhile."""
    made = {host: Launchers(tmp_path_factory.mktemp(host), KILLED) for host in (DATA, TRAINER)}
    made[DATA].start(DATA)
    made[TRAINER].start(TRAINER, LIGHTNING_SM_PEERS_TIMEOUT_S="0")
    yield made
    for one in made.values():
        one.close()


@pytest.fixture
def launchers(tmp_path, request):
    """A job of two hosts."""
    made = Launchers(tmp_path / "job", getattr(request, "param", TRAIN))
    yield made
    made.close()


@pytest.mark.usefixtures("killed")
@pytest.mark.parametrize("row", params(LAUNCHER_ROWS))
def test_a_data_host_that_dies_is_restarted_and_one_that_fails_is_not(launchers, row):
    """Trainers reconnect to a restarted data host; if its hook fails, they fail with that error and name the host."""
    launchers.fit((TRAINER, DATA), row.how, row.place)
    codes = str(launchers.code(TRAINER)), launchers.code(DATA)
    trainer_log, data_log = launchers.log(TRAINER), launchers.log(DATA)
    assert codes == (row.trainer, row.data), trainer_log + data_log
    assert launchers.failure(DATA) is None
    is_killed = row.how != "raises"
    assert data_log.count("Restarting it in 1 s") == is_killed
    if is_killed:
        assert re.search("the only rank has finished|it was terminated", data_log)
        assert launchers.failure(TRAINER) is None
    else:
        assert re.search(rf"{row.place}\(.*\) failed; trainers get the error: ValueError: no such column", data_log)
        assert "RemoteTransformError" in trainer_log
        for says in row.says:
            assert re.search(says.format(place=row.place), launchers.failure(TRAINER)), launchers.failure(TRAINER)


@pytest.mark.proof
def test_the_failure_file_of_a_data_host_says_why_it_failed(launchers):
    """The failure file has the reason, so users need not look for it in the log."""
    launchers.fit([DATA], "", "", "--data_service.startup_timeout_s=1")
    assert launchers.code(DATA) == 1
    assert re.search(r"DataServiceError: No trainer connected within 1 s\.", launchers.failure(DATA))


def test_a_trainer_that_is_killed_is_not_restarted(killed):
    """A killed trainer is not restarted, because its other ranks cannot continue without it."""
    launchers = killed[TRAINER]
    assert launchers.code(TRAINER) == 128 + signal.SIGKILL
    assert launchers.log(TRAINER).splitlines().count("started") == 1


@pytest.mark.parametrize("launchers", [KILLED], indirect=True, ids=["killed"])
def test_a_stop_between_two_starts_ends_a_data_host(launchers):
    """A data host that is stopped between two starts is not started again, and has not failed."""
    launchers.start(DATA)
    until(lambda: "Restarting it in 4 s" in launchers.log(DATA), "the launcher restarts the script in 4 s", TIMEOUT_S)
    launchers.processes[DATA].terminate()
    assert launchers.code(DATA) == 0, launchers.log(DATA)
    assert launchers.log(DATA).splitlines().count("started") == 3
    assert launchers.failure(DATA) is None


def test_a_data_host_that_dies_again_and_again_gives_up(killed):
    """After three restarts, the data host exits with the signal's code and writes a failure file."""
    launchers = killed[DATA]
    assert launchers.code(DATA) == 128 + signal.SIGKILL
    assert re.findall(r"Restarting it in (\d) s", launchers.log(DATA)) == ["1", "2", "4"]
    assert launchers.log(DATA).splitlines().count("started") == 4
    reason = f"killed by SIGKILL (exit code 137) on data host {DATA}; "
    assert launchers.failure(DATA).startswith(reason)


MATRIX = [*BATCH_ROWS, *END_ROWS, *JOB_ROWS, *LAUNCHER_ROWS]


def table():
    """Return the table of all rows."""
    names = ["fault", "where", "when", "trainers see", "data hosts exit with", "what says so"]
    return "\n".join(["| " + " | ".join(names) + " |", "|" + "---|" * len(names), *(row.line() for row in MATRIX)])


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
