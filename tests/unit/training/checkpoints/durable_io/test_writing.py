"""A checkpoint appears whole or not at all, and is read as it was written, whatever writes it."""

from __future__ import annotations

import errno
import os
import pickle
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from pytorch_lightning.plugins.io import CheckpointIO, TorchCheckpointIO

from lightning_sm.training.checkpoints import durable_io
from lightning_sm.training.checkpoints.durable_io import DurableCheckpointIO
from tests.fakes.checkpoint_writers import NEW, OLD, AsFolder, Recorder, ToPath, beside, names_in, same

# ---- writing


@pytest.mark.parametrize("inner", [TorchCheckpointIO(), ToPath()])
@pytest.mark.parametrize("kind", [str, Path, "file://{}".format])
def test_a_checkpoint_is_written_and_read(folder, inner, kind):
    """It has its name in the end, old files are replaced, folders are made, and nothing else is left."""
    durable, path = DurableCheckpointIO(inner, folder), folder / "version_0" / "a.ckpt"
    for content in (OLD, NEW):
        durable.save_checkpoint(content, kind(path))
        assert same(durable.load_checkpoint(path), content)
    assert names_in(folder) == ["version_0", "version_0/a.ckpt"]
    assert beside(folder) == []


def test_it_is_written_beside_the_folder_with_its_own_name(folder):
    """The other CheckpointIO gets a path of the type that it was called with, in a hidden folder beside."""
    recorder = Recorder()
    durable = DurableCheckpointIO(recorder, folder)
    durable.save_checkpoint(OLD, str(folder / "a.ckpt"))
    durable.save_checkpoint(OLD, folder / "b.ckpt", storage_options={"x": 1})
    first, second = recorder.paths
    assert isinstance(first, str)
    assert isinstance(second, Path)
    assert (second.parent.parent, second.name) == (folder.parent, "b.ckpt")
    assert second.parent.name.startswith(".checkpoints.incoming-")
    assert recorder.options == [None, {"x": 1}]


def test_between_file_systems_a_hidden_copy_takes_the_name(elsewhere, monkeypatch):
    """Where the folder is on a file system of its own, the file is copied there and then renamed."""
    replaced, real = [], os.replace
    monkeypatch.setattr(
        durable_io.os, "replace", lambda *paths: (replaced.append(tuple(map(Path, paths))), real(*paths))
    )
    durable = DurableCheckpointIO(TorchCheckpointIO(), elsewhere)
    for content in (OLD, NEW):
        durable.save_checkpoint(content, elsewhere / "a.ckpt")
        assert same(durable.load_checkpoint(elsewhere / "a.ckpt"), content)
        source, destination = replaced[-1]
        assert destination == elsewhere / "a.ckpt"
        assert source.parent.parent == elsewhere
        assert source.parent.name.startswith(".incoming-")
    assert names_in(elsewhere) == ["a.ckpt"]
    assert beside(elsewhere) == []


