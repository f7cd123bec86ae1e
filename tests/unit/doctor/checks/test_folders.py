"""The doctor's checks of folders, on temporary ones."""

from __future__ import annotations

import os

import pytest

from lightning_sm.doctor.checks import folders
from lightning_sm.doctor.context import Context
from lightning_sm.doctor.report import Status
from tests.fakes.job_folder import resource_config, write_job


@pytest.fixture
def context(tmp_path):
    """A host of a job whose folders are temporary ones."""
    base = write_job(tmp_path / "ml", resource_config({"trainer": ["algo-1"]}, "algo-1"))
    for name in ("model", "output"):
        (base / name).mkdir()
    return Context.of({"SAGEMAKER_BASE_DIR": str(base), "TMPDIR": str(tmp_path)}, 20)


def _write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("free", "status"),
    [
        (0, Status.PROBLEM),
        (499_999_999, Status.PROBLEM),
        (500_000_000, Status.WARNING),
        (4_999_999_999, Status.WARNING),
        (5_000_000_000, Status.OK),
    ],
)
def test_space_on_a_disk(free, status):
    """Below 5 GB is a warning, below 500 MB a problem."""
    assert folders.space_status(free) is status


def test_disk_names_every_folder_once(context):
    """Folders on one file system share a row; one that does not exist yet counts where it would be made."""
    checkpoints = context.base_dir / "not" / "yet"
    write_job(context.base_dir, checkpoint={"LocalPath": str(checkpoints)})
    (result,) = folders.disk(context)
    for folder in (context.base_dir, context.base_dir / "model", checkpoints, context.env["TMPDIR"]):
        assert str(folder) in result.found
    assert "GiB free" in result.found


def test_writing_leaves_nothing_behind(context):
    """Folders that can be written are named, and nothing is left in them."""
    (result,) = folders.writable(context)
    assert result.status is Status.OK
    assert str(context.base_dir / "model") in result.found
    assert list((context.base_dir / "model").iterdir()) == []


def test_file_in_the_place_of_a_folder_cannot_be_written(context):
    """A folder that cannot be written is a problem of its own."""
    (context.base_dir / "output").rmdir()
    _write(context.base_dir / "output", "a file")
    (result,) = folders.writable(context)
    assert result.status is Status.PROBLEM
    assert str(context.base_dir / "output") in result.found


def test_folder_without_permission_cannot_be_written(context):
    """The report names a user who may not write to the model folder, by number."""
    assert context.job is not None  # read while the folders above may be entered
    (context.base_dir / "model").chmod(0o555)
    user = os.geteuid()
    if user == 0:  # root may write anywhere
        os.seteuid(65534)
    try:
        results = [*folders.writable(context), *folders.disk(context)]
    finally:
        os.seteuid(user)
        (context.base_dir / "model").chmod(0o755)
    assert any(f"{context.base_dir}/model: Permission denied" in result.found for result in results)
