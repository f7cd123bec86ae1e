"""What a ``ModelCheckpoint`` has saved last: Lightning does not keep that in its state.

Without it, a resumed fit that saves no further checkpoint writes its final weights as ``last.ckpt`` at its end, where
an undisturbed one leaves the last of its checkpoints; a save that waits for a validation is forgotten; and a step that
is saved already is saved again while gradients accumulate.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # fsspec has no type information

from lightning_sm._lightning import ModelCheckpoint

_KEY = "lightning_sm.model_checkpoints"
# Missing from older versions of Lightning.
_DEFERRED = "_defer_save_until_validation"


def save_last_saves(trainer: Any, checkpoint: dict[str, Any]) -> None:
    """Add to a checkpoint what each ``ModelCheckpoint`` has saved last."""
    checkpoint[_KEY] = {
        one.state_key: {
            "dirpath": str(one.dirpath),
            "path": one._last_checkpoint_saved,
            "step": one._last_global_step_saved,
            "is_deferred": getattr(one, _DEFERRED, False),
        }
        for one in _model_checkpoints(trainer)
    }


def restore_last_saves(trainer: Any, checkpoint: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Restore what each ``ModelCheckpoint`` of a Trainer has saved last; a collective call.

    Args:
        trainer: The Trainer, which resumes.
        checkpoint: The checkpoint from which it resumes.
        path: Its path. The ``ModelCheckpoint`` that has written it did not know yet that it had.
    """
    for one in _model_checkpoints(trainer):
        saved = checkpoint.get(_KEY, {}).get(one.state_key)
        if saved is None or saved["dirpath"] != str(one.dirpath):
            continue
        state = checkpoint["callbacks"].get(one.state_key, {})
        last, step = saved["path"], saved["step"]
        if str(path) in (state.get("best_model_path"), state.get("last_model_path"), *state.get("best_k_models", ())):
            last, step = str(path), checkpoint["global_step"]
        # What is no longer there has to be saved again.
        if trainer.strategy.broadcast(bool(last) and _exists(last)):
            one._last_checkpoint_saved, one._last_global_step_saved = last, step
        if hasattr(one, _DEFERRED):
            setattr(one, _DEFERRED, saved["is_deferred"])


def _model_checkpoints(trainer: Any) -> list[Any]:
    return [one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]


def _exists(path: str) -> bool:
    filesystem, name = url_to_fs(path)
    return bool(filesystem.exists(name))
