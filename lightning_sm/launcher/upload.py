"""Watching SageMaker's checkpoint uploads while the script runs, and waiting for them after an interruption.

SageMaker's agent copies the checkpoint folder to S3 while the job runs. It is not documented whether the agent
continues after the containers have exited.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_sm._log import command_logger
from lightning_sm._text import listed
from lightning_sm.job.uploads import UPLOADED, UPLOADING, files_of, is_uploaded
from lightning_sm.launcher import timeline

_LOG = command_logger(__name__)

_POLL_S = 0.1
_CHECK_S = 60.0
# Uploading a 50 GB checkpoint at 100 MB/s takes about this long.
_OVERDUE_S = 600.0
_CHECKPOINT = ".ckpt"


class UploadWatch:
    """A periodic check of the checkpoints, which warns once if SageMaker's agent has stopped uploading them.

    It does not warn if the agent has never marked a file as uploaded.

    Args:
        folder: The checkpoint folder; None turns the watch off. Files already in it are ignored: they came from S3.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._known = self._versions()
        self._pending_since: dict[tuple[Path, int], float] = {}
        self._has_uploaded = False
        self._has_warned = False
        self._due_at = time.monotonic() + _CHECK_S

    def look(self, now: float) -> None:
        """Check for overdue uploads, if a check is due.

        Args:
            now: The current time in seconds, from ``time.monotonic()``.
        """
        if self._folder is not None and now >= self._due_at:
            self._due_at = now + _CHECK_S
            with contextlib.suppress(FileNotFoundError):  # a folder of shards was removed meanwhile
                self.check(now)

    def check(self, now: float) -> None:
        """Warn once if the upload of a checkpoint is overdue.

        Args:
            now: The current time in seconds, from ``time.monotonic()``.
        """
        versions = self._versions() - self._known
        uploaded = {version for version in versions if is_uploaded(version[0])}
        self._has_uploaded = self._has_uploaded or bool(uploaded)
        pending = versions - uploaded
        self._pending_since = {version: self._pending_since.get(version, now) for version in pending}
        if not self._has_uploaded or self._has_warned or not pending:
            return
        (file, _), since = min(self._pending_since.items(), key=lambda item: item[1])
        if now - since >= _OVERDUE_S:
            self._has_warned = True
            _LOG.warning(
                "SageMaker has not uploaded the checkpoint %s within %.0f minutes, although it uploaded earlier ones. "
                "If this host is lost, the next attempt resumes from an earlier checkpoint. Check the hosts' network "
                "and the job's permissions for its checkpoint_s3_uri.",
                file,
                (now - since) / 60,
            )

    def _versions(self) -> set[tuple[Path, int]]:
        """Return the files of all checkpoints, each with its modification time."""
        versions = set()
        for file in files_of(self._folder) if self._folder is not None else []:
            if any(part.endswith(_CHECKPOINT) for part in file.relative_to(self._folder or file).parts):
                versions.add((file, file.stat().st_mtime_ns))
        return versions


def wait_until_uploaded(files: Sequence[Path], *, has_agent: bool, deadline: Callable[[], float]) -> bool:
    """Wait until the agent has marked the given files as uploaded.

    Args:
        files: The files, which must exist.
        has_agent: Whether SageMaker is known to copy their folder to S3. If not, wait only if the folder has markers.
        deadline: Returns when to stop waiting, as a value of ``time.monotonic()``. Called repeatedly, because a stop
            signal may change it.

    Returns:
        True if all files are uploaded, or if there is no sign that anything uploads them.
    """
    pending = [file for file in files if not is_uploaded(file)]
    began_at = time.monotonic()
    first_marker_s = timeline.FIRST_MARKER_S if has_agent else 0.0
    folders = {file.parent for file in pending}
    while pending and not any(any(folder.glob(f"*{end}")) for folder in folders for end in (UPLOADING, UPLOADED)):
        if time.monotonic() >= min(began_at + first_marker_s, deadline()):
            return True
        time.sleep(_POLL_S)  # poll: the agent announces nothing, and a stop signal may change the deadline
    if not pending:
        return True
    _LOG.info("waiting until SageMaker has uploaded the checkpoint: %s.", listed(list(map(str, pending))))
    while pending and time.monotonic() < deadline():
        time.sleep(_POLL_S)
        pending = [file for file in pending if not is_uploaded(file)]
    seconds = time.monotonic() - began_at
    if pending:
        _LOG.warning(
            "after %.0f s SageMaker has not uploaded %s. The next attempt may resume from an earlier checkpoint.",
            seconds,
            listed(list(map(str, pending))),
        )
        return False
    _LOG.info("uploaded after %.1f s.", seconds)
    return True
