"""A data host that dies is started again; one that is broken itself says so, and fails; all others end well."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from lightning_sm.errors import DataServiceError, RemoteTransformError
from lightning_sm.launcher.train import restart_pause_s
from tests.integration.data.test_leaving import Job
from tests.integration.hosts import REPOSITORY, Hosts

pytestmark = pytest.mark.processes

TIMEOUT_S = 90
TRAINER, DATA = "algo-1", "algo-2"

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
        # A worker that went on could finish the training before it notices that the main process is gone.
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

# The last lines of a user's script on a data host that cannot find its data.
BROKEN = """
import sys
from lightning_sm import DataServiceSettings, SageMakerJob, Topology
from lightning_sm._log import show_log_lines
from lightning_sm.data.service import serve
from tests.fakes.small_app import SmallData

class Broken(SmallData):
    def setup(self, stage):
        raise ValueError("no such column")

show_log_lines()
job = SageMakerJob.from_environment()
serve(Broken(), job, Topology.from_job(job), DataServiceSettings(workers=1, lease_s=5))
"""


class Cluster(Hosts):
    """The launchers of a trainer host and a data host, with what they write in files."""

    def __init__(self, folder, script):
        super().__init__(folder, {"gpu": [TRAINER], "data": [DATA]})
        (folder / "train.py").write_text(script)
        self.processes = {}

    def start(self, host, *arguments, **variables):
        """Run the launcher of a host."""
        with (self.folder / f"{host}.log").open("w") as log:
            self.processes[host] = subprocess.Popen(
                [sys.executable, "-m", "lightning_sm", "train", "train.py", *arguments],
                cwd=self.folder,
                env={**self.env(host), **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def fit(self, how, place):
        """Train on both hosts to the end; their exit codes."""
        for host in (TRAINER, DATA):
            arguments = ("--trainer.max_epochs=2", "--trainer.accelerator=cpu", "--data_service.workers=1")
            self.start(host, "fit", *arguments, BROKEN_HOW=how, BROKEN_PLACE=place)
        return self.code(TRAINER), self.code(DATA)

    def code(self, host):
        """Wait for a launcher; its exit code."""
        return self.processes[host].wait(TIMEOUT_S)

    def log(self, host):
        """What a host wrote until now."""
        return (self.folder / f"{host}.log").read_text()

    def failure(self, host):
        """The reason of its failure; None if it left none."""
        path = Path(self.folder / host / "output" / "failure")
        return path.read_text() if path.exists() else None

    def close(self):
        """Kill what is left."""
        for process in self.processes.values():
            if process.poll() is None:
                for one in [*psutil.Process(process.pid).children(recursive=True), process]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.kill()
            process.wait(TIMEOUT_S)


def wait_until(condition):
    """Ask until it holds."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)


@pytest.fixture
def cluster(tmp_path, request):
    """A job of two hosts that run the script of the test."""
    made = Cluster(tmp_path, getattr(request, "param", TRAIN))
    yield made
    made.close()


@pytest.mark.parametrize(
    ("exit_code", "num_restarts", "pause_s"),
    [
        (137, 0, 1.0),
        (139, 1, 2.0),
        (134, 2, 4.0),
        (137, 3, None),
        (0, 0, None),
        (1, 0, None),
        (2, 0, None),
        (255, 0, None),
        (128 + signal.SIGTERM, 0, None),
        (128 + signal.SIGINT, 0, None),
    ],
)
def test_only_a_script_that_was_killed_is_started_again(exit_code, num_restarts, pause_s):
    """Three times, with growing pauses; whoever ends by itself would do so again."""
    assert restart_pause_s(exit_code, num_restarts) == pause_s


@pytest.mark.parametrize(
    ("how", "place"), [("SIGKILL", "setup"), ("SIGSEGV", "train_dataloader"), ("SIGKILL", "__getitem__")]
)
def test_a_data_host_whose_main_process_dies_is_started_again(cluster, how, place):
    """The trainers find it again by themselves; nobody fails."""
    assert cluster.fit(how, place) == (0, 0), cluster.log(TRAINER) + cluster.log(DATA)
    assert cluster.log(DATA).count("Restarting it in 1 s") == 1
    assert "the trainer rank has finished" in cluster.log(DATA) or "it was terminated" in cluster.log(DATA)
    assert cluster.failure(TRAINER) is None
    assert cluster.failure(DATA) is None


@pytest.mark.parametrize("cluster", [KILLED], indirect=True)
def test_a_data_host_that_dies_again_and_again_gives_up(cluster):
    """After three restarts it fails with the signal, and its failure file tells how often it has tried."""
    cluster.start(DATA)
    assert cluster.code(DATA) == 128 + signal.SIGKILL
    assert re.findall(r"Restarting it in (\d) s", cluster.log(DATA)) == ["1", "2", "4"]
    assert cluster.log(DATA).count("started\n") == 4
    reason = cluster.failure(DATA)
    assert reason.startswith("The data host's script was killed and restarted 3 times. killed by SIGKILL")


@pytest.mark.parametrize("cluster", [KILLED], indirect=True)
def test_a_trainer_that_is_killed_is_not_started_again(cluster):
    """Its other ranks cannot go on without it."""
    cluster.start(TRAINER, LIGHTNING_SM_PEERS_TIMEOUT_S="0")
    assert cluster.code(TRAINER) == 128 + signal.SIGKILL
    assert cluster.log(TRAINER).count("started\n") == 1


