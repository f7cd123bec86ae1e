"""Old run folders are removed; runs in progress and other files are kept."""

from __future__ import annotations

import os

import pytest

from lightning_sm.emulator import run_folders
from lightning_sm.emulator.run_folders import create_run_folder, remove_old_runs, run_name


@pytest.fixture(autouse=True)
def _few_runs(monkeypatch):
    monkeypatch.setattr(run_folders, "MAX_RUNS", 2)


def _finished(base, *times):
    """Create the folders of finished runs that began at these times."""
    made = []
    for time in times:
        folder = base / f"local-20261122-{time}-a0b1"
        os.close(create_run_folder(folder))
        (folder / "algo-1").mkdir()
        made.append(folder)
    return made


def test_all_but_the_newest_runs_are_removed(tmp_path):
    """Only old runs are removed, not the files, folders with other names and symlink targets beside them."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "large").touch()
    (tmp_path / "local-notes").mkdir()
    folders = _finished(tmp_path, "100000", "110000", "120000")
    (folders[0] / "algo-1" / "channel").symlink_to(tmp_path / "data", target_is_directory=True)
    remove_old_runs(tmp_path)
    assert [folder.exists() for folder in folders] == [False, True, True]
    assert (tmp_path / "data" / "large").exists()
    assert (tmp_path / "local-notes").exists()


def test_a_run_in_progress_is_never_removed(tmp_path):
    """A run in progress is kept however old it is, and removed once it has finished."""
    folder = tmp_path / "local-20261122-090000-a0b1"
    lock = create_run_folder(folder)
    _finished(tmp_path, "100000", "110000")
    remove_old_runs(tmp_path)
    assert folder.is_dir()
    os.close(lock)
    remove_old_runs(tmp_path)
    assert not folder.exists()


def test_the_name_of_a_new_run_is_the_newest(tmp_path):
    """A new run's name sorts after the names of earlier runs."""
    old, _ = _finished(tmp_path, "100000", "110000")
    new = tmp_path / run_name()
    os.close(create_run_folder(new))
    remove_old_runs(tmp_path)
    assert not old.exists()
    assert new.exists()


def test_a_folder_exists_already(tmp_path):
    """Two runs never share a folder."""
    (tmp_path / "local-20261122-100000-a0b1").mkdir()
    with pytest.raises(FileExistsError):
        create_run_folder(tmp_path / "local-20261122-100000-a0b1")
