"""Train on a channel that only the data group has. Each rank writes the samples that it trained on to a folder."""

import json
import os
import sys
from pathlib import Path

import torch
from pytorch_lightning import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from lightning_sm import SageMakerCLI, SageMakerTrainer
from lightning_sm.job.facts import SageMakerJob
from tests.fakes.noting_model import NotingModel

# The emulator gives channels to all hosts, so hide them on the trainer hosts.
if os.environ["SM_CURRENT_INSTANCE_GROUP"] == "trainer":
    Path(os.environ["SM_INPUT_CONFIG_DIR"], "inputdataconfig.json").write_text("{}")


class Files(Dataset):
    """The numbers in a folder's files."""

    def __init__(self, folder):
        self.files = sorted(Path(folder).iterdir())

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        return torch.tensor(int(self.files[index].read_text()))


class Data(LightningDataModule):
    """A DataModule without code for data hosts."""

    def __init__(self, data_dir: str = "/opt/ml/input/data/training"):
        super().__init__()
        self.data_dir = data_dir

    def setup(self, stage):
        self.files = Files(self.data_dir)
        self.num_classes = len(self.files)

    def train_dataloader(self):
        return DataLoader(self.files, 2, shuffle=True)


class Model(NotingModel):
    """Records the samples that it is trained on."""

    def training_step(self, batch, batch_idx):
        self.seen += batch.tolist()
        return self.loss()


def main():
    """Train with SageMakerTrainer, then with SageMakerCLI."""
    folder = Path(sys.argv.pop(1))
    quiet = {"max_epochs": 1, "logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    job = SageMakerJob.from_environment()
    own, data = Model(), Data(str(job.base_dir / "input" / "data" / "training"))
    trainer = SageMakerTrainer(accelerator="cpu", **quiet)
    trainer.fit(own, data)
    defaults = {**quiet, "accelerator": "cpu"}
    cli = SageMakerCLI(Model, Data, run=False, args=[], trainer_defaults=defaults, save_config_callback=None)
    cli.trainer.fit(cli.model, cli.datamodule)
    found = {"trainer": own.seen, "cli": cli.model.seen, "classes": [data.num_classes, cli.datamodule.num_classes]}
    (folder / f"seen-{trainer.global_rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
