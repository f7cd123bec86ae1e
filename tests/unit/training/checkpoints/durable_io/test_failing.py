"""A failed write keeps the old checkpoint, leaves nothing else and raises an error with a remedy."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from pytorch_lightning.plugins.io import TorchCheckpointIO

from lightning_sm.errors import CheckpointError
from lightning_sm.training.checkpoints.durable_io import DurableCheckpointIO
from tests.fakes.checkpoint_writers import NEW, OLD, Failing, ToPath, beside, names_in, same

_UNSHARE = shutil.which("unshare")


class _OntoFullDisk(TorchCheckpointIO):
    """A CheckpointIO that writes a part and then runs out of space."""

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


@contextmanager
def file_size_limit(size):
    """Make the kernel refuse to write files larger than this."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("inner", [TorchCheckpointIO(), ToPath()])
def test_a_file_that_cannot_grow_leaves_the_old_one(folder, inner):
    """If the kernel refuses to write on, the old file is intact, nothing else remains, and the error has a remedy."""
    durable, path = DurableCheckpointIO(inner, folder), folder / "a.ckpt"
    durable.save_checkpoint(OLD, path)
    with (
        file_size_limit(100_000),
        pytest.raises(CheckpointError, match=r"a\.ckpt was not written to .*volume_size") as caught,
    ):
        durable.save_checkpoint({"value": torch.zeros(100_000)}, path)
    assert isinstance(caught.value.__cause__, (OSError, RuntimeError))
    assert same(durable.load_checkpoint(path), OLD)
    assert names_in(folder) == ["a.ckpt"]
    assert beside(folder) == []


@pytest.mark.parametrize("write", [_with_torch, _with_open])
@pytest.mark.parametrize("size", [1, 10_000_000])
def test_a_full_disk_is_explained(folder, write, size):
    """The error explains a full disk, whether torch or Python hits it."""
    DurableCheckpointIO(TorchCheckpointIO(), folder).save_checkpoint(OLD, folder / "a.ckpt")
    durable = DurableCheckpointIO(_OntoFullDisk(write), folder)
    with pytest.raises(CheckpointError, match=r"larger volume .*keep fewer checkpoints") as caught:
        durable.save_checkpoint({"value": torch.zeros(size)}, folder / "a.ckpt")
    assert str(folder / "a.ckpt") in str(caught.value)
    assert same(durable.load_checkpoint(folder / "a.ckpt"), OLD)
    assert beside(folder) == []


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EIO])
def test_other_errors_are_explained(folder, code):
    """The error names the path that is not writable, and its cause is chained."""
    error = OSError(code, os.strerror(code))
    with pytest.raises(CheckpointError, match=rf"{os.strerror(code)}.*Check that .*checkpoints is writable") as caught:
        DurableCheckpointIO(Failing(error), folder).save_checkpoint(NEW, folder / "a.ckpt")
    assert caught.value.__cause__ is error
    assert names_in(folder) == beside(folder) == []


@pytest.mark.parametrize("error", [RuntimeError("the user's"), TypeError("no options"), KeyboardInterrupt()])
def test_errors_that_are_not_of_the_disk_pass(folder, error):
    """Errors that have nothing to do with writing are raised unchanged, and no files are left."""
    with pytest.raises(type(error)) as caught:
        DurableCheckpointIO(Failing(error), folder).save_checkpoint(NEW, folder / "a.ckpt")
    assert caught.value is error
    assert names_in(folder) == beside(folder) == []


def test_what_was_not_written_is_an_error(folder):
    """A CheckpointIO that returns without a file, as Lightning's does when not permitted to write, is an error."""

    class _Silent(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            pass

    with pytest.raises(CheckpointError, match=r"^_Silent returned without writing the checkpoint .*a\.ckpt"):
        DurableCheckpointIO(_Silent(), folder).save_checkpoint(NEW, folder / "a.ckpt")


_ON_A_SMALL_DISK = """
import os, sys, torch
from pathlib import Path
from pytorch_lightning.plugins.io import TorchCheckpointIO
from lightning_sm.training.checkpoints.durable_io import DurableCheckpointIO
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
    """On a mounted 1 MiB volume, like /opt/ml/checkpoints in a container, writing 4 MB fails and keeps the old file."""
    folder.mkdir()
    mount = 'mount -t tmpfs -o size=1m tmpfs "$0" && exec "$@"'
    command = [_UNSHARE, "--mount", "sh", "-c", mount, folder, sys.executable, "-c", _ON_A_SMALL_DISK, folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    said, state = done.stdout.splitlines()
    assert "larger volume (volume_gb in job.yaml, volume_size in the SDK)" in said
    assert state == "{'value': 1} ['a.ckpt'] ['checkpoints']"
