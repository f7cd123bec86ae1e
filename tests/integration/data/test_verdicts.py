"""The log's verdict on slow training, where the cause is known: real data hosts, ranks and sockets."""

import contextlib
import logging
import os
import re
import socket
import subprocess
import sys
import threading
from functools import partial

import pytest
from torch.utils.data import DataLoader

from lightning_sm import RemoteDataModule
from tests.integration.data.cluster import Host, running
from tests.integration.data.datasets import Augmented, Data
from tests.integration.data.numbers import Recorder, quiet_trainer
from tests.integration.hosts import REPOSITORY, SCRIPTS
from tests.integration.scripts import train_at_pace
from tests.quick_processes import python_path

pytestmark = pytest.mark.processes

TIMEOUT_S = 300
# Small enough that heartbeats do not queue behind batches.
_SOCKET_BYTES = 1 << 16


def test_slow_transforms_are_told_from_a_slow_network(pool, tmp_path, caplog):
    """The only worker sleeps in a sample: the log counts it as busy and recommends more workers.

    Counting the time since the host's start would blame the network instead.
    """
    caplog.set_level(logging.INFO, "lightning_sm")
    # Slow enough that a busy machine's delays between two samples do not count.
    slow = Data(lambda: DataLoader(Augmented(8, delay_s=0.5), batch_size=1), list)
    trainer = quiet_trainer(tmp_path, max_epochs=1)
    trainer.fit(Indices(), datamodule=RemoteDataModule(slow, [pool.hosts[0].address]))
    (line,) = [message for message in caplog.messages if message.startswith("Epoch ")]
    wait, text = re.match(r"Epoch 1: Training waits (\d+)% of the time (.*)", line).groups()
    assert float(wait) > 50
    assert re.match(r"for the transforms: the only worker of the data hosts is busy ([89]\d|100)% of the time", text)


class Indices(Recorder):
    """Trains on batches of ``Augmented``."""

    def training_step(self, batch, batch_idx):
        return self.layer(batch["torch"][:, :2]).mean()


class Relay:
    """A network between trainers and a data host.

    Args:
        target: Address of the data host.
        bytes_per_s: Returns the rate towards the trainers; 0: unlimited.
    """

    def __init__(self, target, bytes_per_s):
        host, _, port = target.rpartition(":")
        self._target, self._bytes_per_s = (host, int(port)), bytes_per_s
        self._one_at_a_time, self._closed = threading.Lock(), threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets, self._threads = [self._listener], []
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._start(self._accept)

    def close(self):
        """Close all connections."""
        self._closed.set()
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()

    def _start(self, target, *args):
        self._threads.append(threading.Thread(target=target, args=args))
        self._threads[-1].start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while not self._closed.is_set():
                trainer, _ = self._listener.accept()
                host = socket.socket()
                self._sockets += [trainer, host]
                host.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BYTES)
                trainer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
                host.connect(self._target)
                self._start(self._pump, trainer, host, lambda: 0)
                self._start(self._pump, host, trainer, self._bytes_per_s)

    def _pump(self, source, sink, bytes_per_s):
        with contextlib.suppress(OSError):
            while data := source.recv(_SOCKET_BYTES):
                rate = bytes_per_s()
                if rate:
                    with self._one_at_a_time:
                        self._closed.wait(len(data) / rate)
                sink.sendall(data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """The log of rank 0 of two in each situation, by name, and the addresses of the data hosts."""
    folder = tmp_path_factory.mktemp("pace")
    train_at_pace.write(folder, train_at_pace.Situation(0))
    made = [Host(name, partial(train_at_pace.make, folder), workers=1) for name in "ab"]
    with running(*made) as hosts, contextlib.ExitStack() as stack:
        relays = [Relay(host.address, lambda: train_at_pace.read(folder).bytes_per_s) for host in hosts]
        for relay in relays:
            stack.callback(relay.close)
        addresses = [relay.address for relay in relays]
        ended = subprocess.run(
            [sys.executable, str(SCRIPTS / "train_at_pace.py"), str(folder), *addresses],
            env={**os.environ, "PYTHONPATH": python_path(REPOSITORY), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
    assert ended.returncode == 0, ended.stderr
    parts = re.split(r"^situation: (.*)\n", ended.stderr, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True)), addresses


def lines_of(log, situation):
    """Return the lines of an epoch in a situation; rank 1 and the data hosts log none."""
    return [line for line in log[0][situation].splitlines() if line.startswith("Epoch ")]


@pytest.mark.proof
@pytest.mark.parametrize(
    ("situation", "verdict"),
    [
        (
            "slow transforms",
            r".* of the time for the transforms: the 2 workers of the data hosts are busy ([89]\d|100)% of the time"
            r", at [34]\d\d ms per batch\. Make the transforms cheaper, or use more workers .*",
        ),
        ("slow network", r".* of the time for the network: .* is transfer from the data host \(2 MB a batch, .*"),
        (
            "slow code on rank 1",
            r"Rank 1 on \S+ holds up the others: .* takes 2\d\d ms a step, .* \d+(\.\d)? ms on the others\.( .*)?",
        ),
        ("slow data host", r".* of the time because of data host {b}: a worker takes 4\d\d ms per batch there.*"),
    ],
)
def test_each_cause_is_named(log, situation, verdict):
    """The log has one line for the epoch of both ranks, with the right cause."""
    (line,) = lines_of(log, situation)
    expected = verdict.replace("{b}", re.escape(log[1][1]))
    assert re.fullmatch(rf"Epoch 1: {expected}", line), line


@pytest.mark.proof
def test_an_epoch_without_a_cause_has_no_line(log):
    """An epoch without a cause has no line: the progress line shows its wait."""
    assert lines_of(log, "nothing wrong") == []
