"""How much of a host's CPUs, memory and GPUs a job uses.

CPU time is counted for this process and its descendants, which include all of the job's processes on this host. Memory
is counted for the whole machine, because on SageMaker each host is a separate machine. If hosts share a machine, memory
is counted like CPU time, for this process and its descendants.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from lightning_sm._linux import usable_cpus
from lightning_sm.record.events import GpuUse, HostUse

logger = logging.getLogger(__name__)

_GPU_DEVICE = Path("/dev/nvidia0")


class HostMeter:
    """A meter of a host's CPU, memory and GPU use between two calls.

    Args:
        is_machine_shared: Whether the hosts of the job share this machine (``SageMakerJob.shares_machine``).
    """

    def __init__(self, *, is_machine_shared: bool = False) -> None:
        self._is_machine_shared = is_machine_shared
        self._cpus = usable_cpus()
        self._gpus = Gpus()
        self._before = _take()

    def measure(self) -> HostUse:
        """Return the host's use since the previous call or, on the first call, since the meter was created."""
        before, after = self._before, _take()
        self._before = after
        memory = psutil.virtual_memory()
        used = sum(map(_memory_of, _own_processes())) if self._is_machine_shared else memory.total - memory.available
        elapsed_s, cpu_s = max(1e-6, after[0] - before[0]), max(0.0, after[1] - before[1])
        return HostUse(
            t=time.time(),
            cpu=min(1.0, cpu_s / elapsed_s / self._cpus),
            memory_bytes=used,
            memory_total_bytes=memory.total,
            gpus=self._gpus.measure(),
        )


class Gpus:
    """The NVIDIA GPUs of this host; none if the driver or the package nvidia-ml-py is missing."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: Sequence[Any] = ()
        try:
            import pynvml  # noqa: PLC0415 - an optional dependency

            self._nvml = pynvml
            pynvml.nvmlInit()
            count = pynvml.nvmlDeviceGetCount()
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        except ImportError:
            if _GPU_DEVICE.exists():
                logger.info("GPU use is not recorded. To record it, install the package nvidia-ml-py.")
        except self._nvml.NVMLError as error:
            logger.debug("GPU use is not recorded: %s.", error)

    def measure(self) -> list[GpuUse]:
        """Return the use of each GPU, except those that cannot report it, such as MIG instances."""
        uses = []
        for handle in self._handles:
            with contextlib.suppress(self._nvml.NVMLError):
                memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
                share = self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
                uses.append(GpuUse(share, int(memory.used), int(memory.total)))
        return uses


def _take() -> tuple[float, float]:
    """Return the current time and the job's CPU time in seconds, each from an arbitrary start."""
    return time.monotonic(), sum(map(_cpu_s_of, _own_processes()))


def _own_processes() -> list[psutil.Process]:
    own = psutil.Process()
    return [own, *own.children(recursive=True)]


def _cpu_s_of(process: psutil.Process) -> float:
    """Return the CPU seconds of a process and its exited children."""
    try:
        return float(sum(process.cpu_times()[:4]))
    except psutil.Error:  # the process has just exited
        return 0.0


def _memory_of(process: psutil.Process) -> int:
    """Return the bytes of a process's memory. Of pages that N processes share, such as forked ones, 1/N counts."""
    try:
        memory = process.memory_full_info()
    except psutil.Error:
        return 0
    return int(getattr(memory, "pss", memory.uss))  # Linux; elsewhere, shared pages do not count
