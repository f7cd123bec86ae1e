"""A user's script with Fabric: it adds up a number from each rank."""

import torch

from lightning_sm import SageMakerFabric

fabric = SageMakerFabric(accelerator="cpu", devices=1)
fabric.launch()
total = fabric.all_reduce(torch.tensor(fabric.global_rank + 1), reduce_op="sum")
print(f"rank {fabric.global_rank} of {fabric.world_size}: the sum of all ranks is {int(total)}", flush=True)
