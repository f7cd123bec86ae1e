"""A checkpoint appears whole or not at all, and is read as it was written, with any CheckpointIO."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from pytorch_lightning.plugins.io import TorchCheckpointIO

from lightning_sm.training.checkpoints import durable_io
from lightning_sm.training.checkpoints.durable_io import DurableCheckpointIO
from tests.fakes.checkpoint_writers import NEW, OLD, AsFolder, Recorder, ToPath, beside, names_in, same

# ---- writing


@pytest.mark.parametrize("inner", [TorchCheckpointIO(), ToPath()])
@pytest.mark.parametrize("kind", [str, Path, "file://{}".format])
def test_a_checkpoint_is_written_and_read(folder, inner, kind):
    """A save creates folders, replaces old files and leaves only the checkpoint under its final name."""
    durable, path = DurableCheckpointIO(inner, folder), folder / "version_0" / "a.ckpt"
    for content in (OLD, NEW):
        durable.save_checkpoint(content, kind(path))
        assert same(durable.load_checkpoint(path), content)
    assert names_in(folder) == ["version_0", "version_0/a.ckpt"]
    assert beside(folder) == []


class _Watching(ToPath):
    """A CheckpointIO that records the contents of the folder and the temporary directory while it writes."""

    def __init__(self, folder):
        self.folder, self.seen = folder, []

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        super().save_checkpoint(checkpoint, path)
        self.seen.append((names_in(self.folder), beside(self.folder)))


def test_it_is_written_in_the_folder_under_a_name_that_the_agent_ignores(folder):
    """Until it is complete, a checkpoint is in its folder under a name that the upload agent ignores."""
    watching = _Watching(folder)
    durable = DurableCheckpointIO(watching, folder)
    durable.save_checkpoint(OLD, folder / "a.ckpt")
    durable.save_checkpoint(OLD, folder / "a.ckpt")
    unfinished = "a.ckpt.sagemaker-ignore"
    assert watching.seen == [([unfinished], []), (["a.ckpt", unfinished], [])]


def test_the_other_one_gets_a_text_and_the_options(folder):
    """The wrapped CheckpointIO gets a string path and the options, as from Lightning's ModelCheckpoint."""
    recorder = Recorder()
    durable = DurableCheckpointIO(recorder, folder)
    durable.save_checkpoint(OLD, str(folder / "a.ckpt"))
    durable.save_checkpoint(OLD, folder / "b.ckpt", storage_options={"x": 1})
    assert recorder.paths == [f"{folder}/{name}.ckpt.sagemaker-ignore" for name in "ab"]
    assert recorder.options == [None, {"x": 1}]


@pytest.mark.parametrize("plugin", [TorchCheckpointIO(), ToPath(), AsFolder()])
def test_a_checkpoint_is_written_once(folder, monkeypatch, plugin):
    """A checkpoint is renamed within its folder, never copied; Lightning's CheckpointIO would write to another disk."""

    def refuse(*arguments, **_):
        raise AssertionError(f"copied: {arguments}")

    for module, name in ((shutil, "copyfile"), (shutil, "copyfileobj"), (shutil, "move"), (tempfile, "mkstemp")):
        monkeypatch.setattr(module, name, refuse)
    renamed, real = [], os.replace
    monkeypatch.setattr(durable_io.os, "replace", lambda *paths: (renamed.append(paths), real(*paths)))
    DurableCheckpointIO(plugin, folder).save_checkpoint(OLD, folder / "a.ckpt")
    assert renamed == [(folder / "a.ckpt.sagemaker-ignore", folder / "a.ckpt")]


def test_options_of_lightnings_own_are_refused_as_by_itself(folder):
    """TorchCheckpointIO still refuses storage_options."""
    with pytest.raises(TypeError, match="storage_options"):
        DurableCheckpointIO(TorchCheckpointIO(), folder).save_checkpoint(OLD, folder / "a.ckpt", {"x": 1})
    assert names_in(folder) == []


@pytest.mark.parametrize("writer", [TorchCheckpointIO(), AsFolder()])
def test_what_a_killed_save_left_does_not_disturb(folder, writer):
    """A file or folder that a killed save left under the temporary name is removed before the next save."""
    for name in ("a.ckpt.sagemaker-ignore/deep/part.pt", "b.ckpt.sagemaker-ignore"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"half")
    durable = DurableCheckpointIO(writer, folder)
    for name in ("a.ckpt", "b.ckpt"):
        durable.save_checkpoint(NEW, folder / name)
        assert same(durable.load_checkpoint(folder / name), NEW)
    assert sorted(os.listdir(folder)) == ["a.ckpt", "b.ckpt"]


def test_folders_are_replaced_whole(folder):
    """A checkpoint folder replaces a folder or a file, and a file replaces a folder."""
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
    """A link with the checkpoint's name is replaced by a file, and its target is unchanged."""
    durable = DurableCheckpointIO(TorchCheckpointIO(), folder)
    durable.save_checkpoint(OLD, folder / "a.ckpt")
    (folder / "last.ckpt").symlink_to("a.ckpt")
    durable.save_checkpoint(NEW, folder / "last.ckpt")
    assert not (folder / "last.ckpt").is_symlink()
    assert same(durable.load_checkpoint(folder / "a.ckpt"), OLD)


@pytest.mark.parametrize("inner", [TorchCheckpointIO(), ToPath(), AsFolder()])
def test_the_disk_has_every_file_before_it_takes_its_name(folder, monkeypatch, inner):
    """All files are synced to disk before they are renamed."""
    calls = []
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
    """Paths that are not local or lead outside the folder are passed on unchanged."""
    (tmp_path / "ck").mkdir()
    (tmp_path / "ck" / "out").symlink_to(tmp_path)
    path, recorder = path.format(tmp=tmp_path), Recorder()
    durable = DurableCheckpointIO(recorder, tmp_path / "ck")
    durable.save_checkpoint(OLD, path)
    durable.remove_checkpoint(path)
    assert recorder.paths == [path, path]


def test_a_reader_never_sees_a_part(folder):
    """While a large checkpoint is rewritten repeatedly, a reader always finds a whole file."""
    durable, path = DurableCheckpointIO(ToPath(), folder), folder / "a.ckpt"
    large = {"value": torch.zeros(4_000_000)}
    durable.save_checkpoint(large, path)
    sizes, names, looking, done = set(), set(), threading.Event(), threading.Event()

    def watch():
        while not done.is_set():
            sizes.add(path.stat().st_size)
            names.update(name for name in os.listdir(folder) if not name.endswith(".sagemaker-ignore"))
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
