"""Checks of GPUs and of what NCCL uses between hosts. torch is asked in a process of its own: it may hang, or crash."""

from __future__ import annotations

import ctypes.util
import importlib.util
import json
import os
import resource
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from lightning_sm.doctor.context import Context, run, text_of
from lightning_sm.doctor.report import Result, listed, ok, problem, warning
from lightning_sm.job.instance_types import has_gpus
from lightning_sm.job.variables import DEVICES

# nvidia-smi takes 1 to 5 s where the driver has to load first (no persistence mode).
_SMI_S = 15.0
# An import of torch takes 2 s, and tens of seconds from a disk that is lazily loaded.
_TORCH_S = 25.0
_AMAZON_VENDOR = "0x1d0f"  # PCI ID of Amazon.com, Inc.
_HIDING = frozenset({"", "-1"})

_ASK_TORCH = """\
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else None
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "count": count, "nccl": nccl}))
"""


def gpus(context: Context) -> Iterator[Result]:
    """Count the GPUs and compare them with what the job says.

    Args:
        context: The host.
    """
    expected = _expected(context)
    program = _nvidia_smi(context)
    if program is None:
        files = context.gpu_files()
        if files:
            yield warning(
                "GPUs",
                f"{files} device files, but no nvidia-smi to ask.",
                "ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility in the image.",
            )
        elif expected:
            yield problem(
                "GPUs",
                f"{expected} but this container sees none: no /dev/nvidia0 and no nvidia-smi.",
                "Start the container with GPUs (docker run --gpus all), and see NVIDIA_VISIBLE_DEVICES.",
            )
        else:
            yield ok("GPUs", "none")
        return
    found = _ask_nvidia_smi(program, context)
    if isinstance(found, str) or not found:
        text = found if isinstance(found, str) else "nvidia-smi lists no GPU."
        # On a machine that needs none, a driver may be left over.
        make = problem if expected or context.gpu_files() else warning
        yield make("GPUs", text, "Look at the driver of the instance: nvidia-smi, dmesg.")
        return
    models = Counter(name for name, _ in found)
    shown = ", ".join(f"{count} x {name}" for name, count in models.items())
    yield ok("GPUs", f"{shown}, driver {found[0][1]}")
    yield from _compared(context, len(found))


def torch_cuda(context: Context) -> Iterator[Result]:
    """Ask torch for its GPUs, on machines that have nvidia-smi.

    Args:
        context: The host.
    """
    if _nvidia_smi(context) is None or importlib.util.find_spec("torch") is None or _hides_gpus(context):
        return
    timeout_s = context.seconds(_TORCH_S)
    try:
        ended = run([sys.executable, "-c", _ASK_TORCH], context.env, timeout_s)
    except subprocess.TimeoutExpired:
        yield warning("torch and CUDA", f"No answer within {timeout_s:.0f} s.", "Try again with a larger --timeout.")
        return
    if ended.returncode != 0:
        last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        yield problem("torch and CUDA", f"Exit code {ended.returncode}: {last}", "Install torch anew.")
        return
    answer = json.loads(ended.stdout.strip().splitlines()[-1])
    shown = f"torch {answer['torch']}, CUDA {answer['cuda']}, NCCL {answer['nccl']}"
    if answer["count"]:
        yield ok("torch and CUDA", f"{shown}: {answer['count']} GPUs")
    elif answer["cuda"] is None:
        yield problem(
            "torch and CUDA", f"torch {answer['torch']} was built without CUDA.", "Install a torch build for CUDA."
        )
    else:
        yield problem(
            "torch and CUDA",
            f"{shown}: no GPU can be used.",
            f"The driver must support CUDA {answer['cuda']}; see python -c 'import torch; torch.cuda.init()'.",
        )


