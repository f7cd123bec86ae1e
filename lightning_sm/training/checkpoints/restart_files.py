"""The files of a host from which a restart within the job resumes: states between two steps, and what each rank knew.

They lie in a folder in memory that the launcher makes and removes, or where that has no room, in the checkpoint folder
under a name that SageMaker's agent ignores. Neither outlives the host.
"""

from __future__ import annotations

import contextlib
import copyreg
import io
import os
import pickle
import shutil
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from lightning_sm._text import size
from lightning_sm.errors import CheckpointError
from lightning_sm.job.uploads import IGNORED
from lightning_sm.job.variables import RESTART_DIR
from lightning_sm.training.checkpoints.host_copy import num_bytes

# In the checkpoint folder.
FOLDER = f"restart{IGNORED}"
# Two, so that one is whole when a rank is killed while it writes the other, and when ranks are one step apart.
_NUM_SLOTS = 2
_HEADER_BYTES = 12
# Of a file of torch.save beside its tensors: names, plain values, alignment.
_EXTRA_BYTES = 4 << 20
# Of what is free, for a state of a step that has not failed: workers of loaders and other processes need memory, too.
_MAX_SHARE_OF_FREE = 0.5
# Two, so that one is left if the other is damaged.
_NUM_STATES = 2
_TRIED = ".tried"


