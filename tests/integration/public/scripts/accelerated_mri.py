"""MRI reconstruction in the style of fastMRI: named tuples, random masks, and volumes that stay on one rank."""

import contextlib
from typing import NamedTuple

import numpy as np
import torch
from pytorch_lightning import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_sm import SageMakerCLI


@contextlib.contextmanager
def temp_seed(rng, seed):
    if seed is None:
        yield
        return
    state = rng.get_state()
    rng.seed(seed)
    try:
        yield
    finally:
        rng.set_state(state)


class VarNetSample(NamedTuple):
    masked_kspace: torch.Tensor
    mask: torch.Tensor
    target: torch.Tensor
    fname: str
    slice_num: int
    max_value: float


class RandomMaskFunc:
    def __init__(self, acceleration):
        self.acceleration = acceleration
        self.rng = np.random.RandomState()

    def __call__(self, width, seed=None):
        with temp_seed(self.rng, seed):
            mask = self.rng.uniform(size=width) < 1 / self.acceleration
        mask[width // 2 - 1 : width // 2 + 1] = True
        return torch.from_numpy(mask.astype(np.float32))


class VarNetDataTransform:
    def __init__(self, mask_func, use_seed):
        self.mask_func, self.use_seed = mask_func, use_seed

    def __call__(self, kspace, fname, slice_num):
        mask = self.mask_func(kspace.shape[-1], tuple(map(ord, fname)) if self.use_seed else None)
        target = torch.fft.ifft2(kspace).abs()
        return VarNetSample(kspace * mask, mask, target, fname, slice_num, float(target.max()))


class SliceDataset(Dataset):
    def __init__(self, files, transform):
        self.transform = transform
        self.raw_samples = [(file, number) for file in files for number in range(4)]

    def __len__(self):
        return len(self.raw_samples)

    def __getitem__(self, index):
        file, number = self.raw_samples[index]
        generator = torch.Generator().manual_seed(100 * file + number)
        kspace = torch.complex(torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator))
        return self.transform(kspace, f"file{file}.h5", number)


class VolumeSampler(DistributedSampler):
    """Assigns all slices of a volume to one rank."""

    def __init__(self, dataset):
        super().__init__(dataset, shuffle=False)
        names = sorted({file for file, _ in dataset.raw_samples})
        self.mine = [
            index
            for index, (file, _) in enumerate(dataset.raw_samples)
            if names.index(file) % self.num_replicas == self.rank
        ]

    def __iter__(self):
        return iter(self.mine)

    def __len__(self):
        return len(self.mine)


class FastMriDataModule(LightningDataModule):
    def __init__(self, batch_size: int = 1):
        super().__init__()
        self.save_hyperparameters()

    def make_loader(self, files, use_seed):
        dataset = SliceDataset(files, VarNetDataTransform(RandomMaskFunc(4), use_seed))
        sampler = None
        if torch.distributed.is_initialized():
            sampler = VolumeSampler(dataset) if use_seed else DistributedSampler(dataset)
        return DataLoader(
            dataset, self.hparams.batch_size, num_workers=2, sampler=sampler, shuffle=sampler is None and not use_seed
        )

    def train_dataloader(self):
        return self.make_loader(range(8), use_seed=False)

    def val_dataloader(self):
        return self.make_loader(range(10, 14), use_seed=True)


class VarNet(LightningModule):
    def __init__(self, lr: float = 0.01):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Conv2d(1, 1, 3, padding=1)
        self.seen = {"train": [], "val": []}

    def step(self, batch, stage):
        assert type(batch) is VarNetSample, type(batch)
        assert batch.masked_kspace.dtype == torch.complex64
        assert type(batch.fname) is tuple
        keys = zip(batch.fname, batch.slice_num.tolist(), strict=True)
        values = zip(batch.mask.sum(1).tolist(), batch.max_value.tolist(), strict=True)
        self.seen[stage] += zip(keys, values, strict=True)
        image = torch.fft.ifft2(batch.masked_kspace).abs()
        return torch.nn.functional.l1_loss(self.net(image[:, None])[:, 0], batch.target)

    def training_step(self, batch, batch_idx):
        return self.step(batch, "train")

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.step(batch, "val"), batch_size=len(batch.fname), sync_dist=True)

    def on_train_end(self):
        print(f"seen {self.seen}\n", end="", flush=True)  # one write, so that lines of other ranks cannot mix in

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), self.hparams.lr)


if __name__ == "__main__":
    SageMakerCLI(
        VarNet, FastMriDataModule, trainer_defaults={"num_sanity_val_steps": 0, "use_distributed_sampler": False}
    )
