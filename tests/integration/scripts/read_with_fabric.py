"""A user's script with Fabric: each rank writes the numbers that it read in two epochs."""

import json
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from lightning_sm import SageMakerFabric


class Numbers(Dataset):
    """The numbers from 0 to 20."""

    def __len__(self):
        return 21

    def __getitem__(self, index):
        return torch.tensor(index)


fabric = SageMakerFabric(accelerator="cpu", devices=1)
fabric.launch()
fabric.seed_everything(3)
loader = fabric.setup_dataloaders(DataLoader(Numbers(), 4, shuffle=True))
seen = [[batch.tolist() for batch in loader] for _ in range(2)]
fabric.barrier()  # otherwise a rank could exit while another rank is still connecting to it, which would then fail
Path(sys.argv[1], f"read-{fabric.global_rank}.json").write_text(json.dumps(seen))
