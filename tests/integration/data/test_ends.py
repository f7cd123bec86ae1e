"""However a training ends, nothing of it is left, neither on the trainer nor on the data hosts."""

import contextlib
import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from pytorch_lightning.callbacks import Callback, EarlyStopping

from tests.integration.data.numbers import NUM_TRAIN, Cluster, Recorder
from tests.integration.hosts import SCRIPTS

pytestmark = pytest.mark.processes

PATIENCE_S = 10.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Two data hosts for all tests."""
    made = Cluster(tmp_path_factory.mktemp("ends"))
    with made.hosts[0], made.hosts[1]:
        cluster_warmed(made)
        yield made


def cluster_warmed(cluster):
    """Let the trainer's process open what it keeps: locks and logs of torch."""
    cluster.fit(max_epochs=1)


def is_running(process, name):
    """Whether a process is that process of the data service, and not just dead."""
    with contextlib.suppress(psutil.Error):
        return any(f"data.{name}" in part for part in process.cmdline())
    return False


def left_here():
    """Processes, sockets and shared memory of the data service in this process."""
    gc.collect()
    own = psutil.Process()
    children = {child.pid for child in own.children(recursive=True) if is_running(child, "feeder")}
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    maps = Path("/proc/self/maps").read_text().count("memfd:lightning_sm")
    return children, sum(link.startswith(("socket:", "pipe:", "/memfd:")) for link in links), maps


def connections(host):
    """Connections of trainers to a data host."""
    servers = [child for child in psutil.Process(host.pid).children() if is_running(child, "server")]
    return [one for process in servers for one in process.net_connections("tcp") if one.status == "ESTABLISHED"]


def assert_idle(cluster):
    """No trainer is connected to a data host, no worker is busy, and a training works as on the first day."""
    deadline = time.monotonic() + PATIENCE_S
    while any(connections(host) for host in cluster.hosts):
        assert time.monotonic() < deadline, [connections(host) for host in cluster.hosts]
    module = cluster.module()
    module.setup("fit")
    with contextlib.closing(module):
        busy = [(host["busy"], host["queued"]) for host in module._state()["hosts"] if host["workers"]]
    assert busy
    assert set(busy) == {(0, 0)}
    model, _ = cluster.fit(max_epochs=1)
    assert sorted(model.indices("train")) == list(range(NUM_TRAIN))


class Fails(Recorder):
    """Fails at its third batch."""

    def training_step(self, batch, batch_index):
        if batch_index == 2:
            raise ArithmeticError("user's own")
        return super().training_step(batch, batch_index)


class SaysSo(Callback):
    """Leaves by sys.exit in a hook."""

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_index):
        if batch_index == 2:
            sys.exit(3)


def test_an_exception_in_a_training_step_leaves_nothing(cluster):
    """It passes through unchanged; feeder, sockets and slots go with the run, also if the batch is still held."""
    before = left_here()
    with pytest.raises(ArithmeticError, match="user's own") as caught:
        cluster.fit(model=Fails())
    assert cluster.noted([os.getpid()])[-1] == "on_exception user's own"
    del caught
    assert left_here() == before
    assert_idle(cluster)


def test_an_exit_in_a_hook_leaves_nothing(cluster):
    """sys.exit in a callback."""
    before = left_here()
    with pytest.raises(SystemExit):
        cluster.fit(callbacks=[SaysSo()])
    assert left_here() == before
    assert_idle(cluster)


def test_early_stopping_leaves_nothing(cluster):
    """In the middle of an epoch."""
    before = left_here()
    stops = {"monitor": "loss", "stopping_threshold": 1e9, "check_on_train_epoch_end": False}
    steps = cluster.fit(max_epochs=5, callbacks=[EarlyStopping(**stops)], val_check_interval=2)[1].global_step
    assert steps == 2
    assert left_here() == before
    assert_idle(cluster)


@pytest.mark.parametrize(("how", "code"), [("interrupt", 1), ("exit", 3), ("hard exit", 4)])
def test_an_end_of_the_process_leaves_nothing(cluster, how, code):
    """Ctrl-C, sys.exit and a crash: the script's exit code is its own, and its feeder goes with it."""
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
    output, _ = process.communicate(timeout=60)
    assert process.returncode == code, output
    deadline = time.monotonic() + PATIENCE_S
    while left := [one.cmdline() for one in psutil.process_iter() if session_of(one) == process.pid]:
        assert time.monotonic() < deadline, left
    assert "Traceback" not in output.replace("KeyboardInterrupt", "") or how == "exit"
    assert_idle(cluster)


def session_of(process):
    """The session that a process belongs to; None if it is gone."""
    with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
        # Nobody may reap an orphan in a container.
        return None if process.status() == psutil.STATUS_ZOMBIE else os.getsid(process.pid)
    return None
