"""Reader for the exported weights of a job's model, in either format: one file, or shards."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save


def exported_weights(model_dirs: Iterable[Path]) -> dict[str, torch.Tensor]:
    """Read the only ``state_dict.pt`` in the model folders of all hosts, or else the shards in their ``model.ckpt``."""
    folders = list(model_dirs)
    plain = [path for folder in folders if (path := folder / "state_dict.pt").exists()]
    if plain:
        (path,) = plain
        weights: dict[str, torch.Tensor] = torch.load(path, map_location="cpu")
        return weights
    with tempfile.TemporaryDirectory() as folder:
        merged, whole = Path(folder, "merged"), Path(folder, "whole.pt")
        for shards in (one / "model.ckpt" for one in folders):
            if shards.is_dir():
                shutil.copytree(shards, merged, dirs_exist_ok=True)
        dcp_to_torch_save(merged, whole)
        checkpoint = torch.load(whole)
    # ModelParallelStrategy exports "state_dict", FSDPStrategy "model".
    shards: dict[str, torch.Tensor] = checkpoint["state_dict" if "state_dict" in checkpoint else "model"]
    return shards
