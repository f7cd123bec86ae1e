"""Keep a training running until one of its ranks has been told to stop, however late the signal arrives."""

from __future__ import annotations

import time
from pathlib import Path

from lightning_sm import SpotCheckpoint
from lightning_sm._lightning import Trainer

_TIMEOUT_S = 90.0


def wait_until_told(trainer: Trainer, folder: Path) -> None:
    """Wait until any rank has been told to stop; return at once in a resumed run.

    Ranks exchange their flags about once a second. Without this wait, a signal that is slow on a busy machine could
    arrive after the training has finished.

    Args:
        trainer: The Trainer of this rank.
        folder: A folder that all ranks share.
    """
    told, deadline = folder / "told", time.monotonic() + _TIMEOUT_S
    (own,) = (one for one in trainer.callbacks if isinstance(one, SpotCheckpoint))
    while trainer.ckpt_path is None and not told.exists():
        assert time.monotonic() < deadline, f"no rank was told to stop in {_TIMEOUT_S:g} s"
        if own._signalled_at is not None:
            told.touch()
        time.sleep(0.01)
