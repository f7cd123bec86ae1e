"""Checks of GPUs, and of EFA between hosts. torch runs in a process of its own, because it may hang or crash."""

from __future__ import annotations

import ctypes.util
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from lightning_sm._text import listed
from lightning_sm.doctor.context import Context, run, text_of
from lightning_sm.doctor.report import Result, ok, problem, warning
from lightning_sm.job.instance_types import has_gpus
from lightning_sm.job.redaction import shown
from lightning_sm.job.variables import DEVICES

# nvidia-smi takes 1 to 5 s if the driver has to load first (no persistence mode).
_SMI_S = 15.0
# An import of torch takes 2 s, or tens of seconds from a disk that is lazily loaded.
_TORCH_S = 25.0
_AMAZON_VENDOR = "0x1d0f"  # PCI ID of Amazon.com, Inc.

_TORCH_SCRIPT = """\
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else None
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "count": count, "nccl": nccl}))
"""


def gpus(context: Context) -> Iterator[Result]:
    """Count the GPUs, and compare them with what the job expects."""
    expected = _expectation(context)
    num_files = context.gpu_files()
    program = _nvidia_smi(context)
    if program is None:
        if num_files:
            yield warning(
                "GPUs",
                f"There are GPU device files ({num_files}), but nvidia-smi is not installed.",
                "Set NVIDIA_DRIVER_CAPABILITIES=compute,utility in the image (ENV in its Dockerfile).",
            )
        elif expected:
            yield problem(
                "GPUs",
                f"{expected} but this container sees none: no /dev/nvidia0 and no nvidia-smi.",
                "Start the container with GPUs (docker run --gpus all), and check NVIDIA_VISIBLE_DEVICES.",
            )
        else:
            yield ok("GPUs", "none")
        return
    found = _query(program, context)
    if isinstance(found, str) or not found:
        text = found if isinstance(found, str) else "nvidia-smi lists no GPU."
        # Not always a problem, because a machine without GPUs may have a driver, too.
        make = problem if expected or num_files else warning
        yield make("GPUs", text, "Check the driver of the instance: nvidia-smi, dmesg.")
        return
    models = Counter(name for name, _ in found)
    shown = ", ".join(f"{count} x {name}" for name, count in models.items())
    yield ok("GPUs", f"{shown}, driver {found[0][1]}")
    yield from _contradictions(context, len(found))


def torch_cuda(context: Context) -> Iterator[Result]:
    """Let torch count its GPUs, on machines that have nvidia-smi."""
    if _nvidia_smi(context) is None or importlib.util.find_spec("torch") is None or _hides_gpus(context):
        return
    timeout_s = context.seconds(_TORCH_S)
    try:
        ended = run([sys.executable, "-c", _TORCH_SCRIPT], context.env, timeout_s)
    except subprocess.TimeoutExpired:
        yield warning("torch and CUDA", f"No answer within {timeout_s:.0f} s.", "Retry with a larger --timeout.")
        return
    if ended.returncode != 0:
        last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        yield problem("torch and CUDA", f"Exit code {ended.returncode}: {last}", "Reinstall torch.")
        return
    answer = json.loads(ended.stdout.strip().splitlines()[-1])
    shown = f"torch {answer['torch']}, CUDA {answer['cuda']}, NCCL {answer['nccl']}"
    if answer["count"]:
        yield ok("torch and CUDA", f"{shown}; GPUs: {answer['count']}")
    elif answer["cuda"] is None:
        yield problem(
            "torch and CUDA", f"torch {answer['torch']} was built without CUDA.", "Install a torch build for CUDA."
        )
    else:
        yield problem(
            "torch and CUDA",
            f"{shown}: torch cannot use any GPU.",
            f"The driver must support CUDA {answer['cuda']}; see python -c 'import torch; torch.cuda.init()'.",
        )


