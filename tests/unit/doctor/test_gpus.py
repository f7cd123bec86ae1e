"""The doctor's checks of GPUs and NCCL, with fakes for torch and for device files."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_sm.doctor import gpus
from lightning_sm.doctor.context import Context, Status
from tests.fakes.job_folder import resource_config, write_job

_TORCH = """
class version: cuda = {cuda}
class cuda:
    is_available = staticmethod(lambda: {count} > 0)
    device_count = staticmethod(lambda: {count})
    class nccl: version = staticmethod(lambda: (2, 21, 5))
__version__ = "2.6.0"
"""


@pytest.fixture
def make(tmp_path):
    """Return a function that creates a host of a job on a GPU instance, with a fake torch and device files."""

    def made(torch="", files=0, instance="ml.g5.xlarge", **env):
        (tmp_path / "fake").mkdir()
        (tmp_path / "fake" / "torch.py").write_text(torch)
        (tmp_path / "dev").mkdir()
        for name in ["nvidiactl", "nvidia-uvm", *(f"nvidia{number}" for number in range(files))]:
            (tmp_path / "dev" / name).touch()
        resources = resource_config({"trainer": ["algo-1"]}, "algo-1", instance_types={"trainer": instance})
        base = write_job(tmp_path / "ml", resources)
        variables = {"SAGEMAKER_BASE_DIR": str(base), "PYTHONPATH": str(tmp_path / "fake"), **env}
        return replace(Context.of(variables), dev=tmp_path / "dev", sys=tmp_path / "sys")

    return made


def test_gpus_are_counted(make):
    """The number of GPUs is shown with torch's versions."""
    (result,) = gpus.gpus(make(_TORCH.format(cuda="'12.4'", count=2), files=2))
    assert (result.status, result.found) == (Status.OK, "torch 2.6.0, CUDA 12.4, NCCL 2.21.5: 2 GPUs")


@pytest.mark.parametrize(
    ("torch", "env", "expected"),
    [
        (_TORCH.format(cuda="'12.4'", count=0), {}, "0 GPUs, but instances of type ml.g5.xlarge have GPUs"),
        (_TORCH.format(cuda="'12.4'", count=2), {"SM_NUM_GPUS": "4"}, "2 GPUs, but the job has 4 on each host"),
        (_TORCH.format(cuda="'12.4'", count=2), {"LIGHTNING_SM_DEVICES": "4"}, "the job has 4 on each host"),
        (_TORCH.format(cuda="None", count=0), {}, "built without CUDA"),
        ("raise ImportError('libcudart.so.12')", {}, "ImportError: libcudart.so.12"),
    ],
)
def test_gpus_that_the_job_says_but_torch_cannot_use_are_a_problem(make, torch, env, expected):
    """A container without access to its GPUs, a build for CPUs and a failing import are distinguished."""
    (result,) = gpus.gpus(make(torch, **env))
    assert result.status is Status.PROBLEM
    assert expected in result.found


def test_torch_that_hangs_is_a_problem_in_time(make, monkeypatch):
    """A driver that does not answer is reported after a timeout."""
    monkeypatch.setattr(gpus, "_TORCH_S", 0.5)
    (result,) = gpus.gpus(make("import time; time.sleep(60)"))
    assert result.status is Status.PROBLEM
    assert "did not answer within 0.5 s" in result.found


def test_hidden_gpus_are_a_warning(make):
    """GPUs hidden by the user are a warning, not a problem with torch."""
    (result,) = gpus.gpus(make(files=2, CUDA_VISIBLE_DEVICES=""))
    assert result.status is Status.WARNING
    assert "hides all" in result.found


@pytest.mark.parametrize(
    ("instance", "env"),
    [("ml.m5.large", {}), ("ml.g5.xlarge", {"LIGHTNING_SM_HOST_ADDRESSES": '{"algo-1": "127.0.0.2"}'})],
)
def test_hosts_without_gpus_start_no_torch(make, instance, env):
    """Torch is not started on CPU instances, or in the emulator, whose instance types only decide roles."""
    (result,) = gpus.gpus(make("raise RuntimeError", instance=instance, **env))
    assert (result.status, result.found) == (Status.OK, "none")


def test_settings_of_nccl_are_listed(make):
    """Only settings of NCCL and libfabric are shown."""
    (result,) = gpus.fabric(make(NCCL_DEBUG="INFO", FI_LOG_LEVEL="warn", OTHER="x"))
    assert (result.status, result.found) == (Status.OK, "no EFA device; FI_LOG_LEVEL=warn, NCCL_DEBUG=INFO")


def _efa(context, vendor):
    device = context.sys / "class" / "infiniband" / "rdmap0s6" / "device"
    device.mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n")


@pytest.mark.parametrize(
    ("vendor", "has_plugin", "status"),
    [("0x1d0f", False, Status.WARNING), ("0x1d0f", True, Status.OK), ("0x15b3", False, Status.OK)],
)
def test_efa_without_a_plugin_for_nccl_is_a_warning(make, tmp_path, vendor, has_plugin, status):
    """Without libnccl-net*.so on the loader's path, NCCL silently uses TCP instead of Amazon's devices."""
    context = make(LD_LIBRARY_PATH=str(tmp_path))
    _efa(context, vendor)
    if has_plugin:
        (tmp_path / "libnccl-net-ofi.so").touch()
    (result,) = gpus.fabric(context)
    assert result.status is status
    assert result.found.startswith("rdmap0s6; " if vendor == "0x1d0f" else "no EFA device; ")


def test_a_plugin_of_conda_is_found(make, tmp_path, monkeypatch):
    """Conda's plugin is next to conda's NCCL, where the loader finds it without any variable."""
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libnccl-net.so.0").touch()
    context = make()
    _efa(context, "0x1d0f")
    assert [result.status for result in gpus.fabric(context)] == [Status.OK]
