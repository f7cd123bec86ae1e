"""Measure images per second and waiting time of a GPU, with batches built on its own host or on a data host.

Both jobs train a ResNet in bfloat16 on JPEG images, which are decoded, cropped and flipped. The emulated hosts have
separate cores: the trainer host has ``--trainer-cores``, few as on an instance with one GPU, and the data host has all
others. The jobs alternate. With ``--model none``, a step is a single sum, so that the data path is the bottleneck.

    python benchmarks/gpu.py
"""

from __future__ import annotations

import argparse
import io
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from data_service import machine
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from lightning_sm import SageMakerCLI, SageMakerJob, Topology
from lightning_sm._lightning import LightningDataModule, LightningModule
from lightning_sm._table import draw_table
from lightning_sm.record.runs import read_run
from lightning_sm.report.figures import Figures

_JOB_TIMEOUT_S = 240.0
_TRAINER_CORES = "TRAINER_CORES"
# The mean and standard deviation of ImageNet's channels.
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Pictures(Dataset[tuple[torch.Tensor, int]]):
    """JPEG files of smooth noise, about as large as ImageNet's files scaled to 256 pixels."""

    def __init__(self, num_pictures: int) -> None:
        self.num_pictures = num_pictures
        random = np.random.default_rng(0)
        self.files = []
        for _ in range(64):
            noise = Image.fromarray(random.integers(0, 256, (32, 42, 3), dtype=np.uint8))
            file = io.BytesIO()
            noise.resize((340, 256), Image.Resampling.BICUBIC).save(file, "jpeg", quality=90)
            self.files.append(file.getvalue())
        self.transform = v2.Compose([v2.RandomResizedCrop(224), v2.RandomHorizontalFlip()])

    def __len__(self) -> int:
        return self.num_pictures

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """Decode and augment a picture, and return it as (3, 224, 224) uint8 with its class."""
        picture = Image.open(io.BytesIO(self.files[index % len(self.files)])).convert("RGB")
        return v2.functional.pil_to_tensor(self.transform(picture)), index % 1000


class Batches(LightningDataModule):
    """A data module with shuffled batches."""

    def __init__(self, batch_size: int = 128, num_batches: int = 1000, num_workers: int = 0) -> None:
        super().__init__()
        self.batch_size, self.num_batches, self.num_workers = batch_size, num_batches, num_workers

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the loader of the pictures."""
        pictures = Pictures(self.batch_size * self.num_batches)
        return DataLoader(pictures, self.batch_size, shuffle=True, num_workers=self.num_workers, pin_memory=True)


class Classifier(LightningModule):
    """A ResNet, or merely a sum, that normalizes its input on the device."""

    def __init__(self, model: str = "resnet50") -> None:
        super().__init__()
        self.net = None if model == "none" else getattr(torchvision.models, model)()
        if self.net is not None:
            self.net = self.net.to(memory_format=torch.channels_last)
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.register_buffer("mean", 255 * torch.tensor(_MEAN).view(3, 1, 1))
        self.register_buffer("std", 255 * torch.tensor(_STD).view(3, 1, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the loss."""
        pictures, classes = batch
        inputs = ((pictures - self.mean) / self.std).contiguous(memory_format=torch.channels_last)
        if self.net is None:
            return inputs.mean() * self.scale
        return torch.nn.functional.cross_entropy(self.net(inputs), classes)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return an optimizer."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def train() -> None:
    """Train on this host's share of the cores."""
    cores = sorted(os.sched_getaffinity(0))
    job = SageMakerJob.from_environment()
    if job is not None:
        split = int(os.environ[_TRAINER_CORES])
        is_trainer = Topology.from_job(job).role.value == "trainer"
        os.sched_setaffinity(0, cores[:split] if is_trainer else cores[split:])
    torch.backends.cudnn.benchmark = True
    SageMakerCLI(Classifier, Batches)


def run(options: argparse.Namespace, *, has_data_host: bool) -> Figures:
    """Run a job and return its figures."""
    num_cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "lightning_sm",
            "local",
            "--base-dir",
            folder,
            "--group",
            "trainer=1:ml.g5.xlarge",
        ]
        command += ["--group", "data=1"] if has_data_host else []
        command += ["--env", "CUDA_VISIBLE_DEVICES=0", "--env", "LIGHTNING_SM_REPORT_S=0"]
        command += ["--env", f"{_TRAINER_CORES}={options.trainer_cores}", "--"]
        command += [
            __file__,
            "fit",
            "--trainer.accelerator=gpu",
            "--trainer.devices=1",
            "--trainer.precision=bf16-mixed",
        ]
        command += [f"--trainer.max_steps={options.steps}", "--trainer.max_epochs=1", "--trainer.logger=false"]
        command += ["--trainer.enable_checkpointing=false", "--trainer.enable_progress_bar=false"]
        command += [f"--data.batch_size={options.batch_size}", f"--model.model={options.model}"]
        workers = num_cores - options.trainer_cores if has_data_host else options.trainer_cores
        command += [f"--{'data_service.workers' if has_data_host else 'data.num_workers'}={workers}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_JOB_TIMEOUT_S, check=False)
        if done.returncode != 0:
            sys.exit(f"The job failed:\n{done.stdout}\n{done.stderr}")
        figures = Figures(read_run(Path(folder)))
        _ = figures.pace, figures.hosts, figures.series  # fill the caches before the folder is deleted
        return figures


def main() -> None:
    """Alternate between the jobs and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50", help="a ResNet from torchvision, or none")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--steps", type=int, default=1000, help="steps per job")
    parser.add_argument("--trainer-cores", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    kinds = {"its own workers": False, "a data host": True}
    results: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in kinds}
    for _ in range(options.rounds):
        for kind, has_data_host in kinds.items():
            figures = run(options, has_data_host=has_data_host)
            (trainer,) = [host for host in figures.hosts if host.role == "trainer"]
            ((_, steps),) = figures.series
            begin, end = steps[0].t - steps[0].wall_s, steps[-1].t
            uses = [gpu.use for use in trainer.uses if begin < use.t <= end for gpu in use.gpus]
            use = statistics.fmean(uses) if uses else math.nan
            rate = options.batch_size / figures.pace.step_s
            results[kind].append((rate, figures.pace.waiting, use))
            sys.stdout.write(f"{kind}: {rate:.0f} images/s, waiting {figures.pace.waiting:.1%}, GPU {use:.0%}\n")
            sys.stdout.flush()
    rows = []
    for kind, values in results.items():
        rates, waits, uses = zip(*values, strict=True)
        spread = f"{statistics.median(rates):.0f} ({min(rates):.0f} to {max(rates):.0f})"
        rows.append([kind, spread, f"{statistics.median(waits):.1%}", f"{statistics.median(uses):.0%}"])
    table = draw_table(rows, ["batches from", "images/s", "waiting", "GPU in use"])
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    sys.stdout.write(
        f"{machine()}; {name}; torch {torch.__version__}; trainer with {options.trainer_cores} cores\n{table}\n"
    )


if __name__ == "__main__":
    train() if sys.argv[1:2] == ["fit"] else main()
