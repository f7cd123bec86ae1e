"""Results of ``LearningRateFinder`` and ``BatchSizeFinder``, which a resumed fit keeps instead of searching again.

For a search, these callbacks save a temporary checkpoint, train, and then load that checkpoint. In a resumed fit,
Lightning would mistake this temporary checkpoint for the fit's own, and start at step 0 with the interrupted
fit's weights.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_sm._lightning import BatchSizeFinder, LearningRateFinder, parsing

logger = logging.getLogger(__name__)

_KEY = "lightning_sm.searched"
# The attributes that LearningRateFinder sets by default.
_RATE_NAMES = ("lr", "learning_rate")


def save_searched(trainer: Any, checkpoint: dict[str, Any]) -> None:
    """Add to a checkpoint the values that the Trainer's finders have found."""
    model = trainer.lightning_module
    values = {
        name: parsing.lightning_getattr(model, name) for _, name in _finders(trainer) if _is_attribute(model, name)
    }
    if values:
        checkpoint[_KEY] = values


def allow_searches(trainer: Any) -> None:
    """Let the finders of a Trainer search again, after ``skip_searches``."""
    for finder, _ in _finders(trainer):
        vars(finder).pop("on_fit_start", None)


def skip_searches(trainer: Any) -> None:
    """Prevent the finders of a Trainer from searching in the fit that is about to start."""
    for finder, _ in _finders(trainer):
        finder.on_fit_start = _search_nothing


def restore_searched(trainer: Any, path: object, checkpoint: Mapping[str, Any]) -> None:
    """Restore the results of earlier searches.

    Args:
        trainer: The Trainer.
        path: The checkpoint from which the fit resumes.
        checkpoint: The contents of the checkpoint.
    """
    model = trainer.lightning_module
    values = checkpoint.get(_KEY, {})
    for finder, name in _finders(trainer):
        kind = type(finder).__name__
        if name in values:
            if _is_attribute(model, name):
                parsing.lightning_setattr(model, name, values[name])
            logger.info("%s does not search again: training resumes with %s=%s.", kind, name, values[name])
        else:
            logger.warning(
                "%s does not search, because training resumes from %s, which has no %s. The script's value is used: "
                "set it to the earlier run's value.",
                kind,
                path,
                name,
            )


def _search_nothing(_trainer: Any, _pl_module: Any) -> None:
    """Do nothing, in place of a finder's ``on_fit_start``."""


def _finders(trainer: Any) -> Iterator[tuple[Any, str]]:
    """Yield each finder with the name of the attribute that it sets."""
    for callback in trainer.callbacks:
        if isinstance(callback, BatchSizeFinder):
            yield callback, callback._batch_arg_name
        elif isinstance(callback, LearningRateFinder):
            names = (callback._attr_name,) if callback._attr_name else _RATE_NAMES
            model = trainer.lightning_module
            yield callback, next((name for name in names if _is_attribute(model, name)), names[0])


def _is_attribute(model: Any, name: str) -> bool:
    return bool(parsing.lightning_hasattr(model, name))
