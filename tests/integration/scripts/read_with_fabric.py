"""A user's script with Fabric: each rank writes which numbers it has read, in two epochs."""

import json
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from lightning_sm import SageMakerFabric


class Numbers(Dataset):
    """Numbers."""

    def __len__(self):
        return 21

    def __getitem__(self, index):
        return torch.tensor(index)


fabric = SageMakerFabric(accelerator="cpu", devices=1)
fabric.launch()
fabric.seed_everything(3)
loader = fabric.setup_dataloaders(DataLoader(Numbers(), 4, shuffle=True))
seen = [[batch.tolist() for batch in loader] for _ in range(2)]
fabric.barrier()  # a rank that exits while another one still connects to it would fail that one
Path(sys.argv[1], f"read-{fabric.global_rank}.json").write_text(json.dumps(seen))
