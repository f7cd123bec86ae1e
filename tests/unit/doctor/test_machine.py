"""The doctor's checks of the machine, its disks and process 1."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest

from lightning_sm.doctor import machine
from lightning_sm.doctor.context import Context, Status
from tests.fakes.job_folder import resource_config, write_job


@pytest.fixture
def context(tmp_path):
    """Return the context of a host with temporary folders."""
    base = write_job(tmp_path / "ml", resource_config({"trainer": ["algo-1"]}, "algo-1"))
    return Context.of({"SAGEMAKER_BASE_DIR": str(base), "TMPDIR": str(tmp_path)})


@pytest.mark.parametrize(("free", "status"), [(4_999_999_999, Status.WARNING), (5_000_000_000, Status.OK)])
def test_space_on_a_disk(context, monkeypatch, free, status):
    """Folders on one file system share a row, with a warning if the space is below a checkpoint's size."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: SimpleNamespace(free=free))
    (result,) = machine.disk(context)
    assert result.status is status
    assert result.found.startswith("5 GB free: ")
    assert str(context.job.base_dir) in result.found


@pytest.mark.parametrize(
    ("command", "handles", "status"),
    [
        (["python", "lightning-sm", "train"], True, Status.OK),
        (["python", "train.py"], False, Status.WARNING),
        (["/bin/sh", "-c", "lightning-sm train"], False, Status.WARNING),
        (["-bash"], True, Status.WARNING),
    ],
)
def test_process_1_must_pass_signals_on(context, monkeypatch, command, handles, status):
    """A shell does not forward signals, and the kernel drops signals that process 1 does not handle."""
    monkeypatch.setattr(machine.psutil, "Process", lambda _pid: SimpleNamespace(cmdline=lambda: command))
    monkeypatch.setattr(machine, "handles_signal", lambda _pid, _signum: handles)
    (result,) = machine.signals(context)
    assert result.status is status
    assert command[0] in result.found


def test_versions_are_shown(context):
    """The versions include Python and the most important packages."""
    (result,) = machine.versions(context)
    assert "lightning-sm " in result.found
    assert "torch " in result.found