@pytest.mark.parametrize("cluster", [KILLED], indirect=True)
def test_a_stop_between_two_starts_is_heard(cluster):
    """The script is not started again, and the host has not failed."""
    cluster.start(DATA)
    wait_until(lambda: "Restarting it in 4 s" in cluster.log(DATA))
    cluster.processes[DATA].terminate()
    assert cluster.code(DATA) == 0, cluster.log(DATA)
    assert cluster.log(DATA).count("started\n") == 3
    assert cluster.failure(DATA) is None


@pytest.mark.parametrize("place", ["setup", "train_dataloader"])
def test_a_data_host_that_cannot_open_anything_fails_after_the_trainers_were_told(cluster, place):
    """Whatever comes first, the end of all leases or SIGTERM: both hosts name the user's own error."""
    assert cluster.fit("raises", place) == (1, 1), cluster.log(TRAINER) + cluster.log(DATA)
    assert "RemoteTransformError" in cluster.log(TRAINER)
    for host in (TRAINER, DATA):
        assert cluster.failure(host).startswith("ValueError: no such column\nFile ")
        assert f"in {place}: reached(" in cluster.failure(host)
    assert "Restarting it" not in cluster.log(DATA)


def test_a_port_that_is_taken_is_the_failure_of_the_data_host(cluster):
    """At once, with the address in the failure file."""
    with socket.socket() as taken:
        taken.bind((cluster.address(DATA), 0))
        taken.listen()
        port = taken.getsockname()[1]
        cluster.start(DATA, "fit", f"--data_service.port={port}", BROKEN_HOW="", BROKEN_PLACE="")
        assert cluster.code(DATA) == 1
    assert "DataServiceError" in cluster.failure(DATA)
    assert f"{cluster.address(DATA)}:{port}" in cluster.failure(DATA)


def test_a_trainer_that_never_comes_is_a_failure_after_the_time_for_the_start(cluster):
    """The failure file says for how long the host has waited."""
    cluster.start(DATA, "fit", "--data_service.startup_timeout_s=1", BROKEN_HOW="", BROKEN_PLACE="")
    assert cluster.code(DATA) == 1
    assert "DataServiceError: No trainer connected within 1 s." in cluster.failure(DATA)


class Script(Job):
    """A data host without a launcher, for signals that come at chosen moments."""

    def start_broken(self):
        """Start one whose setup() fails."""
        self.host = subprocess.Popen(
            [sys.executable, "-c", BROKEN],
            env={**self.env, "SAGEMAKER_BASE_DIR": str(self.folder / DATA), "PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def handles(self, signum):
        """Whether the data host handles a signal, which would end it otherwise."""
        fields = Path(f"/proc/{self.host.pid}/status").read_text().splitlines()
        caught = next(line.split()[1] for line in fields if line.startswith("SigCgt:"))
        return bool(int(caught, 16) >> (signum - 1) & 1)


@pytest.fixture
def script(tmp_path):
    """A data host that the test starts."""
    made = Script(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("is_terminated", [False, True])
@pytest.mark.parametrize(
    ("outcome", "code"), [("finished", 0), ("the process ended", 0), ("KeyError: 'x'", 1), (None, 1)]
)
def test_a_training_that_could_do_without_a_broken_host_succeeds(script, outcome, code, is_terminated):
    """The broken host fails only if the training did, also when SIGTERM comes right after the trainer has left."""
    script.start_broken()
    module = script.module()
    with pytest.raises((RemoteTransformError, DataServiceError), match="no such column"):
        module.setup("fit")
    if outcome is None:
        os.kill(module._feeder.pid, signal.SIGKILL)  # the trainer host vanishes
    module.close(outcome or "")
    if is_terminated:
        script.host.terminate()
    ended, said = script.end()
    assert ended == code, said
    assert (
        "could not open its loaders, and the training failed: setup('fit') raised ValueError" in said
    ) == bool(code)


def test_a_gentle_stop_lets_trainers_go_on(script):
    """Trainers need batches until they have come to save a checkpoint; the host leaves after them."""
    script.start()
    module = script.connected()
    script.host.send_signal(signal.SIGUSR2)
    assert len(list(module.train_dataloader())) == 2
    module.close("stopped")
    code, said = script.end()
    assert code == 0, said
    assert "The data host exits: the trainer rank has finished (stopped)" in said


def test_a_gentle_stop_outlives_the_network_process(script):
    """The one that is started in its place waits for nobody either."""
    script.start()
    module = script.connected()
    (network,) = [
        child
        for child in psutil.Process(script.host.pid).children()
        if "lightning_sm.data.server.process" in child.cmdline()
    ]
    script.host.send_signal(signal.SIGUSR2)
    os.kill(module._feeder.pid, signal.SIGKILL)
    network.kill()
    code, said = script.end()
    assert code == 0, said
    assert "the job was stopped before a trainer connected" in said
    module.close()


def test_a_gentle_stop_before_any_trainer_came_ends_the_host(script):
    """At once: there is nobody to wait for."""
    script.start()
    wait_until(lambda: script.handles(signal.SIGUSR2))
    script.host.send_signal(signal.SIGUSR2)
    code, said = script.end()
    assert code == 0, said
    assert "the job was stopped before a trainer connected" in said


def test_a_gentle_stop_interrupts_the_first_setup(script):
    """A download may take hours, and nobody trains yet."""
    script.start()
    module = script.module()
    module._client = module._start_feeder()
    module._stage = "validate"
    facts = {"run": 1, "stage": "validate", "loaders": "", "trainer": dict.fromkeys(("world_size",))}
    module._client._send("open", opening="1/validate//0", **facts)
    assert any("downloading" in line for line in iter(script.host.stdout.readline, ""))
    script.host.send_signal(signal.SIGUSR2)
    code, said = script.end()
    assert code == 0, said
    assert "the job was stopped before it served anything" in said
    module.close()
