"""The error of an automatic resume whose checkpoint does not fit the script: it is of another model or optimizer."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial
from pathlib import PurePath
from typing import Any

from lightning_sm._text import shortened
from lightning_sm.errors import CheckpointMismatchError, LightningSMError

# What code that reads the fields of a checkpoint raises if they are others than it expects.
_OTHER_FIELDS = (KeyError, IndexError, ValueError, TypeError, AttributeError)
# torch names each tensor of a large model. The advice must fit into the failure file, too.
_MAX_CHARS = 250
_RESTORE = ("restore_model", "restore_training_state")


def explain_misfit(connector: Any, path: str) -> None:
    """Let Lightning's next restore raise an error that says where the checkpoint comes from, and what to do.

    Args:
        connector: The Trainer's checkpoint connector.
        path: The checkpoint that was chosen, in place of the script's choice.
    """
    for name in _RESTORE:
        vars(connector).pop(name, None)  # left by a fit that failed before it restored
        setattr(connector, name, partial(_restore, connector, name, getattr(connector, name), path))


def _restore(connector: Any, name: str, restore: Callable[[], None], path: str) -> None:
    vars(connector).pop(name, None)
    try:
        restore()
    except Exception as error:
        if not _is_misfit(error):
            raise
        raise CheckpointMismatchError(
            f"The job resumes automatically from {path}, the latest valid checkpoint in its folder, but that does "
            f"not fit this script. {type(error).__name__}: {shortened(str(error), _MAX_CHARS)}\n"
            "It is of another model or optimizer. To start anew, set another checkpoint_s3_uri (in a job file: "
            f"checkpoints), or delete what lies there ({PurePath(path).parent} on this host). To continue, use the "
            "model that the checkpoint was saved with."
        ) from error


def _is_misfit(error: Exception) -> bool:
    if isinstance(error, LightningSMError):
        return False
    if isinstance(error, _OTHER_FIELDS):
        return True
    # torch says so by a plain RuntimeError, as it does for an error of the GPU: only its own comparison counts.
    return isinstance(error, RuntimeError) and traceback.extract_tb(error.__traceback__)[-1].name == "load_state_dict"