def test_the_temporary_directory_serves_where_nothing_can_be_made_beside(folder, tmp_path, monkeypatch):
    """A parent that cannot be written to is no error."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    real = tempfile.mkdtemp

    def mkdtemp(prefix, dir):  # noqa: A002 - the name of tempfile's argument
        if dir == folder.parent:
            raise PermissionError(errno.EACCES, "Permission denied", str(dir))
        return real(prefix=prefix, dir=dir)

    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(durable_io.tempfile, "mkdtemp", mkdtemp)
    recorder = Recorder()
    DurableCheckpointIO(recorder, folder).save_checkpoint(OLD, folder / "a.ckpt")
    assert recorder.paths[0].parent.parent == tmp_path / "temporary"
    assert names_in(tmp_path) == ["checkpoints", "checkpoints/a.ckpt", "temporary"]


@pytest.mark.parametrize("where", ["folder", "elsewhere"])
def test_folders_are_replaced_whole(request, where):
    """A CheckpointIO that writes folders replaces a folder and a file, and is replaced by a file."""
    folder = request.getfixturevalue(where)
    path = folder / "a.ckpt"
    as_folder, as_file = DurableCheckpointIO(AsFolder(), folder), DurableCheckpointIO(ToPath(), folder)
    for content in (OLD, NEW):
        as_folder.save_checkpoint(content, path)
        assert same(as_folder.load_checkpoint(path), content)
        assert names_in(folder) == ["a.ckpt", "a.ckpt/deep", "a.ckpt/deep/part.pt", "a.ckpt/index"]
    as_file.save_checkpoint(OLD, path)
    assert same(as_file.load_checkpoint(path), OLD)
    as_folder.save_checkpoint(NEW, path)
    assert same(as_folder.load_checkpoint(path), NEW)
    assert beside(folder) == []


def test_a_link_of_the_name_is_replaced_not_followed(folder):
    """What an old link points to stays as it is, and the checkpoint is a file."""
    durable = DurableCheckpointIO(TorchCheckpointIO(), folder)
    durable.save_checkpoint(OLD, folder / "a.ckpt")
    (folder / "last.ckpt").symlink_to("a.ckpt")
    durable.save_checkpoint(NEW, folder / "last.ckpt")
    assert not (folder / "last.ckpt").is_symlink()
    assert same(durable.load_checkpoint(folder / "a.ckpt"), OLD)


def test_files_beside_the_checkpoint_come_along_first(folder, monkeypatch):
    """What a CheckpointIO writes beside the checkpoint is moved, too, and the checkpoint comes last."""

    class _WithIndex(ToPath):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            super().save_checkpoint(checkpoint, path)
            Path(f"{path}.index").write_text("1")

    order, real = [], os.replace
    monkeypatch.setattr(durable_io.os, "replace", lambda *paths: (order.append(paths[1].name), real(*paths)))
    DurableCheckpointIO(_WithIndex(), folder).save_checkpoint(OLD, folder / "a.ckpt")
    assert order == ["a.ckpt.index", "a.ckpt"]


@pytest.mark.parametrize("where", ["folder", "elsewhere"])
@pytest.mark.parametrize("inner", [ToPath(), AsFolder()])
def test_the_disk_has_every_file_before_it_takes_its_name(request, monkeypatch, where, inner):
    """All files are synchronised with the disk, and only then renamed."""
    folder, calls = request.getfixturevalue(where), []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(
        durable_io.os, "fsync", lambda file: (calls.append(os.readlink(f"/proc/self/fd/{file}")), sync(file))
    )
    monkeypatch.setattr(durable_io.os, "replace", lambda *paths: (calls.append(paths[0]), replace(*paths)))
    DurableCheckpointIO(inner, folder).save_checkpoint(OLD, folder / "a.ckpt")
    *synced, source = [Path(os.path.realpath(call)) for call in calls]
    names = ["index", "deep/part.pt"] if isinstance(inner, AsFolder) else [""]
    assert {source / name for name in names} <= set(synced)


@pytest.mark.parametrize("path", ["s3://bucket/a.ckpt", "memory://a.ckpt", "{tmp}/outside.ckpt", "{tmp}/ck/out/a.ckpt"])
def test_other_paths_are_left_to_the_other_one(folder, tmp_path, path):
    """Paths that are not local, or lead out of the folder, are passed on unchanged."""
    (tmp_path / "ck").mkdir()
    (tmp_path / "ck" / "out").symlink_to(tmp_path)
    path, recorder = path.format(tmp=tmp_path), Recorder()
    durable = DurableCheckpointIO(recorder, tmp_path / "ck")
    durable.save_checkpoint(OLD, path)
    durable.remove_checkpoint(path)
    assert recorder.paths == [path, path]


@pytest.mark.parametrize("where", ["folder", "elsewhere"])
def test_a_reader_never_sees_a_part(request, where):
    """While a large checkpoint is written again and again, its name always has a whole one."""
    folder = request.getfixturevalue(where)
    durable, path = DurableCheckpointIO(ToPath(), folder), folder / "a.ckpt"
    large = {"value": torch.zeros(4_000_000)}
    durable.save_checkpoint(large, path)
    sizes, names, looking, done = set(), set(), threading.Event(), threading.Event()

    def watch():
        while not done.is_set():
            sizes.add(path.stat().st_size)
            names.update(name for name in os.listdir(folder) if not name.startswith("."))
            looking.set()

    reader = threading.Thread(target=watch)
    reader.start()
    assert looking.wait(10)
    for _ in range(5):
        durable.save_checkpoint(large, path)
    done.set()
    reader.join()
    assert sizes == {path.stat().st_size}
    assert names == {"a.ckpt"}


# ---- loading


class _OfLightning25(CheckpointIO):
    """With the signatures of Lightning 2.5."""

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        torch.save(checkpoint, path)

    def load_checkpoint(self, path, map_location=None):
        return torch.load(path, map_location=map_location)

    def remove_checkpoint(self, path):
        os.remove(path)


@pytest.mark.parametrize("inner", [_OfLightning25(), TorchCheckpointIO()])
def test_arguments_of_loading_are_passed_on(folder, inner):
    """weights_only=None of Lightning 2.6 does not reach one that was written for 2.5; whatever is set does."""
    durable = DurableCheckpointIO(inner, folder)
    DurableCheckpointIO(ToPath(), folder).save_checkpoint({"value": torch.ones(1), "other": Path}, folder / "a.ckpt")
    with pytest.raises((pickle.UnpicklingError, TypeError), match=r"weights_only"):
        durable.load_checkpoint(folder / "a.ckpt", weights_only=True)
    DurableCheckpointIO(ToPath(), folder).save_checkpoint(NEW, folder / "a.ckpt")
    assert same(durable.load_checkpoint(folder / "a.ckpt", weights_only=None, map_location="cpu"), NEW)
