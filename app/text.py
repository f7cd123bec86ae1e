"""Text for a language model: 0.5 MB of English prose that comes with Python, or your own files."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from pytorch_lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

# A token is a byte of the UTF-8 text.
_NUM_TOKENS = 256

# Where the text is cut, as shares of its bytes: into training, validation and test parts, in this order.
_TRAIN_END, _VAL_END = 0.8, 0.9

Sample = tuple[Tensor, Tensor]


class TextDataModule(LightningDataModule):
    """Windows of a text, byte by byte; each target is the byte that follows.

    The default text is the Python Language Reference as help() shows it: the module pydoc_data.topics of Python's
    standard library, under Python's licence (PSF-2.0). It differs slightly between versions of Python.

    Args:
        data_dir: Folder whose *.txt files are read instead, in the order of their names.
        context: Number of bytes in a window.
        batch_size: Windows per batch and process: two hosts with one process each train on twice as many per step.
        num_workers: Number of worker processes per training process; 0 loads data in the training process itself.
        drop_last: Whether to skip the last batch of a training epoch if it is smaller than the others.
    """

    def __init__(
        self,
        data_dir: str | None = None,
        *,
        context: int = 64,
        batch_size: int = 32,
        num_workers: int = 0,
        drop_last: bool = True,
    ) -> None:
        super().__init__()
        self.data_dir = data_dir
        self.context = context
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.drop_last = drop_last

    @property
    def num_tokens(self) -> int:
        """Number of different tokens: the values of a byte."""
        return _NUM_TOKENS

    def setup(self, stage: str | None = None) -> None:
        """Read and split the text; every process loads all parts, whatever the stage.

        Raises:
            FileNotFoundError: ``data_dir`` has no ``*.txt``.
            ValueError: The text is too short for a window in each part.
        """
        text = _read(self.data_dir)
        cuts = [0, int(_TRAIN_END * len(text)), int(_VAL_END * len(text)), len(text)]
        parts = [text[start:end] for start, end in pairwise(cuts)]
        shortest = min(map(len, parts))
        if shortest <= self.context:
            raise ValueError(
                f"The text in {self.data_dir} has {len(text)} bytes, the smallest of its parts {shortest}: too few for "
                f"a window of context={self.context} and the byte after it. Add text or choose a smaller context."
            )
        self.train_dataset, self.val_dataset, self.test_dataset = (_Windows(part, self.context) for part in parts)

    def train_dataloader(self) -> DataLoader[Sample]:
        """Make the loader of the training windows.

        Returns:
            Batches ``(tokens, targets)`` in a new order every epoch, both (B, context) int64.
        """
        return self._loader(self.train_dataset, shuffle=True, drop_last=self.drop_last)

    def val_dataloader(self) -> DataLoader[Sample]:
        """Make the loader of the validation windows.

        Returns:
            Batches as in training, in the order of the text.
        """
        return self._loader(self.val_dataset)

    def test_dataloader(self) -> DataLoader[Sample]:
        """Make the loader of the test windows.

        Returns:
            Batches as in training, in the order of the text.
        """
        return self._loader(self.test_dataset)

    def predict_dataloader(self) -> DataLoader[Sample]:
        """Make the loader of the windows to predict, which are the test windows.

        Returns:
            Batches as in training, in the order of the text.
        """
        return self._loader(self.test_dataset)

    def _loader(self, dataset: _Windows, shuffle: bool = False, drop_last: bool = False) -> DataLoader[Sample]:
        return DataLoader(
            dataset,
            batch_size=self.batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
        )


class _Windows(Dataset[Sample]):
    """A text in windows that do not overlap; an incomplete window at the end is dropped."""

    def __init__(self, text: bytes, context: int) -> None:
        tokens = torch.from_numpy(np.frombuffer(text, np.uint8).astype(np.int64))
        # unfold returns a view. The last byte of a window is only a target, and the first byte of the next window.
        self._windows = tokens.unfold(0, context + 1, context)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> Sample:
        window = self._windows[index]
        return window[:-1], window[1:]


def _read(data_dir: str | None) -> bytes:
    if data_dir is None:
        from pydoc_data.topics import topics  # noqa: PLC0415  # 0.5 MB, which --help does not need

        return "\n\n".join(topics[name] for name in sorted(topics)).encode()
    files = sorted(Path(data_dir).glob("*.txt"))
    if not files:
        raise FileNotFoundError(
            f"{data_dir} has no *.txt file. Put the text there, or omit data_dir to use the text of Python's own help."
        )
    return b"\n\n".join(file.read_bytes() for file in files)
