"""A user's training script with SageMakerCLI. Each rank writes the arguments that reached the model."""

import json
import os
from pathlib import Path

import torch
from pytorch_lightning import LightningModule

from lightning_sm import SageMakerCLI


class Tiny(LightningModule):
    """A model with arguments that the toolkit's command line would mangle.

    Args:
        schedule: A dict.
        note: A text or None.
        nesterov: A bool.
        rate: A float.
    """

    def __init__(
        self, schedule: dict[str, float], note: str | None = "default", nesterov: bool = False, rate: float = 0.5
    ) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.arguments = {"schedule": schedule, "note": note, "nesterov": nesterov, "rate": rate}

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(4, 1), batch_size=1)

    def on_fit_start(self):
        seen = {
            "arguments": self.arguments,
            "rank": self.trainer.global_rank,
            "world_size": self.trainer.world_size,
            "met": self.all_gather(torch.tensor(self.trainer.global_rank)).flatten().tolist(),
            "address": os.environ["MASTER_ADDR"],
            "max_epochs": self.trainer.max_epochs,
            "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
        }
        path = Path(os.environ["SAGEMAKER_BASE_DIR"]) / "output" / f"seen-{os.getpid()}.json"
        path.write_text(json.dumps(seen))


if __name__ == "__main__":
    SageMakerCLI(Tiny, save_config_callback=None)
