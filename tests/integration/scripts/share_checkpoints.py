"""Ranks on two hosts read checkpoints that only one host has, and write what they read."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import distributed

from lightning_sm.training.checkpoints import transfer
from lightning_sm.training.group_exit import leave_at_exit

# Small enough to split the files into several pieces.
transfer._PIECE_BYTES = 1000
BASE = Path(os.environ["SAGEMAKER_BASE_DIR"])
RANK = int(sys.argv[1])


def broadcast(value):
    """Broadcast as a strategy does."""
    values = [value]
    distributed.broadcast_object_list(values, 0)
    return values[0]


TRAINER = SimpleNamespace(node_rank=RANK, local_rank=0, strategy=SimpleNamespace(broadcast=broadcast))


def write(name, value):
    """Write bytes, or any other value with ``torch.save``."""
    path = BASE / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(value, bytes):
        path.write_bytes(value)
    else:
        torch.save(value, path)


def read(path):
    """Read a file, or the files of a folder by name."""
    if path.is_dir():
        return {str(file.relative_to(path)): read(file) for file in sorted(path.rglob("*")) if file.is_file()}
    if not path.exists():
        return None
    return torch.load(path)["of"] if path.suffix == ".ckpt" else path.read_bytes().decode()


def share(name, holder=0):
    """Load a checkpoint; return its content, whether it is the host's own file, and the files left in "received"."""
    path = name if "://" in name else str(BASE / name)
    with transfer.on_every_host(TRAINER, path, BASE / "received", holder) as shared:
        found = read(Path(shared)), shared == path
    return *found, [left.name for left in (BASE / "received").iterdir()] if (BASE / "received").is_dir() else []


def main():
    """Write ``seen-<rank>.json``."""
    leave_at_exit()  # like SageMakerTrainer: ``transfer`` keeps a group
    distributed.init_process_group("gloo", init_method=sys.argv[2], rank=RANK, world_size=2)
    big = torch.arange(5000)
    write("same/last.ckpt", {"of": "both", "x": big})
    write("stale/last.ckpt", {"of": f"host {RANK}", "x": big + RANK})
    write("plain/model.bin", f"of host {RANK}".encode() * 300)
    if RANK == 0:
        write("first/a.ckpt", {"of": "host 0", "x": big})
        write("folder/meta", b"m" * 2500)
    else:
        write("second/a.ckpt", {"of": "host 1", "x": big})
        write("folder/deep/empty", b"")
    seen = {
        "rank": RANK,
        "same": share("same/last.ckpt"),
        "stale": share("stale/last.ckpt", holder=1),
        "plain": share("plain/model.bin"),
        "first": share("first/a.ckpt"),
        "second": share("second/a.ckpt"),
        "folder": share("folder"),
        "none": share("none.ckpt"),
        "address": share("s3://bucket/a.ckpt"),
    }
    (BASE / "output" / f"seen-{RANK}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
