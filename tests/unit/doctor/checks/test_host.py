"""The doctor's checks of the machine and of its process 1, on a temporary folder in place of /proc."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest

from lightning_sm.doctor.checks import host
from lightning_sm.doctor.context import Context
from lightning_sm.doctor.report import Status
from tests.fakes.job_folder import resource_config, write_job

_MASK = f"{1 << (signal.SIGTERM - 1):016x}"
_NO_MASK = "0" * 16


@pytest.fixture
def context(tmp_path):
    """A host of a job whose processes are files."""
    base = write_job(tmp_path / "ml", resource_config({"trainer": ["algo-1"]}, "algo-1"))
    (tmp_path / "proc" / "1").mkdir(parents=True)
    return replace(Context.of({"SAGEMAKER_BASE_DIR": str(base)}, 20), proc=tmp_path / "proc")


def test_machine_is_shown(context):
    """CPUs, memory and kernel are shown."""
    (result,) = host.machine(context)
    assert result.status is Status.OK
    assert result.found.startswith(f"CPUs: {os.cpu_count()}, ")


@pytest.mark.parametrize(
    ("command", "caught", "status"),
    [
        ("python\0lightning-sm\0train", _MASK, Status.OK),
        ("python\0train.py", _NO_MASK, Status.WARNING),
        ("/bin/sh\0-c\0lightning-sm train", _NO_MASK, Status.WARNING),
        ("-bash", _MASK, Status.WARNING),
    ],
)
def test_process_1_must_pass_signals_on(context, command, caught, status):
    """A shell passes none on, and the kernel drops what process 1 does not handle."""
    (context.proc / "1" / "cmdline").write_text(command)
    (context.proc / "1" / "status").write_text(f"Name:\tx\nSigCgt:\t{caught}\n")
    (result,) = host.signals(context)
    assert result.status is status
    assert command.partition("\0")[0] in result.found
