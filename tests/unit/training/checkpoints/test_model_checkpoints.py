"""What a ModelCheckpoint has saved last, after a resume."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lightning_sm._lightning import ModelCheckpoint
from lightning_sm.training.checkpoints.model_checkpoints import restore_last_saves, save_last_saves


def _trainer(folder, **options):
    saves = ModelCheckpoint(folder, **options)
    strategy = SimpleNamespace(broadcast=lambda value: value)
    return SimpleNamespace(checkpoint_callbacks=[saves], strategy=strategy), saves


def _saved(folder, *, path="", step=0, **state):
    trainer, saves = _trainer(folder)
    saves._last_checkpoint_saved, saves._last_global_step_saved = str(path), step
    for name, value in state.items():
        setattr(saves, name, value)
    checkpoint = {"callbacks": {saves.state_key: saves.state_dict()}, "global_step": 9}
    save_last_saves(trainer, checkpoint)
    return checkpoint


@pytest.mark.parametrize(
    ("is_there", "expected"),
    [pytest.param(True, ("last.ckpt", 5), id="there"), pytest.param(False, ("", 0), id="gone")],
)
def test_the_last_save_is_known_if_it_is_still_there(tmp_path, is_there, expected):
    """Else the resumed fit has to save again what is lost."""
    path = tmp_path / "last.ckpt"
    if is_there:
        path.touch()
    trainer, saves = _trainer(tmp_path)
    restore_last_saves(trainer, _saved(tmp_path, path=path, step=5), tmp_path / "other.ckpt")
    name, step = expected
    assert (saves._last_checkpoint_saved, saves._last_global_step_saved) == (name and str(path), step)


def test_the_checkpoint_itself_is_the_last_save_of_the_one_that_wrote_it(tmp_path):
    """Its callback did not know yet that it had saved it."""
    path = tmp_path / "step=9.ckpt"
    path.touch()
    trainer, saves = _trainer(tmp_path)
    restore_last_saves(trainer, _saved(tmp_path, best_k_models={str(path): 0.5}), path)
    assert (saves._last_checkpoint_saved, saves._last_global_step_saved) == (str(path), 9)


def test_saves_in_another_folder_do_not_count(tmp_path):
    """As for the best and the last path, which Lightning restores for the same folder only."""
    path = tmp_path / "last.ckpt"
    path.touch()
    trainer, saves = _trainer(tmp_path / "other")
    restore_last_saves(trainer, _saved(tmp_path, path=path, step=5), path)
    assert not saves._last_checkpoint_saved


@pytest.mark.skipif(
    not hasattr(ModelCheckpoint(), "_defer_save_until_validation"), reason="this version of Lightning saves at once"
)
def test_a_save_that_waits_for_a_validation_still_does(tmp_path):
    """Lightning 2.6 puts a save off until the monitored value is there."""
    trainer, saves = _trainer(tmp_path)
    restore_last_saves(trainer, _saved(tmp_path, _defer_save_until_validation=True), tmp_path / "other.ckpt")
    assert saves._defer_save_until_validation


def test_a_checkpoint_of_another_trainer_restores_nothing(tmp_path):
    """It has no entry."""
    trainer, saves = _trainer(tmp_path)
    restore_last_saves(trainer, {"callbacks": {}, "global_step": 9}, tmp_path / "other.ckpt")
    assert not saves._last_checkpoint_saved