def fabric(context: Context) -> Iterator[Result]:
    """List EFA devices and the settings of NCCL and libfabric, and warn of known traps.

    Args:
        context: The host.
    """
    env = context.env
    devices = _efa_devices(context)
    names = sorted(name for name in env if name.startswith(("NCCL_", "FI_")) or name == "RDMAV_FORK_SAFE")
    settings = ", ".join(f"{name}={env[name]}" for name in names) or "no settings of NCCL and libfabric"
    yield ok("EFA and NCCL", f"{listed(devices) or 'no EFA device'}; {settings}")
    if env.get("FI_PROVIDER") == "efa" and not devices:
        yield warning(
            "EFA and NCCL",
            "FI_PROVIDER=efa, but there is no EFA device here.",
            "Unset it: libfabric may use no other provider, and finds none.",
        )
    if env.get("NCCL_IB_DISABLE") == "1" and devices:
        yield warning(
            "EFA and NCCL",
            "NCCL_IB_DISABLE=1 on a host with EFA.",
            "Unset it, if the image did not mean it: sagemaker-pytorch-training sets it on every instance.",
        )
    if env.get("NCCL_P2P_DISABLE") == "1" and context.gpu_files() > 1:
        yield warning(
            "EFA and NCCL",
            f"NCCL_P2P_DISABLE=1 with {context.gpu_files()} GPUs: they talk through the host's memory.",
            "Unset it.",
        )
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if devices and soft != resource.RLIM_INFINITY:
        yield warning(
            "EFA and NCCL",
            f"ulimit -l is {soft // 1024} KiB; EFA needs page-locked memory.",
            "docker run --ulimit memlock=-1",
        )
    if devices and not _has_network_plugin(context):
        yield warning(
            "EFA and NCCL",
            "There is an EFA device, but no plugin of NCCL for it (libnccl-net*.so): NCCL uses TCP.",
            "Add the EFA installer of AWS to the image, or LD_LIBRARY_PATH to the job.",
        )


def _has_network_plugin(context: Context) -> bool:
    folders = [Path(folder) for folder in context.env.get("LD_LIBRARY_PATH", "").split(os.pathsep) if folder]
    is_on_path = any(path for folder in folders for path in folder.glob("libnccl-net*.so*"))
    return is_on_path or ctypes.util.find_library("nccl-net") is not None


def _expected(context: Context) -> str:
    """What says that there are GPUs here, as the beginning of a sentence; empty if nothing does."""
    job = context.job
    if job is None or context.is_emulated:  # the emulator's instance types decide roles, not devices
        return ""
    if job.num_gpus:
        return f"The job says {job.num_gpus} GPUs (SM_NUM_GPUS),"
    instance_type = job.current_group.instance_type
    return f"Instances of type {instance_type} have GPUs," if has_gpus(instance_type) else ""


def _nvidia_smi(context: Context) -> str | None:
    return shutil.which("nvidia-smi", path=context.env.get("PATH"))


def _ask_nvidia_smi(program: str, context: Context) -> list[tuple[str, str]] | str:
    """Name and driver of each GPU, or what went wrong."""
    timeout_s = context.seconds(_SMI_S)
    try:
        ended = run([program, "--query-gpu=name,driver_version", "--format=csv,noheader"], context.env, timeout_s)
    except subprocess.TimeoutExpired:
        return f"nvidia-smi did not end within {timeout_s:.0f} s."
    except OSError as error:
        return f"nvidia-smi cannot be started: {error}."
    if ended.returncode != 0:
        said = " ".join((ended.stdout + ended.stderr).split())
        return f"nvidia-smi failed with exit code {ended.returncode}: {said[:200]}"
    pairs = [line.rpartition(",") for line in ended.stdout.splitlines() if "," in line]
    return [(name.strip(), driver.strip()) for name, _, driver in pairs]


def _compared(context: Context, count: int) -> Iterator[Result]:
    job = context.job
    if job is None or context.is_emulated:
        stated, devices = 0, 0
    else:
        stated, devices = job.num_gpus, job.devices or 0
    if stated > count:
        yield problem("GPUs", f"The job says {stated} GPUs, but {count} can be seen.", "See NVIDIA_VISIBLE_DEVICES.")
    if devices > count:
        yield problem("GPUs", f"{DEVICES.name}={devices}, but there are {count} GPUs.", "Set it to the number of GPUs.")
    if _hides_gpus(context) and not context.is_emulated:
        value = context.env["CUDA_VISIBLE_DEVICES"]
        yield warning("GPUs", f"CUDA_VISIBLE_DEVICES={value!r} hides all of them.", "Unset it to train on GPUs.")


def _hides_gpus(context: Context) -> bool:
    return context.env.get("CUDA_VISIBLE_DEVICES", "0").strip() in _HIDING


def _efa_devices(context: Context) -> list[str]:
    """Names of the RDMA devices that Amazon made."""
    try:
        devices = sorted((context.sys / "class" / "infiniband").iterdir())
    except OSError:
        return []
    return [device.name for device in devices if _vendor(device) == _AMAZON_VENDOR]


def _vendor(device: Path) -> str | None:
    return text_of(device / "device" / "vendor")
