"""The doctor's checks of GPUs and of NCCL, with a script in the place of nvidia-smi and files in that of devices."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from lightning_sm.doctor.checks import gpus
from lightning_sm.doctor.context import Context
from lightning_sm.doctor.report import Status
from tests.fakes.job_folder import resource_config, write_job

_TWO = "echo 'NVIDIA A10G, 535.104'; echo 'NVIDIA A10G, 535.104'"
_WORKING_TORCH = """
class version: cuda = "12.4"
class cuda:
    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 2)
    class nccl: version = staticmethod(lambda: (2, 21, 5))
__version__ = "2.6.0"
"""


@pytest.fixture
def make(tmp_path):
    """Makes a host of a job on a GPU instance: what nvidia-smi does, and variables."""

    def made(script=None, *, timeout_s=20.0, **env):
        folder = tmp_path / "bin"
        folder.mkdir()
        if script is not None:
            (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
            (folder / "nvidia-smi").chmod(0o755)
        base = write_job(tmp_path / "ml", resource_config({"trainer": ["algo-1"]}, "algo-1"))
        variables = {"SAGEMAKER_BASE_DIR": str(base), "PATH": f"{folder}:/usr/bin:/bin", **env}
        return replace(Context.of(variables, timeout_s), dev=tmp_path / "dev", sys=tmp_path / "sys")

    return made


def _devices(context, count):
    context.dev.mkdir()
    for name in ["nvidiactl", "nvidia-uvm", *(f"nvidia{number}" for number in range(count))]:
        (context.dev / name).write_text("")


def test_gpus_are_counted_by_model(make):
    """Models, number and driver are shown."""
    (result,) = gpus.gpus(make(_TWO))
    assert (result.status, result.found) == (Status.OK, "2 x NVIDIA A10G, driver 535.104")


@pytest.mark.parametrize(("env", "expected"), [({"SM_NUM_GPUS": "4"}, "SM_NUM_GPUS is 4"), ({}, "ml.g5.xlarge")])
def test_gpus_that_the_job_says_but_nobody_sees_are_a_problem(make, env, expected):
    """A container without access to the GPUs of its instance is a problem."""
    (result,) = gpus.gpus(make(**env))
    assert result.status is Status.PROBLEM
    assert expected in result.found


def test_emulated_instance_types_promise_no_gpus(make):
    """The emulator's instance types decide roles, not devices."""
    context = make(LIGHTNING_SM_HOST_ADDRESSES='{"algo-1": "127.0.0.2"}')
    (result,) = gpus.gpus(context)
    assert (result.status, result.found) == (Status.OK, "none")


def test_devices_without_nvidia_smi_are_a_warning(make):
    """Without nvidia-smi, device files are counted."""
    context = make()
    _devices(context, 2)
    (result,) = gpus.gpus(context)
    assert result.status is Status.WARNING
    assert result.found.startswith("There are GPU device files (2)")


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo 'NVIDIA-SMI has failed' >&2; exit 9", "exit code 9: NVIDIA-SMI has failed"),
        ("exit 0", "lists no GPU"),
        ("exec sleep 60", "did not exit"),
        ("sleep 60", "did not exit"),
    ],
)
def test_nvidia_smi_that_fails_is_a_problem(make, script, expected):
    """A driver that answers with an error, with nothing or not at all is reported in time; its children end, too."""
    started = time.monotonic()
    (result,) = gpus.gpus(make(script, timeout_s=0.3 if "sleep" in script else 20.0))
    assert result.status is Status.PROBLEM
    assert expected in result.found
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"SM_NUM_GPUS": "8"}, "SM_NUM_GPUS is 8, but nvidia-smi lists 2"),
        ({"LIGHTNING_SM_DEVICES": "4"}, "LIGHTNING_SM_DEVICES=4, but nvidia-smi lists 2"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "hides all"),
    ],
)
def test_contradictions_with_the_gpus_are_found(make, env, expected):
    """What the job, a setting and a variable say is compared with the GPUs that there are."""
    _, result = gpus.gpus(make(_TWO, **env))
    assert result.status is not Status.OK
    assert expected in result.found