class RestartFiles:
    """The files of one fit on this host.

    Args:
        folder: The folder in memory.
        checkpoint_dir: The job's checkpoint folder, if it has one.
        fit: A name for the fit among those of the script.
        rank: The global rank of this process.
    """

    def __init__(self, folder: Path, checkpoint_dir: Path | None, fit: str, rank: int) -> None:
        self._memory = folder
        self._folders = restart_folders(checkpoint_dir, folder)
        self._fit = fit
        self._rank = rank
        self._slots: dict[int, int] = {}

    def write_part(self, step: int, part: Any) -> None:
        """Keep what only this rank knows between two steps, in place of that of two steps ago.

        Raises:
            OSError: There is no room.
        """
        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL)
        pickler.dispatch_table = _DISPATCH
        pickler.dump((step, part))
        content = buffer.getbuffer()
        header = zlib.crc32(content).to_bytes(4, "little") + len(content).to_bytes(8, "little")
        slot = step % _NUM_SLOTS
        if slot not in self._slots:
            self._slots[slot] = os.open(self._slot(slot), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.pwrite(self._slots[slot], header + content, 0)

    def part(self, step: int) -> Any:
        """Return what the process of this rank in the last attempt has kept at a step; None if it has nothing."""
        with contextlib.suppress(FileNotFoundError):
            data = self._slot(step % _NUM_SLOTS).read_bytes()
            length = int.from_bytes(data[4:_HEADER_BYTES], "little")
            content = data[_HEADER_BYTES : _HEADER_BYTES + length]
            if zlib.crc32(content) == int.from_bytes(data[:4], "little"):
                found, part = pickle.loads(content)  # noqa: S301 - in a folder of this user's, by this rank
                return part if found == step else None
        return None

    def claim(self, step: int) -> bool:
        """Return whether this rank is the first one of its host that writes the state of a step."""
        try:
            os.close(os.open(self._memory / f"{self._fit}-step={step}.claimed", os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            return False
        return True

    def write(self, checkpoint: Mapping[str, Any], step: int) -> Path:
        """Write the state before a step that has failed, where there is room.

        Raises:
            CheckpointError: There is none.
        """
        needed = num_bytes(checkpoint) + _EXTRA_BYTES
        rooms = []
        for folder in self._folders:
            folder.mkdir(parents=True, exist_ok=True)
            free = self._free_memory() if folder == self._memory else shutil.disk_usage(folder).free
            rooms.append(f"{size(free)} are free in {folder}")
            if needed <= free:
                path = self._save(checkpoint, folder, step)
                self._remove_earlier(_NUM_STATES)
                return path
        raise CheckpointError(f"it needs {size(needed)}, and {' and '.join(rooms)}")

    def keep(self, checkpoint: Mapping[str, Any], length: int, step: int) -> Path:
        """Write the state of a step into memory, in place of all earlier ones but the latest.

        Args:
            checkpoint: The state.
            length: Bytes of its tensors.
            step: The number of steps before it.

        Raises:
            CheckpointError: There is no room.
            OSError: It cannot be written.
        """
        self._remove_earlier(_NUM_STATES - 1)
        self.check_room(length)
        return self._save(checkpoint, self._memory, step)

    def check_room(self, length: int) -> None:
        """Check that the memory has room for a state.

        Args:
            length: Bytes of its tensors.

        Raises:
            CheckpointError: It has none.
        """
        needed, free = length + _EXTRA_BYTES, self._free_memory()
        if needed > _MAX_SHARE_OF_FREE * free:
            raise CheckpointError(
                f"one needs up to {size(needed)}, and may take half of what is free in {self._memory}, {size(free)}"
            )

    def _remove_earlier(self, num_left: int) -> None:
        """Remove all states but those that were written last."""
        paths = [path for folder in self._folders for path in folder.glob(f"{self._fit}-step=*.ckpt")]
        for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns)[:-num_left]:
            path.unlink(missing_ok=True)

    def _free_memory(self) -> int:
        return min(shutil.disk_usage(self._memory).free, psutil.virtual_memory().available)

    def _save(self, checkpoint: Mapping[str, Any], folder: Path, step: int) -> Path:
        path = folder / f"{self._fit}-step={step}.ckpt"
        unfinished = path.with_name(f"{path.name}.{self._rank}{IGNORED}")
        torch.save(checkpoint, unfinished)
        unfinished.replace(path)
        return path

    def note_tried(self, step: int) -> None:
        """Note that the job resumes from the state of a step, until ``forget_tried``: see ``remove_tried``."""
        (self._memory / f"{self._fit}-step={step}{_TRIED}").touch()

    def forget_tried(self) -> None:
        """Note that the job has made a step since it has resumed."""
        for path in self._memory.glob(f"{self._fit}-*{_TRIED}"):
            path.unlink(missing_ok=True)

    def begin(self) -> None:
        """Let the ranks of this attempt write states, also those of steps of which the last attempt has written one.

        Remove what the last attempt has not written to its end.
        """
        for pattern in ("*.claimed", f"step=*{IGNORED}"):
            for path in self._memory.glob(f"{self._fit}-{pattern}"):
                path.unlink(missing_ok=True)

    def remove_states(self) -> None:
        """Remove the states of steps, which the rank may share with others of its host."""
        for folder in self._folders:
            for path in folder.glob(f"{self._fit}-step=*"):
                path.unlink(missing_ok=True)
            if folder != self._memory:
                with contextlib.suppress(OSError):  # not empty: that of another fit
                    folder.rmdir()

    def close(self) -> None:
        """Remove the parts of this rank."""
        for slot, descriptor in self._slots.items():
            os.close(descriptor)
            self._slot(slot).unlink(missing_ok=True)
        self._slots.clear()

    def _slot(self, slot: int) -> Path:
        return self._memory / f"{self._fit}-rank={self._rank}-{slot}"


def restart_folders(checkpoint_dir: Path | None, memory: Path | None = None) -> list[Path]:
    """Return where this host may have states between two steps; none in a job that does not restart.

    Args:
        checkpoint_dir: The job's checkpoint folder, if it has one.
        memory: The folder in memory. Default: the one that the launcher names.
    """
    memory = memory or RESTART_DIR.read(os.environ)
    if memory is None:
        return []
    return [memory] if checkpoint_dir is None else [memory, checkpoint_dir / FOLDER]


def remove_tried(folders: Sequence[Path]) -> None:
    """Remove the states from which an earlier attempt has resumed without making a step.

    The state itself may be what fails, and there may be an earlier one. Each host notes which one that was, so that it
    is removed wherever it is.

    Args:
        folders: The ``restart_folders`` of this host.
    """
    for note in [path for folder in folders[:1] for path in folder.glob(f"*{_TRIED}")]:
        for folder in folders:
            (folder / note.name).with_suffix(".ckpt").unlink(missing_ok=True)
        note.unlink(missing_ok=True)


def _reduced(tensor: torch.Tensor) -> Any:
    if tensor.device.type != "cpu" or tensor.dtype is torch.bfloat16:
        return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
    return torch.from_numpy, (tensor.detach().numpy(),)


# Pickles small tensors in the memory of the host in a tenth of torch's time.
_DISPATCH = {**copyreg.dispatch_table, torch.Tensor: _reduced}