def fabric(context: Context) -> Iterator[Result]:
    """Show EFA devices and the settings of NCCL and libfabric; find EFA that NCCL would not use."""
    devices = _efa_devices(context)
    names = sorted(name for name in context.env if name.startswith(("NCCL_", "FI_")))
    settings = (
        ", ".join(f"{name}={shown(name, context.env[name])}" for name in names) or "no settings of NCCL and libfabric"
    )
    yield ok("EFA and NCCL", f"{listed(devices) or 'no EFA device'}; {settings}")
    if devices and not _has_network_plugin(context):
        yield warning(
            "EFA and NCCL",
            "There is an EFA device, but NCCL's plugin for it (libnccl-net*.so) is not installed: NCCL uses TCP.",
            "Build the image with --build-arg EFA=1, run AWS's EFA installer in it, or add the plugin's folder to "
            "LD_LIBRARY_PATH.",
        )


def _expectation(context: Context) -> str:
    """Name what says that there are GPUs here, as the beginning of a sentence; empty if nothing does."""
    job = context.job
    if job is None or context.shares_machine:  # the emulator's instance types decide roles, not devices
        return ""
    if job.num_gpus:
        return f"SM_NUM_GPUS is {job.num_gpus},"
    instance_type = job.current_group.instance_type
    return f"Instances of type {instance_type} have GPUs," if has_gpus(instance_type) else ""


def _nvidia_smi(context: Context) -> str | None:
    return shutil.which("nvidia-smi", path=context.env.get("PATH"))


def _query(program: str, context: Context) -> list[tuple[str, str]] | str:
    """Return name and driver of each GPU, or what went wrong."""
    timeout_s = context.seconds(_SMI_S)
    try:
        ended = run([program, "--query-gpu=name,driver_version", "--format=csv,noheader"], context.env, timeout_s)
    except subprocess.TimeoutExpired:
        return f"nvidia-smi did not exit within {timeout_s:.0f} s."
    except OSError as error:
        return f"nvidia-smi cannot be started: {error}."
    if ended.returncode != 0:
        message = " ".join((ended.stdout + ended.stderr).split())
        return f"nvidia-smi failed with exit code {ended.returncode}: {message[:200]}"
    pairs = [line.rpartition(",") for line in ended.stdout.splitlines() if "," in line]
    return [(name.strip(), driver.strip()) for name, _, driver in pairs]


def _contradictions(context: Context, count: int) -> Iterator[Result]:
    job = context.job
    if context.shares_machine:
        return
    if job is not None and job.num_gpus > count:
        yield problem(
            "GPUs", f"SM_NUM_GPUS is {job.num_gpus}, but nvidia-smi lists {count}.", "Check NVIDIA_VISIBLE_DEVICES."
        )
    if job is not None and (job.devices or 0) > count:
        yield problem(
            "GPUs", f"{DEVICES.name}={job.devices}, but nvidia-smi lists {count}.", "Set it to the number of GPUs."
        )
    if _hides_gpus(context):
        value = context.env["CUDA_VISIBLE_DEVICES"]
        yield warning("GPUs", f"CUDA_VISIBLE_DEVICES={value!r} hides all of them.", "Unset it to train on GPUs.")


def _hides_gpus(context: Context) -> bool:
    return context.env.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")


def _efa_devices(context: Context) -> list[str]:
    """Return the names of the RDMA devices that Amazon made."""
    try:
        devices = sorted((context.sys / "class" / "infiniband").iterdir())
    except OSError:
        return []
    return [device.name for device in devices if text_of(device / "device" / "vendor") == _AMAZON_VENDOR]


def _has_network_plugin(context: Context) -> bool:
    folders = [Path(folder) for folder in context.env.get("LD_LIBRARY_PATH", "").split(os.pathsep) if folder]
    folders.append(Path(sys.prefix, "lib"))  # conda's NCCL looks for the plugin beside itself
    is_on_path = any(path for folder in folders for path in folder.glob("libnccl-net*.so*"))
    return is_on_path or ctypes.util.find_library("nccl-net") is not None