def test_torch_is_asked_on_machines_with_nvidia_smi_only(make):
    """Without nvidia-smi, or with hidden GPUs, torch is not started."""
    assert list(gpus.torch_cuda(make())) == []


def test_torch_is_not_asked_about_hidden_gpus(make):
    """GPUs that are hidden on purpose are not a problem of torch."""
    assert list(gpus.torch_cuda(make(_TWO, CUDA_VISIBLE_DEVICES=""))) == []


@pytest.mark.parametrize(
    ("module", "status", "expected"),
    [
        (_WORKING_TORCH, Status.OK, "torch 2.6.0, CUDA 12.4, NCCL 2.21.5; GPUs: 2"),
        ("raise ImportError('libcudart.so.12')", Status.PROBLEM, "ImportError: libcudart.so.12"),
        ("import time; time.sleep(60)", Status.WARNING, "No answer"),
    ],
)
def test_torch_answers_fails_or_hangs(make, tmp_path, module, status, expected):
    """What torch sees is shown; an import that fails is a problem with its last words, one that hangs ends in time."""
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "torch.py").write_text(module)
    context = make(_TWO, PYTHONPATH=str(tmp_path / "fake"), timeout_s=0.5 if "sleep" in module else 20.0)
    (result,) = gpus.torch_cuda(context)
    assert result.status is status
    assert expected in result.found


@pytest.mark.parametrize(("cuda", "expected"), [("None", "built without CUDA"), ("'12.4'", "torch cannot use any GPU")])
def test_torch_without_a_usable_gpu_is_a_problem(make, tmp_path, cuda, expected):
    """A build for CPUs and a driver that is too old are distinguished."""
    (tmp_path / "torch.py").write_text(
        f"class version: cuda = {cuda}\n"
        "class nccl: version = staticmethod(lambda: (2, 21, 5))\n"
        "class cuda: is_available = staticmethod(lambda: False)\n"
        "cuda.nccl = nccl\n__version__ = '2.6.0'"
    )
    (result,) = gpus.torch_cuda(make(_TWO, PYTHONPATH=str(tmp_path)))
    assert result.status is Status.PROBLEM
    assert expected in result.found


def test_settings_of_nccl_are_listed(make):
    """Settings of NCCL and libfabric are shown, others are not."""
    (result,) = gpus.fabric(make(NCCL_DEBUG="INFO", FI_LOG_LEVEL="warn", OTHER="x"))
    assert result.status is Status.OK
    assert "NCCL_DEBUG=INFO" in result.found
    assert "FI_LOG_LEVEL=warn" in result.found
    assert "OTHER" not in result.found


def _efa(context, vendor):
    device = context.sys / "class" / "infiniband" / "rdmap0s6" / "device"
    device.mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n")


@pytest.mark.parametrize(
    ("vendor", "has_plugin", "statuses"),
    [
        ("0x1d0f", False, [Status.OK, Status.WARNING]),
        ("0x1d0f", True, [Status.OK]),
        ("0x15b3", False, [Status.OK]),
    ],
)
def test_efa_without_a_plugin_for_nccl_is_a_warning(make, tmp_path, vendor, has_plugin, statuses):
    """NCCL finds its plugin for Amazon's devices as libnccl-net*.so, on the loader's path, or silently uses TCP."""
    context = make(LD_LIBRARY_PATH=str(tmp_path))
    _efa(context, vendor)
    if has_plugin:
        (tmp_path / "libnccl-net-ofi.so").touch()
    results = list(gpus.fabric(context))
    assert [result.status for result in results] == statuses
    assert results[0].found.startswith("rdmap0s6; " if vendor == "0x1d0f" else "no EFA device; ")


def test_a_plugin_of_conda_is_found(make, tmp_path, monkeypatch):
    """Conda's plugin lies beside conda's NCCL, where the loader looks without any variable."""
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libnccl-net.so.0").touch()
    context = make()
    _efa(context, "0x1d0f")
    assert [result.status for result in gpus.fabric(context)] == [Status.OK]
