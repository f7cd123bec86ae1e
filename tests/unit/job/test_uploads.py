"""Files that the service's agent uploads, and files that it has uploaded."""

from __future__ import annotations

import os

import pytest

from lightning_sm.job.uploads import UPLOADED, UPLOADING, files_of, is_ignored, is_uploaded, marker_of


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.ckpt", False),
        ("sagemaker-ignore.ckpt", False),
        ("a.ckpt.sagemaker-ignore", True),
        (".sagemaker-ignore", True),
        ("a.ckpt.sagemaker-uploading", True),
        ("a.ckpt.sagemaker-uploaded", True),
    ],
)
def test_names_that_are_not_uploaded(name, expected):
    """Unfinished files and the agent's markers are not uploaded."""
    assert is_ignored(name) is expected


def test_files_of_a_checkpoint(tmp_path):
    """A checkpoint's files are found at any depth, without links, markers and ignored folders."""
    folder = tmp_path / "of.sagemaker-ignore" / "a.ckpt"
    names = ["x", "deep/y", "x.sagemaker-uploaded", "z.sagemaker-ignore", "half.sagemaker-ignore/part"]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    (folder / "link").symlink_to("x")
    assert files_of(folder) == [folder / "deep" / "y", folder / "x"]
    assert files_of(folder / "x") == [folder / "x"]
    assert files_of(folder / "x.sagemaker-uploaded") == files_of(folder / "none") == []


def test_a_marker_of_an_earlier_file_does_not_count(tmp_path):
    """A file replaced after its upload does not count as uploaded; adding a hard link to it changes nothing."""
    file = tmp_path / "last.ckpt"
    file.touch()
    assert not is_uploaded(file)
    marker_of(file, UPLOADING).touch()
    assert not is_uploaded(file)
    marker_of(file, UPLOADED).touch()
    assert is_uploaded(file)
    os.link(file, tmp_path / "model.ckpt")
    assert is_uploaded(file)
    replacement = tmp_path / "last.ckpt.sagemaker-ignore"
    replacement.touch()
    later = marker_of(file, UPLOADED).stat().st_mtime_ns + 1
    os.utime(replacement, ns=(later, later))
    replacement.replace(file)
    assert not is_uploaded(file)
