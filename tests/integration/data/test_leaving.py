"""A data host of a job leaves when nobody needs it any more, however that came about."""

import os
import signal
import subprocess
import sys
import weakref

import psutil
import pytest

from lightning_sm import DataHost, DataServiceSettings, RemoteDataModule, SageMakerJob, Topology
from lightning_sm.data.service import remote
from lightning_sm.errors import DataSettingsError
from tests.fakes.job_folder import resource_config, write_job
from tests.fakes.reserved_job import reserve_job
from tests.fakes.small_app import SmallData
from tests.integration.hosts import REPOSITORY

pytestmark = pytest.mark.processes

TIMEOUT_S = 90
GROUPS = {"gpu": ["algo-1"], "data": ["algo-2"]}

# The last lines of a user's script, on a data host.
SERVE = """
import sys
from lightning_sm import DataServiceSettings, SageMakerJob, Topology
from lightning_sm._log import show_log_lines
from lightning_sm.data.service import serve
from tests.fakes.small_app import SmallData

class Slow(SmallData):
    def setup(self, stage):
        if stage == "validate":
            print("downloading", flush=True)
            sys.stdin.readline()

show_log_lines()
job = SageMakerJob.from_environment()
settings = DataServiceSettings(workers=1, lease_s=5, startup_timeout_s=float(sys.argv[1]))
serve(Slow(), job, Topology.from_job(job), settings)
"""


class Job:
    """A data host in a process of its own, and this process as the trainer."""

    def __init__(self, folder):
        self.folder = folder
        name, _, ports = reserve_job(GROUPS)
        weakref.finalize(self, ports.close)
        variables = {
            "TRAINING_JOB_NAME": name,
            "LIGHTNING_SM_HOST_ADDRESSES": '{"algo-1": "127.0.0.1", "algo-2": "127.0.0.1"}',
            "PYTHONPATH": str(REPOSITORY),
        }
        self.env = {**os.environ, **variables}
        for name in ("algo-1", "algo-2"):
            write_job(folder / name, resource_config(GROUPS, name))

    def start(self, startup_timeout_s=60.0):
        """Start the data host."""
        self.host = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(startup_timeout_s)],
            env={**self.env, "SAGEMAKER_BASE_DIR": str(self.folder / "algo-2")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def module(self):
        """The DataModule of the trainer."""
        job = SageMakerJob.from_environment({**self.env, "SAGEMAKER_BASE_DIR": str(self.folder / "algo-1")})
        return remote(SmallData(), job, Topology.from_job(job), DataServiceSettings(startup_timeout_s=TIMEOUT_S))

    def connected(self):
        """The DataModule of the trainer, after its first batch."""
        module = self.module()
        module.setup("fit")
        next(iter(module.train_dataloader()))
        return module

    def end(self):
        """Wait for the data host; its exit code and what it said."""
        said, _ = self.host.communicate(timeout=TIMEOUT_S)
        return self.host.returncode, said

    def close(self):
        """Kill what is left; pytest shows what it said if the test failed."""
        if self.host.poll() is None:
            self.host.kill()
            sys.stdout.write(self.host.communicate()[0])


@pytest.fixture
def job(tmp_path):
    """A job with one data host."""
    job = Job(tmp_path)
    yield job
    job.close()


def test_it_leaves_when_the_trainer_has_finished(job):
    """With exit code 0, and the reason in its log."""
    job.start()
    job.connected().close("finished")
    code, said = job.end()
    assert code == 0, said
    assert "The data host exits: the trainer rank has finished (finished)" in said


def test_it_stays_between_two_runs_of_the_trainer(job):
    """The end of fit is not the end of the script: test may follow."""
    job.start()
    module = job.connected()
    assert isinstance(module, RemoteDataModule)
    module.teardown("fit")
    module.setup("test")
    module.close("finished")
    assert job.end()[0] == 0


def test_it_leaves_when_a_failed_trainer_says_so(job):
    """The trainers' failure is not the data host's."""
    job.start()
    module = job.connected()
    module.on_exception(ValueError("loss is nan"))
    code, said = job.end()
    assert code == 0, said
    assert "the trainer rank has finished (ValueError: loss is nan)" in said


def test_it_leaves_when_a_trainer_host_vanishes(job):
    """Nobody says goodbye: the lease ends."""
    job.start()
    module = job.connected()
    os.kill(module._feeder.pid, signal.SIGKILL)
    code, said = job.end()
    assert code == 0, said
    assert "the trainer rank has finished (lost connection)" in said
    module.close()


def test_it_fails_when_no_trainer_comes(job):
    """It says for how long it has waited."""
    job.start(startup_timeout_s=1.0)
    code, said = job.end()
    assert code == 1
    assert "No trainer connected within 1 s" in said


@pytest.mark.parametrize("stage", ["fit", "validate"])
def test_sigterm_ends_it(job, stage):
    """At once, also in the middle of a hook of the user's; nothing is left."""
    job.start()
    module = job.module()
    if stage == "fit":
        module.setup(stage)
    else:
        module._client = module._start_feeder()
        module._stage = stage
        module._num_runs = 1
        module._client._send(
            "open", opening="1/validate//0", run=1, stage=stage, loaders="", trainer=dict.fromkeys(("world_size",))
        )
        assert any("downloading" in line for line in iter(job.host.stdout.readline, ""))
    children = psutil.Process(job.host.pid).children(recursive=True)
    job.host.send_signal(signal.SIGTERM)
    code, said = job.end()
    assert code == 0, said
    assert "The data host exits: it was terminated (SIGTERM)" in said
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    module.close()


def test_a_second_training_ends_the_first_with_an_error():
    """A data host serves one training at a time; the one that was displaced says so at once, and does not hang."""
    with DataHost(SmallData(), workers=1) as host:
        first, second = (RemoteDataModule(SmallData(), [host.address]) for _ in range(2))
        first.setup("fit")
        batches = iter(first.train_dataloader())
        next(batches)
        second.setup("fit")
        assert len(list(second.train_dataloader())) == 2
        with pytest.raises(DataSettingsError, match="Another training has taken over this data host"):
            list(first.train_dataloader())
        first.close()
        second.close()
