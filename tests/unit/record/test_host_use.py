"""Measuring the load of a host: its processes, its machine, and GPUs with a fake NVML."""

import logging
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from lightning_sm.record import host_use
from lightning_sm.record.host_use import Gpus, HostMeter


def test_a_host_that_shares_its_machine_counts_its_own_processes(monkeypatch):
    """A host on a shared machine counts its processes, including their children."""
    monkeypatch.setattr(host_use, "usable_cpus", lambda: 1)
    meter = HostMeter(is_machine_shared=True)
    began = time.monotonic()
    busy = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", busy], check=True, timeout=60)
    use = meter.measure()
    assert 0.3 / (time.monotonic() - began) * 0.9 <= use.cpu <= 1
    assert 0 < use.memory_bytes < use.memory_total_bytes


def test_memory_that_processes_share_counts_once():
    """Pages that three forked processes inherit count once on a shared machine, not four times."""
    code = """
import os, sys
memory = os.urandom(128 << 20)
for _ in range(3):
    if os.fork() == 0:
        break
os.write(1, b".")
sys.stdin.read()
os._exit(0)
"""
    meter = HostMeter(is_machine_shared=True)
    before = meter.measure().memory_bytes
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        for _ in range(4):
            assert process.stdout.read(1) == b"."
        added = meter.measure().memory_bytes - before
        process.stdin.close()
    assert 96 << 20 < added < 256 << 20


def test_a_host_with_a_machine_of_its_own_has_its_memory():
    """A host with a dedicated machine, as on SageMaker, reports the machine's memory."""
    use = HostMeter().measure()
    assert 0 <= use.cpu <= 1
    assert 0 < use.memory_bytes < use.memory_total_bytes == psutil.virtual_memory().total


class NVMLError(Exception):
    """A stand-in for pynvml.NVMLError."""


def nvml(**changes):
    """Return a stand-in for pynvml with two GPUs, of which the second, a MIG partition, reports no utilization."""

    def utilization(handle):
        if handle:
            raise NVMLError("Not Supported")
        return SimpleNamespace(gpu=74)

    functions = {
        "NVMLError": NVMLError,
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(used=3, total=8),
        "nvmlDeviceGetUtilizationRates": utilization,
    }
    return SimpleNamespace(**{**functions, **changes})


def test_gpus_that_say_it_are_measured(monkeypatch):
    """A GPU that does not report its utilization is left out."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    (gpu,) = Gpus().measure()
    assert (gpu.use, gpu.memory_bytes, gpu.memory_total_bytes) == (0.74, 3, 8)


def test_without_a_driver_there_are_no_gpus(monkeypatch):
    """Without the driver's library, an installed NVML reports no GPUs."""

    def fail():
        raise NVMLError("NVML Shared Library Not Found")

    monkeypatch.setitem(sys.modules, "pynvml", nvml(nvmlInit=fail))
    assert Gpus().measure() == []


@pytest.mark.parametrize(("has_gpu", "said"), [(True, 1), (False, 0)])
def test_without_nvml_a_host_with_gpus_says_what_is_missing(monkeypatch, caplog, tmp_path, has_gpu, said):
    """A host with GPUs logs one line if NVML is missing; a host without GPUs logs nothing."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(host_use, "_GPU_DEVICE", tmp_path if has_gpu else tmp_path / "none")
    with caplog.at_level(logging.INFO):
        assert Gpus().measure() == []
    assert len(caplog.messages) == said
