"""How the processes of a data host start, and end before they serve."""

import signal
import sys
from pathlib import Path
from subprocess import run

import psutil
import pytest
from torch.utils.data import DataLoader

from lightning_sm import DataHost, RemoteDataModule
from lightning_sm.data.host import data_host
from lightning_sm.errors import DataServiceError
from tests.integration.data.datasets import Data
from tests.integration.emulators import until

pytestmark = pytest.mark.processes


def make():
    """Two batches."""
    return DataLoader(range(4), batch_size=2)


def test_a_preloaded_process_serves_the_next_data_host():
    """It imports torch before there is a DataModule; the data host after it starts a process of its own."""
    DataHost.preload()
    [(process, _)] = DataHost._preloaded
    maps = Path(f"/proc/{process.pid}/maps")
    until(lambda: "libtorch_cpu" in maps.read_text(), "the process to import torch", 60.0)
    with DataHost(workers=1) as host:
        assert host.pid == process.pid
        assert DataHost._preloaded == []
        module = RemoteDataModule(Data(make), [host.address])
        module.setup("fit")
        assert [batch.tolist() for batch in module.train_dataloader()] == [[0, 1], [2, 3]]
        module.teardown("fit")


def test_a_preloaded_process_that_nobody_needs_ends_with_the_script():
    """Its script imports neither torch nor Lightning for it."""
    script = (
        "import sys; from lightning_sm import DataHost; DataHost.preload(); "
        "print(DataHost._preloaded[0][0].pid); assert 'torch' not in sys.modules"
    )
    done = run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert not psutil.pid_exists(int(done.stdout))


def test_a_data_host_that_does_not_listen_is_an_error(monkeypatch):
    """It imports for too long: an error says after which time, and its process does not outlive it."""
    monkeypatch.setattr(data_host, "_START_TIMEOUT_S", 0.1)
    host = DataHost()
    with pytest.raises(DataServiceError, match=r"is not listening after 0\.1 s"):
        host.__enter__()
    assert host._process.returncode == -signal.SIGKILL
