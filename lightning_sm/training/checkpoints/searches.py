"""Searches before a fit, by ``LearningRateFinder`` and ``BatchSizeFinder``: a resumed fit keeps what they found.

To search, they train on, and then load a temporary checkpoint from before that. In a fit that resumes, Lightning would
take this one for the checkpoint of the fit, and start at step 0 with the weights of the interruption.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from lightning_sm._lightning import BatchSizeFinder, Callback, LearningRateFinder, parsing

logger = logging.getLogger(__name__)

_KEY = "lightning_sm.searched"
# The attributes that LearningRateFinder sets if it is given no name.
_RATE_NAMES = ("lr", "learning_rate")


def save_searched(trainer: Any, checkpoint: dict[str, Any]) -> None:
    """Put the values of the attributes that the Trainer's finders set into a checkpoint."""
    model = trainer.lightning_module
    values = {
        name: parsing.lightning_getattr(model, name) for _, name in _finders(trainer) if _is_attribute(model, name)
    }
    if values:
        checkpoint[_KEY] = values


class HeldSearches:
    """The searches of a Trainer's finders, held back until it is known whether the fit resumes.

    Args:
        trainer: A Trainer that is about to fit; Lightning has not called ``on_fit_start`` yet.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._is_resumed: bool | None = None
        self._pending: list[Callable[[], None]] = []
        for finder, _ in _finders(trainer):
            vars(finder).pop("on_fit_start", None)  # left by a fit that failed before it searched
            self._hold(finder)

    def _hold(self, finder: Any) -> None:
        search = finder.on_fit_start

        def on_fit_start(trainer: Any, pl_module: Any) -> None:
            vars(finder).pop("on_fit_start", None)
            if self._is_resumed is None:  # the strategy loads checkpoints later
                self._pending.append(partial(search, trainer, pl_module))
            elif not self._is_resumed:
                search(trainer, pl_module)

        finder.on_fit_start = on_fit_start

    def skip(self, path: object, checkpoint: Mapping[str, Any]) -> None:
        """Drop the searches, and set what earlier ones found.

        Args:
            path: The checkpoint from which the fit resumes.
            checkpoint: Its contents.
        """
        self._is_resumed = True
        self._pending.clear()
        model = self._trainer.lightning_module
        values = checkpoint.get(_KEY, {})
        for finder, name in _finders(self._trainer):
            kind = type(finder).__name__
            if name in values:
                if _is_attribute(model, name):
                    parsing.lightning_setattr(model, name, values[name])
                logger.info("%s does not search again: training resumes with %s=%s.", kind, name, values[name])
            else:
                logger.warning(
                    "%s does not search, because training resumes from %s, which has no %s: the value of the script "
                    "stays. Set it to that of the earlier training.",
                    kind,
                    path,
                    name,
                )

    def start(self) -> None:
        """Let the finders search, now or in ``on_fit_start``."""
        self._is_resumed = False
        while self._pending:
            self._pending.pop(0)()


def _finders(trainer: Any) -> Iterator[tuple[Callback, str]]:
    """Yield the finders, and the names of the attributes that they set."""
    for callback in trainer.callbacks:
        if isinstance(callback, BatchSizeFinder):
            yield callback, callback._batch_arg_name
        elif isinstance(callback, LearningRateFinder):
            names = (callback._attr_name,) if callback._attr_name else _RATE_NAMES
            model = trainer.lightning_module
            yield callback, next((name for name in names if _is_attribute(model, name)), names[0])


def _is_attribute(model: Any, name: str) -> bool:
    return bool(parsing.lightning_hasattr(model, name))
