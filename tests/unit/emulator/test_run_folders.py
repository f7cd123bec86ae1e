"""Folders of emulated jobs: finished ones are removed, by age or all; those in progress and others' files are not."""

from __future__ import annotations

import os
import re
import shutil

import pytest

from lightning_sm.emulator.run_folders import create_run_folder, remove_finished_runs, run_name


def _finished(base, *times):
    """Folders of runs that began at these times, and have ended."""
    made = []
    for time in times:
        folder = base / f"local-20261122-{time}-a0b1"
        os.close(create_run_folder(folder))
        (folder / "algo-1").mkdir()
        (folder / "algo-1" / "model.ckpt").write_bytes(b"x" * 100_000)
        made.append(folder)
    return made


def test_all_finished_runs_are_removed_and_measured(tmp_path):
    """What else lies beside them stays: files, folders with other names, and what a channel links to."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "large").write_bytes(b"x" * 1_000_000)
    first, second = _finished(tmp_path, "100000", "110000")
    (first / "algo-1" / "channel").symlink_to(data, target_is_directory=True)
    (tmp_path / "local-notes").mkdir()
    (tmp_path / "local-20261122-120000-a0b1").symlink_to(data, target_is_directory=True)
    removal = remove_finished_runs(tmp_path)
    assert (removal.num_runs, removal.in_use, removal.problems) == (2, (), ())
    assert 200_000 <= removal.num_bytes < 400_000
    assert re.fullmatch(r"2 runs \([23]\d\d kB\)", str(removal))
    assert not first.exists()
    assert not second.exists()
    assert (data / "large").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "local-20261122-120000-a0b1", "local-notes"]


def test_a_run_in_progress_is_never_removed(tmp_path):
    """Not from its first moment to its last, whatever its age; after that it is."""
    folder = tmp_path / "local-20261122-090000-a0b1"
    lock = create_run_folder(folder)
    _finished(tmp_path, "100000")
    removal = remove_finished_runs(tmp_path)
    assert (removal.num_runs, removal.in_use) == (1, (folder.name,))
    assert folder.is_dir()
    os.close(lock)
    assert str(remove_finished_runs(tmp_path)).startswith("1 run (")
    assert not folder.exists()


def test_the_newest_runs_are_kept(tmp_path):
    """As many as asked for; a run in progress is not one of them."""
    folders = _finished(tmp_path, "100000", "110000", "120000")
    lock = create_run_folder(tmp_path / "local-20261122-130000-a0b1")
    assert remove_finished_runs(tmp_path, keep=2).num_runs == 1
    assert [folder.exists() for folder in folders] == [False, True, True]
    assert remove_finished_runs(tmp_path, keep=2).num_runs == 0
    os.close(lock)


def test_the_name_of_a_new_run_is_the_newest(tmp_path):
    """It sorts behind those of earlier runs."""
    (old,) = _finished(tmp_path, "100000")
    new = tmp_path / run_name()
    os.close(create_run_folder(new))
    assert remove_finished_runs(tmp_path, keep=1).num_runs == 1
    assert not old.exists()
    assert new.exists()


def test_a_parent_that_does_not_exist_has_no_runs(tmp_path):
    """The first run on a machine."""
    assert remove_finished_runs(tmp_path / "nix").num_runs == 0


def test_a_folder_that_cannot_be_removed_is_named(tmp_path, monkeypatch):
    """The others are removed all the same."""
    first, second = _finished(tmp_path, "100000", "110000")
    monkeypatch.setattr("shutil.rmtree", _refusing(second))
    removal = remove_finished_runs(tmp_path)
    assert (removal.num_runs, removal.problems) == (1, (f"{second}: Permission denied",))
    assert not first.exists()


def _refusing(folder):
    remove = shutil.rmtree

    def rmtree(path, **kwargs):
        if path == folder:
            raise PermissionError(13, "Permission denied", str(path))
        remove(path, **kwargs)

    return rmtree


def test_a_folder_exists_already(tmp_path):
    """Two runs never share one, and nothing is left of the attempt."""
    (tmp_path / "local-20261122-100000-a0b1" / "used").mkdir(parents=True)
    with pytest.raises(OSError, match=r"not empty|exists"):
        create_run_folder(tmp_path / "local-20261122-100000-a0b1")
    assert [path.name for path in tmp_path.iterdir()] == ["local-20261122-100000-a0b1"]
