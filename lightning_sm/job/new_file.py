"""Output files of commands, at paths that the user chooses."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from lightning_sm.errors import OutputDirectoryError


def write_new(file: Path, text: str) -> None:
    """Write a new file, never replacing an existing one.

    Raises:
        OutputDirectoryError: The file exists or cannot be written.
    """
    try:
        content = text.encode()
        with file.open("xb") as new:
            new.write(content)
    except UnicodeEncodeError as error:
        name = error.object[max(0, error.start - 20) : error.end]
        raise OutputDirectoryError(f"{file} cannot be written: {name!r} is not UTF-8. Rename that file.") from error
    except FileExistsError:
        raise OutputDirectoryError(f"{file} already exists. Remove it, or choose another file.") from None
    except OSError as error:
        raise OutputDirectoryError(f"{file} cannot be written: {error.strerror}.") from error


def write_whole(file: Path, text: str) -> None:
    """Write or replace a file atomically (readers see either the old or the new one); create its folder if necessary.

    Raises:
        OutputDirectoryError: The file cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".", dir=file.parent) as folder:
            unfinished = Path(folder, file.name)
            unfinished.write_text(text, encoding="utf-8")
            unfinished.replace(file)
    except OSError as error:
        raise OutputDirectoryError(f"{file} cannot be written: {error.strerror}.") from error
