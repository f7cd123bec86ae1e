"""The files of a host from which a restart within the job resumes."""

from __future__ import annotations

import shutil

import pytest
import torch

from lightning_sm.errors import CheckpointError
from lightning_sm.job.variables import RESTART_DIR
from lightning_sm.training.checkpoints import restart_files
from lightning_sm.training.checkpoints.newest import newest_checkpoint
from lightning_sm.training.checkpoints.restart_files import RestartFiles, remove_tried, restart_folders

LOOPS = {"fit_loop": {"epoch_progress": {"total": {"processed": 0}}}}
STATE = {"global_step": 7, "epoch": 0, "loops": LOOPS, "lr_schedulers": [], "weight": torch.ones(1000)}


@pytest.fixture
def folders(tmp_path):
    """A folder in memory, and a checkpoint folder."""
    memory, checkpoints = tmp_path / "memory", tmp_path / "checkpoints"
    memory.mkdir()
    checkpoints.mkdir()
    return memory, checkpoints


def _limit(monkeypatch, free):
    """Let folders have this many free bytes; those that are not named have what they have."""
    usage = shutil.disk_usage

    def limited(folder):
        return usage(folder)._replace(free=free.get(folder, usage(folder).free))

    monkeypatch.setattr(restart_files.shutil, "disk_usage", limited)


def _found(memory, checkpoints):
    return newest_checkpoint(checkpoints, restart_folders=restart_folders(checkpoints, memory))


def test_a_state_is_found_where_it_was_written(folders):
    """A restart finds the state of the last step in memory, and nothing is left when it is removed."""
    memory, checkpoints = folders
    files = RestartFiles(memory, checkpoints, "1-1", 0)
    path = files.write(STATE, 7)
    assert path.parent == memory
    found = _found(memory, checkpoints)
    assert (found.path, found.progress[0]) == (path, 7)
    files.remove_states()
    assert _found(memory, checkpoints) is None
    assert not [*memory.iterdir(), *checkpoints.iterdir()]


def test_without_room_in_memory_it_goes_to_the_checkpoint_folder(folders, monkeypatch):
    """SageMaker's agent ignores it there, and nothing is left when it is removed."""
    memory, checkpoints = folders
    _limit(monkeypatch, {memory: 1000})
    files = RestartFiles(memory, checkpoints, "1-1", 0)
    path = files.write(STATE, 7)
    assert path.parent == checkpoints / "restart.sagemaker-ignore"
    assert _found(memory, checkpoints).path == path
    files.remove_states()
    assert not [*memory.iterdir(), *checkpoints.iterdir()]


@pytest.mark.parametrize("has_folder", [True, False])
def test_without_any_room_the_error_names_both_sides(folders, monkeypatch, has_folder):
    """What is needed, and what is free in each folder; no unfinished file is left."""
    memory, checkpoints = folders
    _limit(monkeypatch, {memory: 1000, checkpoints / "restart.sagemaker-ignore": 2000})
    files = RestartFiles(memory, checkpoints if has_folder else None, "1-1", 0)
    with pytest.raises(CheckpointError, match=r"it needs .*, and 1 kB are free in \S+memory") as raised:
        files.write(STATE, 7)
    assert ("2 kB are free in" in str(raised.value)) is has_folder
    assert _found(memory, checkpoints) is None


def test_one_rank_of_a_host_writes_a_step(folders):
    """The first one that claims it; in the next attempt, a step may be claimed again."""
    ranks = [RestartFiles(*folders, "1-1", rank) for rank in range(2)]
    assert [files.claim(7) for files in ranks] == [True, False]
    assert ranks[1].claim(8)
    ranks[0].begin()
    assert ranks[1].claim(7)


def test_a_rank_finds_what_it_kept(folders):
    """Of the last two steps, each rank its own, and nothing that was cut off or is of another fit."""
    ranks = [RestartFiles(*folders, "1-1", rank) for rank in range(2)]
    for step in (5, 6, 7):
        for rank, files in enumerate(ranks):
            files.write_part(step, {"rank": rank, "state": torch.arange(step)})
    later = RestartFiles(*folders, "1-1", 1)
    assert later.part(5) is None
    for step in (6, 7):
        part = later.part(step)
        assert (part["rank"], len(part["state"])) == (1, step)
    assert RestartFiles(*folders, "1-2", 1).part(7) is None
    (slot,) = folders[0].glob("1-1-rank=1-1")
    slot.write_bytes(slot.read_bytes()[:-3])
    assert later.part(7) is None
    assert later.part(6) is not None


def test_there_are_no_folders_in_a_job_that_does_not_restart(folders, monkeypatch):
    """The launcher names none."""
    monkeypatch.delenv(RESTART_DIR.name, raising=False)
    assert restart_folders(folders[1]) == []


def test_two_states_are_kept_in_memory(folders):
    """A new one takes the place of all but the latest, whatever their steps; an unfinished one is not one of them."""
    memory, checkpoints = folders
    ranks = [RestartFiles(memory, checkpoints, "1-1", rank) for rank in range(2)]
    (memory / "1-1-step=9.ckpt.0.sagemaker-ignore").touch()
    (memory / "1-2-step=9.ckpt").touch()
    for step in (9, 5, 6):
        ranks[0].keep({**STATE, "global_step": step}, 4000, step)
    assert sorted(path.name for path in memory.glob("1-1-*.ckpt")) == ["1-1-step=5.ckpt", "1-1-step=6.ckpt"]
    ranks[1].write(STATE, 7)
    assert sorted(path.name for path in memory.glob("*.ckpt")) == [
        *("1-1-step=6.ckpt", "1-1-step=7.ckpt", "1-2-step=9.ckpt")
    ]
    ranks[1].begin()
    assert not list(memory.glob("*.sagemaker-ignore"))


def test_a_state_leaves_as_much_free_as_it_takes(folders, monkeypatch):
    """Else the error names both sides. It is not written to the checkpoint folder, as that of a failed step is."""
    memory, checkpoints = folders
    files = RestartFiles(memory, checkpoints, "1-1", 0)
    _limit(monkeypatch, {memory: 9_000_000})
    files.keep(STATE, 4000, 7)
    _limit(monkeypatch, {memory: 8_000_000})
    with pytest.raises(CheckpointError, match=r"one needs up to 4.2 MB, and may take half of .*memory, 8 MB"):
        files.keep(STATE, 4000, 8)
    assert [path.name for path in memory.iterdir()] == ["1-1-step=7.ckpt"]
    assert not list(checkpoints.iterdir())


@pytest.mark.parametrize("has_made_a_step", [False, True])
def test_a_state_is_tried_once(folders, has_made_a_step):
    """If the step after it fails again, the earlier one counts, on every host, also if it lies in the other folder."""
    memory, checkpoints = folders
    files = RestartFiles(memory, checkpoints, "1-1", 0)
    files.keep({**STATE, "global_step": 6}, 4000, 6)
    files.write(STATE, 7)
    files.note_tried(7)
    if has_made_a_step:
        files.forget_tried()
    remove_tried(restart_folders(checkpoints, memory))
    assert _found(memory, checkpoints).progress[0] == (7 if has_made_a_step else 6)
    assert not list(memory.glob("*.tried"))
    files.remove_states()
    assert not list(memory.iterdir())
