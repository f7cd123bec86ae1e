"""A checkpoint appears whole or not at all, whatever writes it and whatever fails."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins.io import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO

from lightning_sm import checkpoint_io
from lightning_sm.checkpoint_io import DurableCheckpointIO, make_durable
from lightning_sm.errors import CheckpointError
from tests.fakes.small_app import SmallData, SmallModel

OLD, NEW = {"value": torch.zeros(1000)}, {"value": torch.ones(1000)}
_UNSHARE = shutil.which("unshare")


class _ToPath(TorchCheckpointIO):
    """Write with torch.save(path), as CheckpointIOs of users do."""

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        torch.save(checkpoint, path)


class _AsFolder(TorchCheckpointIO):
    """Write a folder with two files, one of them deeper."""

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        Path(path, "deep").mkdir(parents=True)
        torch.save(checkpoint, Path(path, "deep", "part.pt"))
        Path(path, "index").write_text("deep/part.pt")

    def load_checkpoint(self, path, map_location=None):
        return torch.load(Path(path, Path(path, "index").read_text()))


class _Recorder(TorchCheckpointIO):
    """Write, and note where."""

    def __init__(self):
        self.paths, self.options, self.is_torn_down = [], [], False

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        self.paths.append(path)
        self.options.append(storage_options)
        if "://" not in str(path):
            super().save_checkpoint(checkpoint, path)

    def remove_checkpoint(self, path):
        self.paths.append(path)

    def teardown(self):
        self.is_torn_down = True


class _Failing(TorchCheckpointIO):
    """Write a part, then fail."""

    def __init__(self, error):
        self.error = error

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        Path(path).write_bytes(b"half")
        raise self.error


class _OntoFullDisk(TorchCheckpointIO):
    """Write a part, then go on writing where the kernel says that no space is left."""

    def __init__(self, write):
        self.write = write

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        Path(path).write_bytes(b"half")
        self.write(checkpoint)


def _with_torch(checkpoint):
    torch.save(checkpoint, "/dev/full")


def _with_open(checkpoint):
    with open("/dev/full", "wb") as file:
        pickle.dump(checkpoint, file)


@pytest.fixture
def folder(tmp_path):
    """The checkpoint folder."""
    return tmp_path / "checkpoints"


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A checkpoint folder on another file system than what is beside it and the temporary directory."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        if os.stat(other).st_dev == tmp_path.stat().st_dev:
            _only_copies(monkeypatch, tmp_path / "checkpoints")
            (tmp_path / "checkpoints").mkdir()
        else:
            (tmp_path / "checkpoints").symlink_to(other)
        yield tmp_path / "checkpoints"


def _only_copies(monkeypatch, folder):
    """Let renaming into the folder fail as it does between two file systems."""
    real = os.replace

    def replace(source, destination):
        if (Path(source).parent.parent == folder) != (Path(destination).parent == folder):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(source))
        real(source, destination)

    monkeypatch.setattr(checkpoint_io.os, "replace", replace)


@contextmanager
def file_size_limit(size):
    """Let the kernel refuse to make any file larger than this."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def names_in(folder):
    """All files and folders at any depth, hidden ones, too."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def beside(folder):
    """What is beside the folder, and in the temporary directory with its name."""
    prefix = f".{folder.name}.incoming-"
    temporary = [name for name in os.listdir(tempfile.gettempdir()) if name.startswith(prefix)]
    return sorted(temporary + [name for name in os.listdir(folder.parent) if name != folder.name])


def same(first, second):
    """Whether two checkpoints are equal."""
    return torch.equal(first["value"], second["value"])


def make_trainer(**arguments):
    """A Trainer that says nothing."""
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    return Trainer(**quiet, **arguments)


# ---- writing


@pytest.mark.parametrize("inner", [TorchCheckpointIO(), _ToPath()])
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
    recorder = _Recorder()
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
        checkpoint_io.os, "replace", lambda *paths: (replaced.append(tuple(map(Path, paths))), real(*paths))
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
    monkeypatch.setattr(checkpoint_io.tempfile, "mkdtemp", mkdtemp)
    recorder = _Recorder()
    DurableCheckpointIO(recorder, folder).save_checkpoint(OLD, folder / "a.ckpt")
    assert recorder.paths[0].parent.parent == tmp_path / "temporary"
    assert names_in(tmp_path) == ["checkpoints", "checkpoints/a.ckpt", "temporary"]


@pytest.mark.parametrize("where", ["folder", "elsewhere"])
def test_folders_are_replaced_whole(request, where):
    """A CheckpointIO that writes folders replaces a folder and a file, and is replaced by a file."""
    folder = request.getfixturevalue(where)
    path = folder / "a.ckpt"
    as_folder, as_file = DurableCheckpointIO(_AsFolder(), folder), DurableCheckpointIO(_ToPath(), folder)
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

    class _WithIndex(_ToPath):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            super().save_checkpoint(checkpoint, path)
            Path(f"{path}.index").write_text("1")

    order, real = [], os.replace
    monkeypatch.setattr(checkpoint_io.os, "replace", lambda *paths: (order.append(paths[1].name), real(*paths)))
    DurableCheckpointIO(_WithIndex(), folder).save_checkpoint(OLD, folder / "a.ckpt")
    assert order == ["a.ckpt.index", "a.ckpt"]


@pytest.mark.parametrize("where", ["folder", "elsewhere"])
@pytest.mark.parametrize("inner", [_ToPath(), _AsFolder()])
def test_the_disk_has_every_file_before_it_takes_its_name(request, monkeypatch, where, inner):
    """All files are synchronised with the disk, and only then renamed."""
    folder, calls = request.getfixturevalue(where), []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(
        checkpoint_io.os, "fsync", lambda file: (calls.append(os.readlink(f"/proc/self/fd/{file}")), sync(file))
    )
    monkeypatch.setattr(checkpoint_io.os, "replace", lambda *paths: (calls.append(paths[0]), replace(*paths)))
    DurableCheckpointIO(inner, folder).save_checkpoint(OLD, folder / "a.ckpt")
    *synced, source = [Path(os.path.realpath(call)) for call in calls]
    names = ["index", "deep/part.pt"] if isinstance(inner, _AsFolder) else [""]
    assert {source / name for name in names} <= set(synced)


@pytest.mark.parametrize("path", ["s3://bucket/a.ckpt", "memory://a.ckpt", "{tmp}/outside.ckpt", "{tmp}/ck/out/a.ckpt"])
def test_other_paths_are_left_to_the_other_one(folder, tmp_path, path):
    """Paths that are not local, or lead out of the folder, are passed on unchanged."""
    (tmp_path / "ck").mkdir()
    (tmp_path / "ck" / "out").symlink_to(tmp_path)
    path, recorder = path.format(tmp=tmp_path), _Recorder()
    durable = DurableCheckpointIO(recorder, tmp_path / "ck")
    durable.save_checkpoint(OLD, path)
    durable.remove_checkpoint(path)
    assert recorder.paths == [path, path]


@pytest.mark.parametrize("where", ["folder", "elsewhere"])
def test_a_reader_never_sees_a_part(request, where):
    """While a large checkpoint is written again and again, its name always has a whole one."""
    folder = request.getfixturevalue(where)
    durable, path = DurableCheckpointIO(_ToPath(), folder), folder / "a.ckpt"
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


# ---- failing


@pytest.mark.parametrize("where", ["folder", "elsewhere"])
@pytest.mark.parametrize("inner", [TorchCheckpointIO(), _ToPath()])
def test_a_file_that_cannot_grow_leaves_the_old_one(request, where, inner):
    """When the kernel refuses to write on, the old file is intact, nothing is left, and the error says what to do."""
    folder = request.getfixturevalue(where)
    durable, path = DurableCheckpointIO(inner, folder), folder / "a.ckpt"
    durable.save_checkpoint(OLD, path)
    with (
        file_size_limit(100_000),
        pytest.raises(CheckpointError, match=r"a\.ckpt was not written: .*bytes are free.*volume_size") as caught,
    ):
        durable.save_checkpoint({"value": torch.zeros(100_000)}, path)
    assert isinstance(caught.value.__cause__, (OSError, RuntimeError))
    assert same(durable.load_checkpoint(path), OLD)
    assert names_in(folder) == ["a.ckpt"]
    assert beside(folder) == []


@pytest.mark.parametrize("write", [_with_torch, _with_open])
@pytest.mark.parametrize("size", [1, 10_000_000])
def test_a_full_disk_is_explained(folder, write, size):
    """A full disk is named as what it is, whether torch or Python met it."""
    DurableCheckpointIO(TorchCheckpointIO(), folder).save_checkpoint(OLD, folder / "a.ckpt")
    durable = DurableCheckpointIO(_OntoFullDisk(write), folder)
    with pytest.raises(CheckpointError, match=r"Keep fewer checkpoints .* larger volume") as caught:
        durable.save_checkpoint({"value": torch.zeros(size)}, folder / "a.ckpt")
    assert str(folder / "a.ckpt") in str(caught.value)
    assert f"bytes are free in {folder} and" in str(caught.value)
    assert same(durable.load_checkpoint(folder / "a.ckpt"), OLD)
    assert beside(folder) == []


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EIO])
def test_other_errors_are_explained(folder, code):
    """What may not be written to is named, and the cause is chained."""
    error = OSError(code, os.strerror(code))
    advice = "in order" if code == errno.EIO else "Let this process write to both"
    with pytest.raises(CheckpointError, match=rf"{os.strerror(code)}.*{advice}") as caught:
        DurableCheckpointIO(_Failing(error), folder).save_checkpoint(NEW, folder / "a.ckpt")
    assert caught.value.__cause__ is error
    assert names_in(folder) == beside(folder) == []


@pytest.mark.parametrize("error", [RuntimeError("the user's"), TypeError("no options"), KeyboardInterrupt()])
def test_errors_that_are_not_of_the_disk_pass(folder, error):
    """What has nothing to do with writing is raised as it is, and nothing is left of the attempt."""
    with pytest.raises(type(error)) as caught:
        DurableCheckpointIO(_Failing(error), folder).save_checkpoint(NEW, folder / "a.ckpt")
    assert caught.value is error
    assert names_in(folder) == beside(folder) == []


def test_an_old_folder_comes_back_when_the_new_one_cannot_take_its_name(folder, monkeypatch):
    """A folder is put aside while it is replaced, and put back when that fails."""
    durable, path = DurableCheckpointIO(_AsFolder(), folder), folder / "a.ckpt"
    durable.save_checkpoint(OLD, path)
    real = os.replace

    def replace(source, destination):
        if Path(source).name == "a.ckpt" and destination == path:
            raise OSError(errno.EIO, "Input/output error")
        real(source, destination)

    monkeypatch.setattr(checkpoint_io.os, "replace", replace)
    with pytest.raises(CheckpointError, match="Input/output error"):
        durable.save_checkpoint(NEW, path)
    assert same(durable.load_checkpoint(path), OLD)
    assert beside(folder) == []


def test_what_was_not_written_is_an_error(folder):
    """A CheckpointIO that returns without a file, as Lightning's does when it is not permitted to write, is named."""

    class _Silent(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            pass

    with pytest.raises(CheckpointError, match=r"^_Silent has not written the checkpoint .*a\.ckpt when it returned"):
        DurableCheckpointIO(_Silent(), folder).save_checkpoint(NEW, folder / "a.ckpt")


_ON_A_SMALL_DISK = """
import os, sys, torch
from pathlib import Path
from pytorch_lightning.plugins.io import TorchCheckpointIO
from lightning_sm.checkpoint_io import DurableCheckpointIO
from lightning_sm.errors import CheckpointError
folder = Path(sys.argv[1])
durable = DurableCheckpointIO(TorchCheckpointIO(), folder)
durable.save_checkpoint({"value": 1}, folder / "a.ckpt")
try:
    durable.save_checkpoint({"value": torch.zeros(1_000_000)}, folder / "a.ckpt")
except CheckpointError as error:
    print(error)
print(durable.load_checkpoint(folder / "a.ckpt"), os.listdir(folder), sorted(os.listdir(folder.parent)))
"""


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small file system")
@pytest.mark.skipif(_UNSHARE is None, reason="needs unshare (Debian package util-linux)")
def test_a_full_volume_of_its_own_keeps_the_old_file(folder):
    """On a mounted volume of 1 MiB, like /opt/ml/checkpoints in a container, 4 MB fail and the old file is intact."""
    folder.mkdir()
    mount = 'mount -t tmpfs -o size=1m tmpfs "$0" && exec "$@"'
    command = [_UNSHARE, "--mount", "sh", "-c", mount, folder, sys.executable, "-c", _ON_A_SMALL_DISK, folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    said, state = done.stdout.splitlines()
    assert "OSError: [Errno 28] No space left on device" in said
    assert f"bytes are free in {folder}" in said
    assert state == "{'value': 1} ['a.ckpt'] ['checkpoints']"


# ---- removing


def test_a_removed_checkpoint_stays_until_the_next_removal(folder):
    """The one that was removed last is still there."""
    durable, paths = DurableCheckpointIO(TorchCheckpointIO(), folder), [folder / f"{name}.ckpt" for name in "abc"]
    for path in paths:
        durable.save_checkpoint(OLD, path)
    for path, left in zip(paths, ([*"abc"], [*"bc"], [*"c"]), strict=True):
        durable.remove_checkpoint(str(path))
        assert names_in(folder) == [f"{name}.ckpt" for name in left]
    durable.remove_checkpoint(paths[-1])  # twice the same
    assert names_in(folder) == ["c.ckpt"]


def test_what_is_saved_again_is_not_removed(folder):
    """A checkpoint that takes the name of a removed one belongs to the user again."""
    durable = DurableCheckpointIO(TorchCheckpointIO(), folder)
    for name in "abc":
        durable.save_checkpoint(OLD, folder / f"{name}.ckpt")
    durable.remove_checkpoint(folder / "a.ckpt")
    durable.save_checkpoint(NEW, folder / "a.ckpt")
    durable.remove_checkpoint(folder / "b.ckpt")
    durable.remove_checkpoint(folder / "c.ckpt")
    assert names_in(folder) == ["a.ckpt", "c.ckpt"]


def test_a_removal_before_the_file_is_written_deletes_nothing(folder):
    """AsyncCheckpointIO may still be writing what is removed: what is there stays until that is there, too."""
    durable = DurableCheckpointIO(TorchCheckpointIO(), folder)
    durable.save_checkpoint(OLD, folder / "a.ckpt")
    durable.remove_checkpoint(folder / "a.ckpt")
    durable.remove_checkpoint(folder / "b.ckpt")
    assert names_in(folder) == ["a.ckpt"]


def test_folders_are_removed_like_files(folder):
    """A spare may be a folder."""
    durable = DurableCheckpointIO(_AsFolder(), folder)
    for name in "ab":
        durable.save_checkpoint(OLD, folder / f"{name}.ckpt")
        durable.remove_checkpoint(folder / f"{name}.ckpt")
    assert sorted(os.listdir(folder)) == ["b.ckpt"]


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
    DurableCheckpointIO(_ToPath(), folder).save_checkpoint({"value": torch.ones(1), "other": Path}, folder / "a.ckpt")
    with pytest.raises((pickle.UnpicklingError, TypeError), match=r"weights_only"):
        durable.load_checkpoint(folder / "a.ckpt", weights_only=True)
    DurableCheckpointIO(_ToPath(), folder).save_checkpoint(NEW, folder / "a.ckpt")
    assert same(durable.load_checkpoint(folder / "a.ckpt", weights_only=None, map_location="cpu"), NEW)


# ---- in a Trainer


def fit(folder, plugins=None, **saving):
    """Train four steps with a durable checkpoint after each; return the Trainer."""
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, **saving)
    trainer = make_trainer(callbacks=[saver], max_epochs=2, plugins=plugins)
    make_durable(trainer, folder)
    trainer.fit(SmallModel(), SmallData())
    return trainer


@pytest.mark.parametrize("plugins", [None, [_AsFolder()], [AsyncCheckpointIO()], [AsyncCheckpointIO(_AsFolder())]])
def test_a_trainer_keeps_one_more_than_it_was_told(folder, plugins):
    """With save_top_k=1 the newest and the one before it are there at the end, with AsyncCheckpointIO perhaps more."""
    fit(folder, plugins)
    names = sorted(os.listdir(folder))
    assert names[-2:] == ["step=3.ckpt", "step=4.ckpt"]
    assert len(names) == 2 or isinstance(plugins[0], AsyncCheckpointIO)
    assert beside(folder) == []


def test_a_trainer_resumes_from_what_was_written(folder):
    """A file of a Trainer is read by the next one, through the same way."""
    fit(folder)
    trainer = make_trainer(max_epochs=3, enable_checkpointing=False)
    make_durable(trainer, folder)
    trainer.fit(SmallModel(), SmallData(), ckpt_path=str(folder / "step=4.ckpt"))
    assert trainer.global_step == 6


def test_an_error_in_the_thread_of_async_checkpoint_io_ends_the_training(folder):
    """What fails in the background is raised at the next save or at the end, and is explained."""
    with pytest.raises(CheckpointError, match="was not written: OSError"):
        fit(folder, [AsyncCheckpointIO(_Failing(OSError(errno.ENOSPC, "No space left on device")))])
    assert names_in(folder) == beside(folder) == []


class _Wrapper(AsyncCheckpointIO):
    """A wrapper of the user's, around another."""


@pytest.mark.parametrize(
    "plugin", [None, _AsFolder(), AsyncCheckpointIO(), AsyncCheckpointIO(_ToPath()), _Wrapper(AsyncCheckpointIO())]
)
def test_the_innermost_is_wrapped_once(folder, plugin):
    """However often it is asked for, there is one around the CheckpointIO that writes, within all wrappers."""
    trainer = make_trainer(plugins=plugin and [plugin])
    for _ in range(2):
        make_durable(trainer, folder)
    chain = [trainer.strategy.checkpoint_io]
    while hasattr(chain[-1], "checkpoint_io"):
        chain.append(chain[-1].checkpoint_io)
    assert [isinstance(one, DurableCheckpointIO) for one in chain] == [*[False] * (len(chain) - 2), True, False]
    assert plugin is None or plugin in chain
    assert type(chain[-1]) in (TorchCheckpointIO, _AsFolder, _ToPath)


def test_leftovers_of_a_killed_run_are_removed(folder):
    """What a run was writing when it was killed is removed by the next one, on rank 0 alone; nothing else is."""
    kept = ["a.ckpt", ".hidden", "version_0"]
    for name in ("version_0/.incoming-1/b.ckpt", ".incoming-2/c.ckpt", "../.checkpoints.incoming-3/d.ckpt", *kept):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).exists() or (folder / name).write_text("half")
    make_durable(make_trainer(), folder)
    assert names_in(folder.parent) == sorted(["checkpoints", *(f"checkpoints/{name}" for name in kept)])


def test_it_can_be_pickled_and_passes_the_end_on(folder):
    """Strategies that spawn pickle the Trainer; the other CheckpointIO hears of the end."""
    durable = pickle.loads(pickle.dumps(DurableCheckpointIO(_Recorder(), folder)))  # noqa: S301 - its own bytes
    durable.teardown()
    assert durable.checkpoint_io.is_torn_down
