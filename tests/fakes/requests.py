"""Requests of a trainer to a data host, right but for what a test changes."""

from __future__ import annotations

from typing import Any

# The digest of the DataModule in requests.
DIGEST = "d" * 32


def open_request(loaders: str = "train", *, epoch: int = 0, trainer: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a request to open the loaders of a training, as run 1 makes it; to run ``setup`` if ``loaders`` is empty.

    Args:
        loaders: "train", "val", or empty.
        epoch: The epoch for which they are opened.
        trainer: Values of the Trainer.
    """
    return {
        "opening": f"1/fit/{loaders}/{epoch}",
        "trainer_run": 1,
        "stage": "fit",
        "loaders": loaders,
        "epoch": epoch,
        "seed": 0,
        "prepares": True,
        "trainer": trainer or {},
        "datamodule": DIGEST,
    }


def list_request(**changed: Any) -> dict[str, Any]:
    """Return a request for the order of the sampler of the first training loader.

    Args:
        **changed: Other values.
    """
    request = {"opening": "1/fit/train/0", "loader": 0, "seed": 0, "epoch": 0, "pass_index": 0}
    part = {"rank": 0, "world_size": 1, "batch_size": 4, "drop_last": False, "pads": False}
    part |= {"wants_keys": False, "timeout_s": 60.0}
    return {**request, **part, **changed}


def count_request(**changed: Any) -> dict[str, Any]:
    """Return a request to count the batches of the first training loader, over an iterable dataset.

    Args:
        **changed: Other values.
    """
    request = {"opening": "1/fit/train/0", "loader": 0, "seed": 0, "epoch": 0, "pass_index": 0}
    return {**request, "num_shards": 4, "part": 0, "num_parts": 1, **changed}
