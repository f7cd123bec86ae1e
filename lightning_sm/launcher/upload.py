"""The wait for SageMaker to upload the checkpoint of an interruption.

The service's agent copies the checkpoint folder to S3 while the job runs; whether it goes on after the containers have
exited is not documented.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_sm._log import command_logger
from lightning_sm.job.uploads import UPLOADED, UPLOADING, is_uploaded

_LOG = command_logger(__name__)

# For the agent to notice the first checkpoint of a job; there are no markers before.
_FIRST_MARKER_S = 10.0
_POLL_S = 0.1


def wait_until_uploaded(files: Sequence[Path], *, has_agent: bool, deadline: Callable[[], float]) -> bool:
    """Wait for the agent's markers beside some files.

    Args:
        files: The files, which exist.
        has_agent: Whether SageMaker is known to copy their folder to S3. If not, wait only if the folder has markers.
        deadline: Returns when to stop waiting, in seconds of ``time.monotonic``. Called repeatedly, because a stop
            signal may move it.

    Returns:
        Whether all files are uploaded, or nobody uploads them.
    """
    pending = [file for file in files if not is_uploaded(file)]
    began_at = time.monotonic()
    first_marker_s = _FIRST_MARKER_S if has_agent else 0.0
    folders = {file.parent for file in pending}
    while pending and not any(any(folder.glob(f"*{end}")) for folder in folders for end in (UPLOADING, UPLOADED)):
        if time.monotonic() >= min(began_at + first_marker_s, deadline()):
            return True
        time.sleep(_POLL_S)  # the agent leaves files and announces nothing, and a stop signal moves the deadline
    if not pending:
        return True
    _LOG.info("waiting until SageMaker has uploaded the checkpoint: %s.", _named(pending))
    while pending and time.monotonic() < deadline():
        time.sleep(_POLL_S)
        pending = [file for file in pending if not is_uploaded(file)]
    seconds = time.monotonic() - began_at
    if pending:
        _LOG.warning(
            "after %.0f s SageMaker has not uploaded %s. The next attempt may resume from an earlier checkpoint.",
            seconds,
            _named(pending),
        )
        return False
    _LOG.info("uploaded after %.1f s.", seconds)
    return True


def _named(files: Sequence[Path]) -> str:
    more = len(files) - 1
    return str(files[0]) + (f" and {more} more file{'s' if more > 1 else ''}" if more else "")
