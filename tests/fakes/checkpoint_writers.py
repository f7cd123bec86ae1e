"""CheckpointIOs as users write them, and helpers that list the files they wrote."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from pytorch_lightning.plugins.io import TorchCheckpointIO

OLD, NEW = {"value": torch.zeros(1000)}, {"value": torch.ones(1000)}


class ToPath(TorchCheckpointIO):
    """A CheckpointIO that writes with torch.save(path), as users' plugins do."""

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        torch.save(checkpoint, path)


class AsFolder(TorchCheckpointIO):
    """A CheckpointIO that writes a folder with two files, one of them in a subfolder."""

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        Path(path, "deep").mkdir(parents=True)
        torch.save(checkpoint, Path(path, "deep", "part.pt"))
        Path(path, "index").write_text("deep/part.pt")

    def load_checkpoint(self, path, map_location=None):
        return torch.load(Path(path, Path(path, "index").read_text()))


class Recorder(TorchCheckpointIO):
    """A CheckpointIO that records its calls."""

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


class Failing(TorchCheckpointIO):
    """A CheckpointIO that writes part of a checkpoint, then fails."""

    def __init__(self, error):
        self.error = error

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        Path(path).write_bytes(b"half")
        raise self.error


def names_in(folder):
    """Return all files and folders at any depth, including hidden ones."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def beside(folder):
    """Return the siblings of a folder, and the content of the temporary directory."""
    return sorted(
        os.listdir(tempfile.gettempdir()) + [name for name in os.listdir(folder.parent) if name != folder.name]
    )


def same(first, second):
    """Return whether two checkpoints are equal."""
    return torch.equal(first["value"], second["value"])
