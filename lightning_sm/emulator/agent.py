"""A stand-in for SageMaker's agent, which copies a host's checkpoint folder to S3 while the host runs."""

from __future__ import annotations

import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path

from lightning_sm.job.uploads import UPLOADED, UPLOADING, files_of, marker_of

_POLL_S = 0.05
_CHUNK_BYTES = 1 << 20
# Identifies a file's content without reading the file: inode, size and modification time.
_Content = tuple[int, int, int]


class UploadAgent:
    """A thread that uploads the changed files of a folder until ``stop`` is called.

    Like SageMaker's agent, as far as is known, it puts an empty ``<file>.sagemaker-uploading`` beside a changed
    file, copies the whole file, and then renames the marker to ``<file>.sagemaker-uploaded``. A file that
    is removed from the folder is also removed from S3.

    Args:
        folder: The host's checkpoint folder, filled by ``download``.
        bucket: The folder that stands in for S3.
        host: Name of the host.
        delay_s: How long the upload of a file takes, in seconds.

    Attributes:
        lost: Files whose latest content had not been uploaded when the agent stopped, relative to the folder.
        error: The error that stopped the agent, if any.
    """

    def __init__(self, folder: Path, bucket: Path, host: str, delay_s: float) -> None:
        self.lost: list[str] = []
        self.error: OSError | None = None
        self._folder = folder
        self._bucket = bucket
        self._delay_s = delay_s
        # Copy to another name first: S3 shows an object only once it is complete.
        self._incomplete = bucket / f".{host}.incomplete"
        self._uploaded = self._contents()
        self._uploads: dict[Path, tuple[_Content, float]] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self, *, is_over: bool = False) -> None:
        """Stop at once, even in the middle of a file.

        Args:
            is_over: Whether the job is over. If so, upload the remaining files without a delay before returning.
        """
        self._stopped.set()
        self._thread.join()
        if is_over and self.error is None:
            self._stopped.clear()
            self._delay_s = 0.0
            self._uploads.clear()
            try:
                self._look()  # start the uploads
                self._look()
            except OSError as error:
                self.error = error
        contents = self._contents().items()
        self.lost = [str(file.relative_to(self._folder)) for file, last in contents if self._uploaded.get(file) != last]

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                self._look()
                self._stopped.wait(_POLL_S)
        except OSError as error:
            self.error = error
        finally:
            with suppress(OSError):
                self._incomplete.unlink(missing_ok=True)

    def _look(self) -> None:
        now = time.monotonic()
        contents = self._contents()
        for file in self._uploaded.keys() - contents.keys():
            (self._bucket / file.relative_to(self._folder)).unlink(missing_ok=True)
            del self._uploaded[file]
        for file, content in contents.items():
            if self._uploaded.get(file) == content:
                continue
            begun, done_at = self._uploads.get(file, (None, 0.0))
            with suppress(FileNotFoundError):  # removed meanwhile, perhaps with its folder
                if begun != content:
                    marker_of(file, UPLOADING).touch()
                    self._uploads[file] = (content, now + self._delay_s)
                elif done_at <= now and self._copy(file):
                    self._uploaded[file] = content
                    marker_of(file, UPLOADING).replace(marker_of(file, UPLOADED))

    def _copy(self, file: Path) -> bool:
        """Copy a whole file; return False if the agent is stopped in the meantime."""
        with file.open("rb") as source, self._incomplete.open("wb") as copy:
            while chunk := source.read(_CHUNK_BYTES):
                if self._stopped.is_set():
                    return False
                copy.write(chunk)
        target = self._bucket / file.relative_to(self._folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        if self._stopped.is_set():
            return False
        self._incomplete.replace(target)
        return True

    def _contents(self) -> dict[Path, _Content]:
        contents = {}
        for file in files_of(self._folder):
            with suppress(FileNotFoundError):
                status = file.stat()
                contents[file] = (status.st_ino, status.st_size, status.st_mtime_ns)
        return contents


def download(bucket: Path, folder: Path) -> None:
    """Copy all checkpoint files to a host before it starts; as on the service, the copies have new modification times.

    Args:
        bucket: The folder that stands in for S3.
        folder: The host's checkpoint folder, which is created.

    Raises:
        OSError: A file cannot be copied.
    """
    folder.mkdir(parents=True)
    for file in files_of(bucket):
        copy = folder / file.relative_to(bucket)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
