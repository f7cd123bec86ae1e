"""CheckpointIOs as users write them, and what they have left in a folder."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from pytorch_lightning.plugins.io import TorchCheckpointIO

OLD, NEW = {"value": torch.zeros(1000)}, {"value": torch.ones(1000)}


class ToPath(TorchCheckpointIO):
    """Write with torch.save(path), as CheckpointIOs of users do."""

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        torch.save(checkpoint, path)


class AsFolder(TorchCheckpointIO):
    """Write a folder with two files, one of them deeper."""

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        Path(path, "deep").mkdir(parents=True)
        torch.save(checkpoint, Path(path, "deep", "part.pt"))
        Path(path, "index").write_text("deep/part.pt")

    def load_checkpoint(self, path, map_location=None):
        return torch.load(Path(path, Path(path, "index").read_text()))


class Recorder(TorchCheckpointIO):
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


class Failing(TorchCheckpointIO):
    """Write a part, then fail."""

    def __init__(self, error):
        self.error = error

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        Path(path).write_bytes(b"half")
        raise self.error


def names_in(folder):
    """All files and folders at any depth, hidden ones, too."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def beside(folder):
    """What is beside the folder, and in the temporary directory."""
    return sorted(
        os.listdir(tempfile.gettempdir()) + [name for name in os.listdir(folder.parent) if name != folder.name]
    )


def same(first, second):
    """Whether two checkpoints are equal."""
    return torch.equal(first["value"], second["value"])
