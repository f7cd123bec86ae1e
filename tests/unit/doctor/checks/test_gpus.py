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


@pytest.mark.parametrize(("env", "expected"), [({"SM_NUM_GPUS": "4"}, "4 GPUs"), ({}, "ml.g5.xlarge")])
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
    """Device files are counted where there is no program to ask."""
    context = make()
    _devices(context, 2)
    (result,) = gpus.gpus(context)
    assert result.status is Status.WARNING
    assert result.found.startswith("2 device files")


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo 'NVIDIA-SMI has failed' >&2; exit 9", "exit code 9: NVIDIA-SMI has failed"),
        ("exit 0", "lists no GPU"),
        ("exec sleep 60", "did not end"),
        ("sleep 60", "did not end"),
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
        ({"SM_NUM_GPUS": "8"}, "The job says 8 GPUs, but 2"),
        ({"LIGHTNING_SM_DEVICES": "4"}, "LIGHTNING_SM_DEVICES=4, but there are 2"),
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
    """GPUs that are hidden on purpose are no problem of torch."""
    assert list(gpus.torch_cuda(make(_TWO, CUDA_VISIBLE_DEVICES=""))) == []


@pytest.mark.parametrize(
    ("module", "status", "expected"),
    [
        (_WORKING_TORCH, Status.OK, "torch 2.6.0, CUDA 12.4, NCCL 2.21.5: 2 GPUs"),
        ("raise ImportError('libcudart.so.12')", Status.PROBLEM, "ImportError: libcudart.so.12"),
        ("import threading; threading.Event().wait(60)", Status.WARNING, "No answer"),
    ],
)
def test_torch_answers_fails_or_hangs(make, tmp_path, module, status, expected):
    """What torch sees is shown; an import that fails is a problem with its last words, one that hangs ends in time."""
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "torch.py").write_text(module)
    context = make(_TWO, PYTHONPATH=str(tmp_path / "fake"), timeout_s=0.5 if "wait" in module else 20.0)
    (result,) = gpus.torch_cuda(context)
    assert result.status is status
    assert expected in result.found


@pytest.mark.parametrize(("cuda", "expected"), [("None", "built without CUDA"), ("'12.4'", "no GPU can be used")])
def test_torch_without_a_usable_gpu_is_a_problem(make, tmp_path, cuda, expected):
    """A build for CPUs and a driver that is too old are told apart."""
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


def _efa(context, vendor="0x1d0f"):
    device = context.sys / "class" / "infiniband" / "rdmap0s6" / "device"
    device.mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n")


def test_efa_without_a_device_is_a_warning(make):
    """FI_PROVIDER=efa needs a device of Amazon's; one of another vendor is none."""
    context = make(FI_PROVIDER="efa")
    _efa(context, vendor="0x15b3")
    _, result = gpus.fabric(context)
    assert result.status is Status.WARNING
    assert "no EFA device" in result.found


def test_disabled_rdma_on_efa_is_a_warning(make):
    """NCCL_IB_DISABLE=1 is left over from images for other instances."""
    context = make(FI_PROVIDER="efa", NCCL_IB_DISABLE="1")
    _efa(context)
    results = list(gpus.fabric(context))
    assert results[0].found.startswith("rdmap0s6; ")
    assert "NCCL_IB_DISABLE=1" in results[1].found
    assert "FI_PROVIDER=efa, but" not in "".join(result.found for result in results)


@pytest.mark.parametrize("has_plugin", [False, True])
def test_efa_without_a_plugin_for_nccl_is_a_warning(make, tmp_path, has_plugin):
    """NCCL finds its plugin for EFA as libnccl-net*.so, on the loader's path, or uses TCP without a word."""
    context = make(LD_LIBRARY_PATH=str(tmp_path))
    _efa(context)
    if has_plugin:
        (tmp_path / "libnccl-net-ofi.so").touch()
    assert any("no plugin of NCCL" in result.found for result in gpus.fabric(context)) is not has_plugin


@pytest.mark.parametrize(("count", "results"), [(1, 1), (2, 2)])
def test_disabled_peer_access_is_a_warning_on_several_gpus(make, count, results):
    """NCCL_P2P_DISABLE=1 costs nothing with one GPU."""
    context = make(NCCL_P2P_DISABLE="1")
    _devices(context, count)
    assert len(list(gpus.fabric(context))) == results
