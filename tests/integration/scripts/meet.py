"""Train a tiny model and write each rank's view of itself and of the other ranks.

Arguments: the Trainer settings as JSON, and the stages of each Trainer: ``fit``, ``test`` or ``fit,test``.
"""

import atexit
import json
import os
import sys
from pathlib import Path

import torch
from pytorch_lightning import LightningModule, Trainer

from lightning_sm import SageMakerEnvironment, prepare_process

OUT = Path(os.environ["SAGEMAKER_BASE_DIR"]) / "output"
INHERITED = os.environ.get("RANK")
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")


# Registered first, so it runs last. It also runs in the workers of ddp_spawn, which import this file.
@atexit.register
def write_end():
    (OUT / f"end-{os.getpid()}.json").write_text(json.dumps({"in_group": torch.distributed.is_initialized()}))


class Tiny(LightningModule):
    def __init__(self, host, trainer_number):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.host, self.trainer_number = host, trainer_number

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def test_step(self, batch, batch_idx):
        self.layer(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(16, 1), batch_size=1)

    test_dataloader = train_dataloader

    def on_fit_start(self):
        self.write("fit")

    def on_test_start(self):
        self.write("test")

    def write(self, stage):
        seen = {
            "stage": f"{self.trainer_number} {stage}",
            "host": self.host,
            "rank": self.trainer.global_rank,
            "local_rank": self.trainer.local_rank,
            "node_rank": self.trainer.node_rank,
            "world_size": self.trainer.world_size,
            "met": self.all_gather(torch.tensor(self.trainer.global_rank)).flatten().tolist(),
            "address": os.environ.get("MASTER_ADDR"),
            "port": os.environ.get("MASTER_PORT"),
            "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
            "inherited": INHERITED,
            "variables": {name: os.environ.get(name) for name in VARIABLES},
            "mpi4py": "mpi4py" in sys.modules,
        }
        (OUT / f"seen-{self.trainer_number}-{stage}-{os.getpid()}.json").write_text(json.dumps(seen))


def main():
    settings = json.loads(sys.argv[1])
    for number, stages in enumerate(sys.argv[2:], start=1):
        environment = SageMakerEnvironment()
        if not os.environ.get("UNPREPARED"):
            prepare_process(environment)
        trainer = Trainer(
            accelerator="cpu",
            max_steps=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_test_batches=1,
            plugins=[environment],
            **{"num_nodes": environment.num_nodes, **settings},
        )
        model = Tiny(environment.topology.current_host, number)
        for stage in stages.split(","):
            getattr(trainer, stage)(model)
    if os.environ.get("UNPREPARED"):
        # An unprepared process must do this: a Gloo thread that outlives the interpreter aborts the process (PyTorch
        # issue 179291).
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
