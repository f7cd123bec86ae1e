"""The error of an automatic resume whose checkpoint does not fit the script: it is of another model or optimizer."""

from __future__ import annotations

import traceback
from pathlib import PurePath

from lightning_sm._text import shortened
from lightning_sm.errors import CheckpointMismatchError, LightningSMError

# What code that reads the fields of a checkpoint raises if they are others than it expects.
_OTHER_FIELDS = (KeyError, IndexError, ValueError, TypeError, AttributeError)
# torch names each tensor of a large model. The advice must fit into the failure file, too.
_MAX_CHARS = 250


def is_misfit(error: Exception) -> bool:
    """Return whether an error from restoring a checkpoint says that it is of another model or optimizer."""
    if isinstance(error, LightningSMError):
        return False
    if isinstance(error, _OTHER_FIELDS):
        return True
    # torch says so by a plain RuntimeError, as it does for an error of the GPU: only its own comparison counts.
    return isinstance(error, RuntimeError) and traceback.extract_tb(error.__traceback__)[-1].name == "load_state_dict"


def explained(error: Exception, path: str) -> CheckpointMismatchError:
    """Return the error that says where the checkpoint comes from, and what to do.

    Args:
        error: A misfit.
        path: The checkpoint, which was chosen in place of the script's choice.
    """
    return CheckpointMismatchError(
        f"The job resumes automatically from {path}, the latest valid checkpoint in its folder, but that does "
        f"not fit this script. {type(error).__name__}: {shortened(str(error), _MAX_CHARS)}\n"
        "It is of another model or optimizer. To start anew, set another checkpoint_s3_uri (in a job file: "
        f"checkpoints), or delete what lies there ({PurePath(path).parent} on this host). To continue, use the "
        "model that the checkpoint was saved with."
    )
