"""The archive of a job's own code."""

import os
import tarfile
from pathlib import Path

import pytest

from lightning_sm.errors import SubmitError
from lightning_sm.submit.source_archive import source_entries, write_archive


@pytest.fixture
def folder(tmp_path):
    """Code in a folder and a folder below it."""
    (tmp_path / "src" / "package").mkdir(parents=True)
    (tmp_path / "src" / "package" / "go.py").write_text("print(1)")
    (tmp_path / "src" / "train.py").write_text("print(2)")
    return tmp_path / "src"


def members(folder, archive):
    """The members of the archive of a folder, by name."""
    write_archive(folder, archive)
    with tarfile.open(archive) as tar:
        return {member.name: member for member in tar.getmembers()}


def test_what_is_below_the_folder_is_at_the_top_of_the_archive(folder, tmp_path):
    """Modes are kept, as scripts may be executable; who owns the files here is nobody's business."""
    (folder / "run.sh").touch(mode=0o755)
    found = members(folder, tmp_path / "code.tar.gz")
    assert list(found) == ["package", "package/go.py", "run.sh", "train.py"]
    assert found["run.sh"].mode == 0o755
    assert {(one.uid, one.gid, one.uname, one.gname) for one in found.values()} == {(0, 0, "", "")}


def test_links_are_replaced_by_what_they_lead_to(folder, tmp_path):
    """Files and folders, outside and inside; two links to one file are two files."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "tool.py").write_text("x = 1")
    (folder / "shared").symlink_to(tmp_path / "shared")
    (folder / "again").symlink_to("package")
    os.link(folder / "train.py", folder / "train2.py")
    found = members(folder, tmp_path / "code.tar.gz")
    assert {"shared/tool.py", "again/go.py", "package/go.py", "train2.py"} <= found.keys()
    assert all(one.isdir() or one.isreg() for one in found.values())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.symlink_to("nowhere"), "cannot be read (broken link)"),
        (lambda path: path.symlink_to(path), "cannot be read (broken link)"),
        (lambda path: path.symlink_to(".."), "is a link to a folder around it"),
        (lambda path: path.symlink_to("."), "is a link to a folder around it"),
        (os.mkfifo, "is neither a file nor a folder"),
    ],
    ids=["nowhere", "itself", "above", "around", "pipe"],
)
def test_what_cannot_be_archived_ends_nothing_but_the_archive(folder, tmp_path, make, words):
    """A link in a circle would never end, and a pipe would wait for a writer."""
    make(folder / "package" / "odd")
    (problem,) = [entry for entry in source_entries(folder) if entry.problem]
    assert (problem.name, problem.problem) == ("package/odd", words)
    with pytest.raises(SubmitError, match="package/odd, which"):
        write_archive(folder, tmp_path / "code.tar.gz")


def test_a_folder_that_cannot_be_listed_is_a_problem(folder, monkeypatch):
    """Here as everywhere: files that are missing in the archive would be missed on the hosts."""
    listed = Path.iterdir

    def refuse(path):
        if path.name == "package":
            raise PermissionError(13, "Permission denied")
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", refuse)
    (problem,) = [entry for entry in source_entries(folder) if entry.problem]
    assert (problem.name, problem.problem) == ("package", "cannot be read (Permission denied)")
    monkeypatch.setattr(Path, "iterdir", lambda _: refuse(folder / "package"))
    (problem,) = source_entries(folder)
    assert (problem.name, problem.problem) == (".", "cannot be read (Permission denied)")
