"""Fixtures for tests that run a script's CLI in this process, or start hosts and emulators."""

from __future__ import annotations

import inspect
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.fakes.job_folder import resource_config, write_job
from tests.fakes.process_state import restored_process

if TYPE_CHECKING:
    from tests.fakes.small_app import Host


@pytest.fixture(autouse=True)
def _not_prepared() -> Iterator[None]:
    """Undo what a job did to prepare this process for its rank, before the next test runs another job."""
    with restored_process():
        yield


@pytest.fixture(autouse=True)
def _unpatched_loaders() -> Iterator[None]:
    """Undo Lightning's patch of DataLoader, which stays in place if a loader hook raises.

    It would keep a later fit in this process from recreating a loader.
    """
    yield
    torch_data = sys.modules.get("torch.utils.data")
    classes = [torch_data.DataLoader, torch_data.BatchSampler] if torch_data else []
    while classes:
        cls = classes.pop()
        classes += cls.__subclasses__()
        for name in ("__init__", "__setattr__", "__delattr__"):
            if name in cls.__dict__:
                setattr(cls, name, inspect.unwrap(cls.__dict__[name]))


@pytest.fixture
def restored_signals() -> Iterator[None]:
    """Restore the signal handlers, because SpotCheckpoint keeps its handlers after a run."""
    from lightning_sm.training.callbacks.spot_checkpoint import STOP_SIGNALS

    before = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """The only host of a job without channels and hyperparameters, unless a test calls ``configure`` again.

    The working directory is an empty folder, so that a test can see files left behind there.
    """
    from tests.fakes.small_app import Host

    (tmp_path / "code").mkdir()
    monkeypatch.chdir(tmp_path / "code")
    return Host(tmp_path / "ml", monkeypatch).configure()


@pytest.fixture(scope="session")
def mpi4py(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ``PYTHONPATH`` folder with mpi4py, which must not be installed in the tests' environment.

    Otherwise Lightning would initialise MPI in every process that creates a Trainer without a cluster environment.
    """
    folder = tmp_path_factory.mktemp("mpi4py")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), "mpi4py>=4,<5"],
        check=True,
        timeout=90,
    )
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A host of a job with two trainer hosts and a data host, laid out as SageMaker does it."""
    groups = {"trainer": ["algo-2", "algo-1"], "data": ["algo-3"]}
    return write_job(
        tmp_path / "ml", resource_config(groups, "algo-2", instance_types=dict.fromkeys(groups, "ml.m5.large"))
    )


@pytest.fixture
def alone(tmp_path: Path) -> Path:
    """The only host of a job."""
    return write_job(tmp_path / "ml", resource_config({"g": ["algo-1"]}, "algo-1"))


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """The user's working directory."""
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    """The folder for ``--base-dir``, which must not exist yet."""
    return tmp_path / "jobs"
