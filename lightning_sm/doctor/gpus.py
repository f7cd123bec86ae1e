"""Checks of GPUs, and of EFA between hosts. torch runs in a separate process, because it may hang or crash."""

from __future__ import annotations

import ctypes.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from lightning_sm._text import listed
from lightning_sm.doctor.context import Context, Result, ok, problem, warning
from lightning_sm.job.instance_types import has_gpus
from lightning_sm.job.redaction import shown

# Importing torch takes 2 s, or tens of seconds from a lazily loaded disk.
_TORCH_S = 60.0
_AMAZON_VENDOR = "0x1d0f"  # PCI ID of Amazon.com, Inc.
_TORCH_SCRIPT = """\
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else None
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "count": count, "nccl": nccl}))
"""


def gpus(context: Context) -> Iterator[Result]:
    """Count the GPUs with torch, if the host should have any."""
    expected, source = _expected(context)
    if not expected:
        yield ok("GPUs", "none")
        return
    if context.env.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        yield warning("GPUs", "CUDA_VISIBLE_DEVICES hides all of them.", "Unset it to train on GPUs.")
        return
    command = [sys.executable, "-c", _TORCH_SCRIPT]
    try:
        env = dict(context.env)
        completed = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_TORCH_S, check=False)
    except subprocess.TimeoutExpired:
        yield problem("GPUs", f"torch did not answer within {_TORCH_S:g} s.", "Check the driver: nvidia-smi, dmesg.")
        return
    if completed.returncode != 0:
        last = (completed.stderr.strip().splitlines() or ["no message"])[-1]
        yield problem("GPUs", f"torch fails with exit code {completed.returncode}: {last}", "Reinstall torch.")
        return
    answer = json.loads(completed.stdout.strip().splitlines()[-1])
    seen = f"torch {answer['torch']}, CUDA {answer['cuda']}, NCCL {answer['nccl']}: {answer['count']} GPUs"
    if answer["cuda"] is None:
        yield problem("GPUs", f"torch {answer['torch']} was built without CUDA.", "Install a torch build for CUDA.")
    elif answer["count"] < expected:
        yield problem(
            "GPUs",
            f"{seen}, but {source}.",
            "Start the container with GPUs (docker run --gpus all). Check NVIDIA_VISIBLE_DEVICES and the driver, which "
            f"must support CUDA {answer['cuda']}.",
        )
    else:
        yield ok("GPUs", seen)


def fabric(context: Context) -> Iterator[Result]:
    """Show EFA devices and the NCCL and libfabric settings, and warn if NCCL would not use EFA."""
    devices = _efa_devices(context)
    names = sorted(name for name in context.env if name.startswith(("NCCL_", "FI_")))
    settings = [f"{name}={shown(name, context.env[name])}" for name in names]
    found = f"{listed(devices) or 'no EFA device'}; {', '.join(settings) or 'no NCCL or libfabric settings'}"
    if devices and not _has_network_plugin(context):
        yield warning(
            "EFA and NCCL",
            f"{found}. NCCL's plugin for EFA (libnccl-net*.so) is not installed: NCCL uses TCP.",
            "Build the image with --build-arg EFA=1, run AWS's EFA installer in it, or add the plugin's folder to "
            "LD_LIBRARY_PATH.",
        )
    else:
        yield ok("EFA and NCCL", found)


def _expected(context: Context) -> tuple[int, str]:
    """Return the expected number of GPUs, and a clause that says where this number comes from."""
    files = sum(1 for path in context.dev.glob("nvidia[0-9]*") if path.name[6:].isdecimal())
    job = context.job
    if job is None or not context.has_own_machine:  # the emulator's instance types say nothing about devices
        return files, f"there are {files} in {context.dev}"
    count = job.devices or job.num_gpus or files
    if count:
        return count, f"the job has {count} on each host"
    instance_type = job.current_group.instance_type
    return int(has_gpus(instance_type)), f"instances of type {instance_type} have GPUs"


def _efa_devices(context: Context) -> list[str]:
    """Return the names of the RDMA devices made by Amazon."""
    vendors = sorted(context.sys.glob("class/infiniband/*/device/vendor"))
    return [file.parents[1].name for file in vendors if file.read_text(encoding="ascii").strip() == _AMAZON_VENDOR]


def _has_network_plugin(context: Context) -> bool:
    folders = [Path(folder) for folder in context.env.get("LD_LIBRARY_PATH", "").split(os.pathsep) if folder]
    folders.append(Path(sys.prefix, "lib"))  # conda's NCCL searches its own folder for the plugin
    is_on_path = any(path for folder in folders for path in folder.glob("libnccl-net*.so*"))
    return is_on_path or ctypes.util.find_library("nccl-net") is not None
